"""What of Qwen2's config.json is no field of `Qwen2Config`: the model computes with these values alone."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen2",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    "quantization_config": (None,),
}
