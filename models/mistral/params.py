"""What of Mistral's config.json is no field of `MistralConfig`: the model computes with these values alone."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("mistral",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    "quantization_config": (None,),
}
