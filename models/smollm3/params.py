"""Fields of SmolLM3's config.json that `SmolLM3Config` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("smollm3",),
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
}
