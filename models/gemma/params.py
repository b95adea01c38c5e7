"""Fields of Gemma's config.json that its configs do not have, and the only values that the models support."""

from typing import Any

_ALL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
}
_GELU = "gelu_pytorch_tanh"
# The first checkpoints say "gelu", and mean the tanh form.
GEMMA = {"model_type": ("gemma",), "hidden_act": (_GELU, "gelu"), "hidden_activation": (_GELU, None), **_ALL}
GEMMA2 = {"model_type": ("gemma2",), "hidden_activation": (_GELU,), **_ALL}
GEMMA3 = {
    "model_type": ("gemma3_text",),
    "hidden_activation": (_GELU,),
    "attn_logit_softcapping": (None,),  # Hugging Face reads it and does not apply it
    **_ALL,
}
