"""The model class that a checkpoint's config.json names."""

import os
from typing import Any

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM
from liger_jax.models.hugging_face import checkpoint
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.mistral import MistralForCausalLM
from liger_jax.models.qwen2 import Qwen2ForCausalLM
from liger_jax.models.qwen3 import Qwen3ForCausalLM

FAMILIES = {
    "gemma": GemmaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


class AutoModelForCausalLM:
    """Loads whichever family a checkpoint is of."""

    @staticmethod
    def from_pretrained(path_or_id: str | os.PathLike[str], **options: Any) -> CausalLM:
        """The `from_pretrained` of the class that `model_type` in config.json stands for.

        Args:
            path_or_id: a folder or an id.
            **options: as `CausalLM.from_pretrained` takes them.

        Returns:
            A model of that class.

        Raises:
            ValueError: `model_type` is of no family here; see `CausalLM.from_pretrained` for the rest.
        """
        folder = checkpoint.find(path_or_id)
        model_type = checkpoint.read_config(folder).get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(
                f"AutoModelForCausalLM: model_type={model_type!r} in {folder} must be one of {sorted(FAMILIES)}."
            )
        return FAMILIES[model_type].from_pretrained(folder, **options)
