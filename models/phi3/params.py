"""Fields of Phi-3's config.json that `Phi3Config` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("phi3",),
    "hidden_act": ("silu", "swish"),
    "resid_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "is_causal": (None, True),
}
