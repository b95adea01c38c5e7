"""Choosing the model class by a checkpoint's config.json."""

import os
from typing import Any

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.exaone4 import Exaone4ForCausalLM
from liger_jax.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM
from liger_jax.models.gemma4 import Gemma4ForCausalLM
from liger_jax.models.glm4 import Glm4ForCausalLM
from liger_jax.models.gpt_oss import GptOssForCausalLM
from liger_jax.models.granite import GraniteForCausalLM
from liger_jax.models.hugging_face.adapted_source import base_of, is_adapted
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.models.hunyuan import HunYuanDenseV1ForCausalLM
from liger_jax.models.lfm2 import Lfm2ForCausalLM
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.lora.files import load_adapters
from liger_jax.models.ministral3 import Ministral3ForCausalLM
from liger_jax.models.mistral import MistralForCausalLM
from liger_jax.models.mixtral import MixtralForCausalLM
from liger_jax.models.olmo2 import Olmo2ForCausalLM
from liger_jax.models.olmo3 import Olmo3ForCausalLM
from liger_jax.models.olmo_hybrid import OlmoHybridForCausalLM
from liger_jax.models.olmoe import OlmoeForCausalLM
from liger_jax.models.phi3 import Phi3ForCausalLM
from liger_jax.models.qwen2 import Qwen2ForCausalLM
from liger_jax.models.qwen3 import Qwen3ForCausalLM
from liger_jax.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from liger_jax.models.qwen3_moe import Qwen3MoeForCausalLM
from liger_jax.models.qwen3_next import Qwen3NextForCausalLM
from liger_jax.models.smollm3 import SmolLM3ForCausalLM

FAMILIES = {
    "exaone4": Exaone4ForCausalLM,
    "gemma": GemmaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
    "gemma4_text": Gemma4ForCausalLM,
    "gemma4_unified_text": Gemma4ForCausalLM,
    "glm4": Glm4ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "granite": GraniteForCausalLM,
    "hunyuan_v1_dense": HunYuanDenseV1ForCausalLM,
    "lfm2": Lfm2ForCausalLM,
    "llama": LlamaForCausalLM,
    "ministral3": Ministral3ForCausalLM,
    "mistral": MistralForCausalLM,
    "mixtral": MixtralForCausalLM,
    "olmo2": Olmo2ForCausalLM,
    "olmo3": Olmo3ForCausalLM,
    "olmo_hybrid": OlmoHybridForCausalLM,
    "olmoe": OlmoeForCausalLM,
    "phi3": Phi3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_vl_text": Qwen3ForCausalLM,
    "qwen3_5_moe_text": Qwen3_5MoeForCausalLM,
    "qwen3_5_text": Qwen3_5ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
    "smollm3": SmolLM3ForCausalLM,
}


class AutoModelForCausalLM:
    """Loads a checkpoint of any family."""

    @staticmethod
    def from_pretrained(path_or_id: str | os.PathLike[str] | Source, **options: Any) -> CausalLM:
        """Reads a model with the class that `model_type` in config.json names.

        Args:
            path_or_id: as for `CausalLM.from_pretrained`; or a folder of adapters, written by PEFT or `save_adapters`.
                The model is then the one that `base_model_name_or_path` names, with these adapters.
            **options: options of `CausalLM.from_pretrained`.

        Returns:
            A model of that class.

        Raises:
            ValueError: the `model_type` is not supported, `CausalLM.from_pretrained` refuses the checkpoint, or
                `load_adapters` refuses the adapters.
            FileNotFoundError: the folder, or the model of the adapters, does not exist.
        """
        source = find(path_or_id)
        if is_adapted(source):
            base, _ = base_of(source)
            return load_adapters(AutoModelForCausalLM.from_pretrained(base, **options), source.folder)
        model_type = source.config.get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(
                f"AutoModelForCausalLM: model_type={model_type!r} in {source.folder} must be one of {sorted(FAMILIES)}."
            )
        return FAMILIES[model_type].from_pretrained(source, **options)
