"""Fields of LLaMA's config.json that `LlamaConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
}
