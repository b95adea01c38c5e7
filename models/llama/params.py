"""Fields of LLaMA's config.json that `LlamaConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "is_causal": (None, True),
}
