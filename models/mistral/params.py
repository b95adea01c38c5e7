"""Fields of Mistral's config.json that `MistralConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("mistral",),
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
}
