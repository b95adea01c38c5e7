"""Fields of Qwen3-MoE's config.json that `Qwen3MoeConfig` does not have, and the only values that are supported."""

from liger_jax.models.qwen3.params import FIXED as QWEN3

FIXED = {**QWEN3, "model_type": ("qwen3_moe",)}
