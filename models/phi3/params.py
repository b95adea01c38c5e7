"""Fields of Phi-3's config.json that `Phi3Config` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("phi3",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    "resid_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "quantization_config": (None,),
    "is_causal": (None, True),
}
