"""Fields of OLMo 2's config.json that `Olmo2Config` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("olmo2",),
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
}
