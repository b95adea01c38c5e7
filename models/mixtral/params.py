"""Fields of Mixtral's config.json that `MixtralConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("mixtral",),
    "hidden_act": ("silu", "swish"),
    "router_jitter_noise": (0.0, None),
    "is_causal": (None, True),
}
