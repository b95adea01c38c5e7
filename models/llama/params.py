"""What of LLaMA's config.json is no field of `LlamaConfig`: the model computes with these values alone."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
}
