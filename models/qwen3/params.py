"""What of Qwen3's config.json is no field of `Qwen3Config`: the model computes with these values alone."""

from liger_jax.models.qwen2.params import FIXED as QWEN2

FIXED = {**QWEN2, "model_type": ("qwen3",), "attention_bias": (False,)}
