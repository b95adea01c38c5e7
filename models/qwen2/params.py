"""Fields of Qwen2's config.json that `Qwen2Config` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen2",),
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
}
