"""Fields of OLMoE's config.json that `OlmoeConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("olmoe",),
    "hidden_act": ("silu", "swish"),
    "clip_qkv": (None,),
    "is_causal": (None, True),
}
