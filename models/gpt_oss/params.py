"""Fields of gpt-oss's config.json that `GptOssConfig` does not have, and the only values that the model supports."""

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_oss",),
    "hidden_act": ("silu", "swish"),
    "swiglu_limit": (7.0,),
    "is_causal": (None, True),
}
