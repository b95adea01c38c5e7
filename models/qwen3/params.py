"""Fields of Qwen3's config.json that `Qwen3Config` does not have, and the only values that the model supports."""

from liger_jax.models.qwen2.params import FIXED as QWEN2

FIXED = {**QWEN2, "model_type": ("qwen3",)}
