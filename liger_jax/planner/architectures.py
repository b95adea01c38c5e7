"""Models by name or by config.json, and how many parameters they have."""

import dataclasses
import difflib
import functools
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from liger_jax.models import auto
from liger_jax.models.core.parameters import ParameterInfo, describe
from liger_jax.models.hugging_face import checkpoint, config_json
from liger_jax.models.hugging_face.source import Source
from liger_jax.planner import defaults, model_names

# The fields of config.json that the planner's numbers depend on.
_LLAMA = dict(model_type="llama", max_position_embeddings=2048, torch_dtype="float16")
_LLAMA_2 = _LLAMA | dict(max_position_embeddings=4096)
_LLAMA_3 = dict(
    model_type="llama", vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, max_position_embeddings=8192
)
_LLAMA_3_1 = _LLAMA_3 | dict(max_position_embeddings=131072)
_LLAMA_3_2 = _LLAMA_3_1 | dict(tie_word_embeddings=True)
_SMOL = dict(model_type="llama", vocab_size=49152, tie_word_embeddings=True, rope_theta=10000.0)
_SMOL_2 = _SMOL | dict(rope_theta=100000.0, max_position_embeddings=8192)
_DEEPSEEK_CODER = dict(model_type="llama", vocab_size=32256, rope_theta=100000.0, max_position_embeddings=16384)
_YI = dict(model_type="llama", vocab_size=64000, rope_theta=5000000.0, max_position_embeddings=4096)
_FALCON_3 = dict(model_type="llama", vocab_size=131072, head_dim=256, max_position_embeddings=32768)
_MISTRAL = dict(
    model_type="mistral", num_key_value_heads=8, head_dim=128, sliding_window=None, rope_theta=1000000.0,
    max_position_embeddings=32768,
)  # fmt: skip
_QWEN1_5 = dict(model_type="qwen2", vocab_size=151936, rope_theta=1000000.0, max_position_embeddings=32768)
_QWEN2 = dict(model_type="qwen2", vocab_size=152064, rope_theta=1000000.0, max_position_embeddings=131072)
_SMALL_QWEN2 = _QWEN2 | dict(vocab_size=151936, tie_word_embeddings=True)
_SMALL_QWEN2_5 = _SMALL_QWEN2 | dict(max_position_embeddings=32768)
_QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, num_key_value_heads=8, head_dim=128, rope_theta=1000000.0,
    max_position_embeddings=40960,
)  # fmt: skip
_SMALL_QWEN3 = _QWEN3 | dict(tie_word_embeddings=True)
_GEMMA = dict(model_type="gemma", vocab_size=256000, head_dim=256, max_position_embeddings=8192)
_GEMMA_2 = _GEMMA | dict(model_type="gemma2", sliding_window=4096, torch_dtype="float32")
_GEMMA_3 = dict(
    model_type="gemma3_text", vocab_size=262208, head_dim=256, sliding_window=1024, rope_theta=1000000.0,
    max_position_embeddings=131072,
)  # fmt: skip
_GEMMA_4 = dict(model_type="gemma4_text", vocab_size=262144, head_dim=256, max_position_embeddings=131072)
_OLMO_2 = dict(model_type="olmo2", vocab_size=100352, rope_theta=500000.0, max_position_embeddings=4096)
_OLMO_3 = dict(model_type="olmo3", vocab_size=100278, rope_theta=500000.0, max_position_embeddings=65536)
_EXAONE_4 = dict(model_type="exaone4", vocab_size=102400, rope_theta=1000000.0)
_GLM_4 = dict(model_type="glm4", vocab_size=151552, head_dim=128, rope_theta=10000.0, max_position_embeddings=32768)
_MINISTRAL_3 = dict(model_type="ministral3", vocab_size=131072, head_dim=128, max_position_embeddings=262144)
_GRANITE_3 = dict(
    model_type="granite", vocab_size=49155, embedding_multiplier=12.0, residual_multiplier=0.22,
    tie_word_embeddings=True, rope_theta=10000.0, max_position_embeddings=4096,
)  # fmt: skip
_GRANITE_3_1 = _GRANITE_3 | dict(max_position_embeddings=131072)
_SMOLLM_3 = dict(
    model_type="smollm3", vocab_size=128256, rope_theta=5000000.0, max_position_embeddings=65536,
    tie_word_embeddings=True,
)  # fmt: skip
_PHI_3 = dict(model_type="phi3", vocab_size=32064, max_position_embeddings=4096)
_PHI_3_128K = _PHI_3 | dict(max_position_embeddings=131072)
_MIXTRAL = dict(
    model_type="mixtral", num_key_value_heads=8, rope_theta=1000000.0, num_experts_per_tok=2, num_local_experts=8,
    router_aux_loss_coef=0.02,
)  # fmt: skip
_QWEN3_MOE = dict(
    model_type="qwen3_moe", vocab_size=151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, rope_theta=1000000.0, max_position_embeddings=40960,
)  # fmt: skip
_OLMOE = dict(
    model_type="olmoe", vocab_size=50304, num_experts=64, num_experts_per_tok=8, rope_theta=10000.0,
    max_position_embeddings=4096,
)  # fmt: skip
_GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=201088, head_dim=64, num_experts_per_tok=4, rope_theta=150000.0,
    sliding_window=128, attention_bias=True, max_position_embeddings=131072,
)  # fmt: skip
_GATED_DELTA_NET = dict(
    head_dim=256, rope_theta=10000000.0, partial_rotary_factor=0.25, max_position_embeddings=262144,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
_QWEN3_NEXT = _GATED_DELTA_NET | dict(
    model_type="qwen3_next", vocab_size=151936, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)  # fmt: skip
_QWEN3_5 = _GATED_DELTA_NET | dict(model_type="qwen3_5_text", vocab_size=248320)
_QWEN3_5_MOE = _GATED_DELTA_NET | dict(
    model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2,
    num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip
_OLMO_HYBRID = dict(model_type="olmo_hybrid", vocab_size=100352, rope_theta=None, max_position_embeddings=65536)
_LFM_2 = dict(
    model_type="lfm2", vocab_size=65536, max_position_embeddings=128000, num_key_value_heads=8,
    full_attn_idxs=[2, 5, 8, 10, 12, 14],
)  # fmt: skip
_SMALL_GEMMA_3 = _GEMMA_3 | dict(vocab_size=262144, sliding_window=512, max_position_embeddings=32768)


def _sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any) -> dict:
    sizes = dict(hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads)
    return sizes | ({"num_key_value_heads": kv_heads} if kv_heads else {}) | others


def _types(period: int, count: int) -> list[str]:
    """Types of layers of which every nth has full attention, and the others slide."""
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]


# A key is the last component of a model's id on Hugging Face, without the words that say how the model was trained
# (`_untrained`). Models that take images, too, are here with their language model.
MODELS: dict[str, dict[str, Any]] = {
    "llama-7b": _LLAMA | _sizes(4096, 11008, 32, 32),
    "llama-13b": _LLAMA | _sizes(5120, 13824, 40, 40),
    "llama-2-7b": _LLAMA_2 | _sizes(4096, 11008, 32, 32),
    "llama-2-13b": _LLAMA_2 | _sizes(5120, 13824, 40, 40),
    "llama-2-70b": _LLAMA_2 | _sizes(8192, 28672, 80, 64, 8),
    "llama-3-8b": _LLAMA_3 | _sizes(4096, 14336, 32, 32),
    "llama-3-70b": _LLAMA_3 | _sizes(8192, 28672, 80, 64),
    "llama-3.1-8b": _LLAMA_3_1 | _sizes(4096, 14336, 32, 32),
    "llama-3.1-70b": _LLAMA_3_1 | _sizes(8192, 28672, 80, 64),
    "llama-3.1-405b": _LLAMA_3_1 | _sizes(16384, 53248, 126, 128),
    "llama-3.2-1b": _LLAMA_3_2 | _sizes(2048, 8192, 16, 32),
    "llama-3.2-3b": _LLAMA_3_2 | _sizes(3072, 8192, 28, 24),
    "llama-3.3-70b": _LLAMA_3_1 | _sizes(8192, 28672, 80, 64),
    "tinyllama-1.1b": _LLAMA | _sizes(2048, 5632, 22, 32, 4, torch_dtype="bfloat16"),
    "falcon3-7b": _FALCON_3 | _sizes(3072, 23040, 28, 12, 4),
    "falcon3-10b": _FALCON_3 | _sizes(3072, 23040, 40, 12, 4),
    "smollm-135m": _SMOL | _sizes(576, 1536, 30, 9, 3),
    "smollm-360m": _SMOL | _sizes(960, 2560, 32, 15, 5),
    "smollm-1.7b": _SMOL | _sizes(2048, 8192, 24, 32, 32),
    "smollm2-135m": _SMOL_2 | _sizes(576, 1536, 30, 9, 3),
    "smollm2-360m": _SMOL_2 | _sizes(960, 2560, 32, 15, 5),
    "smollm2-1.7b": _SMOL_2 | _sizes(2048, 8192, 24, 32, 32, rope_theta=130000.0),
    "deepseek-coder-1.3b": _DEEPSEEK_CODER | _sizes(2048, 5504, 24, 16, 16),
    "deepseek-coder-6.7b": _DEEPSEEK_CODER | _sizes(4096, 11008, 32, 32, 32),
    "deepseek-coder-33b": _DEEPSEEK_CODER | _sizes(7168, 19200, 62, 56, 8),
    "yi-6b": _YI | _sizes(4096, 11008, 32, 32, 4),
    "yi-1.5-6b": _YI | _sizes(4096, 11008, 32, 32, 4),
    "yi-1.5-9b": _YI | _sizes(4096, 11008, 48, 32, 4),
    "yi-1.5-34b": _YI | _sizes(7168, 20480, 60, 56, 8),
    "mistral-7b-v0.1": _MISTRAL | _sizes(4096, 14336, 32, 32, sliding_window=4096, rope_theta=10000.0),
    "mistral-7b-v0.2": _MISTRAL | _sizes(4096, 14336, 32, 32),
    "mistral-7b-v0.3": _MISTRAL | _sizes(4096, 14336, 32, 32, vocab_size=32768),
    "mistral-nemo-2407": _MISTRAL | _sizes(5120, 14336, 40, 32, vocab_size=131072, max_position_embeddings=131072),
    "mistral-small-24b-2501": _MISTRAL | _sizes(5120, 32768, 40, 32, vocab_size=131072, rope_theta=100000000.0),
    "ministral-8b-2410": _MISTRAL | _sizes(4096, 12288, 36, 32, vocab_size=131072, sliding_window=32768),
    "ministral-3-3b-2512": _MINISTRAL_3 | _sizes(3072, 9216, 26, 32, 8, tie_word_embeddings=True),
    "ministral-3-8b-2512": _MINISTRAL_3 | _sizes(4096, 14336, 34, 32, 8),
    "ministral-3-14b-2512": _MINISTRAL_3 | _sizes(5120, 16384, 40, 32, 8),
    "mistral-small-2409": _MISTRAL | _sizes(6144, 16384, 56, 48, vocab_size=32768),
    "mistral-large-2407": _MISTRAL | _sizes(12288, 28672, 88, 96, vocab_size=32768, max_position_embeddings=131072),
    "codestral-22b-v0.1": _MISTRAL | _sizes(6144, 16384, 56, 48, vocab_size=32768),
    "qwen1.5-0.5b": _QWEN1_5 | _sizes(1024, 2816, 24, 16, 16, tie_word_embeddings=True),
    "qwen1.5-1.8b": _QWEN1_5 | _sizes(2048, 5504, 24, 16, 16),
    "qwen1.5-4b": _QWEN1_5 | _sizes(2560, 6912, 40, 20, 20),
    "qwen1.5-7b": _QWEN1_5 | _sizes(4096, 11008, 32, 32, 32),
    "qwen1.5-14b": _QWEN1_5 | _sizes(5120, 13696, 40, 40, 40, vocab_size=152064),
    "qwen2-0.5b": _SMALL_QWEN2 | _sizes(896, 4864, 24, 14, 2),
    "qwen2-1.5b": _SMALL_QWEN2 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2-7b": _QWEN2 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2-72b": _QWEN2 | _sizes(8192, 29568, 80, 64, 8),
    "qwen2.5-0.5b": _SMALL_QWEN2_5 | _sizes(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _SMALL_QWEN2 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _SMALL_QWEN2_5 | _sizes(2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _QWEN2 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _QWEN2 | _sizes(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _QWEN2 | _sizes(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _QWEN2 | _sizes(8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _SMALL_QWEN3 | _sizes(1024, 3072, 28, 16),
    "qwen3-1.7b": _SMALL_QWEN3 | _sizes(2048, 6144, 28, 16),
    "qwen3-4b": _SMALL_QWEN3 | _sizes(2560, 9728, 36, 32),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "gemma-2b": _GEMMA | _sizes(2048, 16384, 18, 8, 1),
    "gemma-7b": _GEMMA | _sizes(3072, 24576, 28, 16, 16),
    "gemma-2-2b": _GEMMA_2 | _sizes(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _GEMMA_2 | _sizes(3584, 14336, 42, 16, 8),
    "gemma-2-27b": _GEMMA_2 | _sizes(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-270m": _SMALL_GEMMA_3 | _sizes(640, 2048, 18, 4, 1),
    "gemma-3-1b": _SMALL_GEMMA_3 | _sizes(1152, 6912, 26, 4, 1),
    "gemma-3-4b": _GEMMA_3 | _sizes(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _GEMMA_3 | _sizes(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _GEMMA_3 | _sizes(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "gemma-4-e2b": _GEMMA_4
    | _sizes(1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=_types(5, 35)),
    "gemma-4-e4b": _GEMMA_4 | _sizes(2560, 10240, 42, 8, 2, num_kv_shared_layers=18),
    "gemma-4-31b": _GEMMA_4 | _sizes(
        5376, 21504, 60, 32, 16, num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        sliding_window=1024, max_position_embeddings=262144,
    ),
    "olmo-2-0425-1b": _OLMO_2 | _sizes(2048, 8192, 16, 16),
    "olmo-2-1124-7b": _OLMO_2 | _sizes(4096, 11008, 32, 32),
    "olmo-2-1124-13b": _OLMO_2 | _sizes(5120, 13824, 40, 40),
    "olmo-2-0325-32b": _OLMO_2 | _sizes(5120, 27648, 64, 40, 8),
    "olmo-3-1025-7b": _OLMO_3 | _sizes(4096, 11008, 32, 32),
    "olmo-3-1125-32b": _OLMO_3 | _sizes(5120, 27648, 64, 40, 8),
    "exaone-4.0-1.2b": _EXAONE_4 | _sizes(
        2048, 4096, 30, 32, 8, head_dim=64, sliding_window=None, tie_word_embeddings=True, max_position_embeddings=65536
    ),
    "exaone-4.0-32b": _EXAONE_4 | _sizes(
        5120, 27392, 64, 40, 8, head_dim=128, sliding_window=4096, max_position_embeddings=131072
    ),
    "glm-4-9b-0414": _GLM_4 | _sizes(4096, 13696, 40, 32, 2),
    "glm-4-32b-0414": _GLM_4 | _sizes(6144, 23040, 61, 48, 2, attention_bias=False),
    "granite-3.0-2b": _GRANITE_3 | _sizes(2048, 8192, 40, 32, 8, attention_multiplier=0.015625, logits_scaling=8.0),
    "granite-3.0-8b": _GRANITE_3 | _sizes(4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0),
    "granite-3.1-2b": _GRANITE_3_1 | _sizes(
        2048, 8192, 40, 32, 8, attention_multiplier=0.015625, logits_scaling=8.0, rope_theta=5000000.0
    ),
    "granite-3.1-8b": _GRANITE_3_1 | _sizes(
        4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0, rope_theta=10000000.0
    ),
    "phi-3-mini-4k": _PHI_3 | _sizes(3072, 8192, 32, 32, sliding_window=2047),
    "phi-3-mini-128k": _PHI_3_128K | _sizes(3072, 8192, 32, 32, sliding_window=262144),
    "phi-3-medium-4k": _PHI_3 | _sizes(5120, 17920, 40, 40, 10, sliding_window=2047),
    "phi-3-medium-128k": _PHI_3_128K | _sizes(5120, 17920, 40, 40, 10, sliding_window=131072),
    "phi-3.5-mini": _PHI_3_128K | _sizes(3072, 8192, 32, 32, sliding_window=262144),
    "phi-4": _PHI_3
    | _sizes(5120, 17920, 40, 40, 10, vocab_size=100352, rope_theta=250000.0, max_position_embeddings=16384),
    "phi-4-mini": _PHI_3_128K | _sizes(
        3072, 8192, 32, 24, 8, vocab_size=200064, partial_rotary_factor=0.75, sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "mixtral-8x7b-v0.1": _MIXTRAL | _sizes(4096, 14336, 32, 32, vocab_size=32000, max_position_embeddings=32768),
    "mixtral-8x22b-v0.1": _MIXTRAL | _sizes(6144, 16384, 56, 48, vocab_size=32768, max_position_embeddings=65536),
    "qwen3-30b-a3b": _QWEN3_MOE | _sizes(2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen3-235b-a22b": _QWEN3_MOE | _sizes(4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    "olmoe-1b-7b-0924": _OLMOE | _sizes(2048, 1024, 16, 16, 16),
    "gpt-oss-20b": _GPT_OSS | _sizes(2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _GPT_OSS | _sizes(2880, 2880, 36, 64, 8, num_local_experts=128),
    "qwen3-next-80b-a3b": _QWEN3_NEXT | _sizes(2048, 5120, 48, 16, 2),
    "qwen3.5-9b": _QWEN3_5 | _sizes(4096, 12288, 32, 16, 4),
    "qwen3.5-35b-a3b": _QWEN3_5_MOE | dict(num_hidden_layers=40, num_experts=256),
    "olmo-hybrid-7b": _OLMO_HYBRID | _sizes(3840, 11008, 32, 30, 30),
    "lfm2-350m": _LFM_2 | _sizes(1024, 6656, 16, 16),
    "lfm2-700m": _LFM_2 | _sizes(1536, 10240, 16, 24),
    "lfm2-1.2b": _LFM_2 | _sizes(2048, 12288, 16, 32),
    "lfm2-2.6b": _LFM_2 | _sizes(
        2048, 10752, 30, 32, block_auto_adjust_ff_dim=False, full_attn_idxs=[2, 5, 9, 13, 17, 21, 24, 27]
    ),
    "smollm3-3b": _SMOLLM_3 | _sizes(2048, 11008, 36, 16, 4),
}  # fmt: skip
_TRAINING = {"base", "chat", "hf", "instruct", "it", "pt", "meta"}  # words of a name that say how a model was trained


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family and a configuration: all that defines a model, except its weights."""

    name: str  # as it was asked for
    family: Any  # its class, a `CausalLM`
    config: Any  # what the class takes
    dtype: str = defaults.DTYPE  # of the checkpoint's weights
    quantized: str | None = None  # "nf4" if the checkpoint's projections are quantised so, else `None`

    def abstract(self, **options: Any) -> tuple[Any, Any]:
        """The model with abstract arrays."""
        make = lambda: self.family(self.config, **options, rngs=nnx.Rngs(0))
        return nnx.split(nnx.eval_shape(make))

    @functools.cached_property
    def parameters(self) -> list[tuple[ParameterInfo, Any]]:
        """All parameters and types. One stack holds all layers where those of other types have equal parameters."""
        config, count = self.config, self.config.num_hidden_layers
        if config.num_recurrent_layers:
            return self._described(config)
        of_one_type = dict(layer_types=("full_attention",) * count, no_rope_layers=(1,) * count)
        fields = set() if config.layers_differ else {field.name for field in dataclasses.fields(config)}
        config = dataclasses.replace(config, **{name: x for name, x in of_one_type.items() if name in fields})
        return self._described(config)

    def _described(self, config: Any) -> list[tuple[ParameterInfo, Any]]:
        state = dataclasses.replace(self, config=config).abstract()[1]
        return list(zip(describe(state).values(), jax.tree.leaves(state), strict=True))

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained; a tied head counts once."""
        return sum(math.prod(x.shape) for _, x in self.parameters)

    @property
    def num_active_parameters(self) -> int:
        """How many of them a token uses: of a mixture of experts, those of its experts."""
        experts = self.config.experts
        active = 0
        for info, x in self.parameters:
            size = math.prod(x.shape)
            active += size if info.expert_axis is None else size // experts.count * experts.per_token
        return active


def architecture(name_or_path: str | os.PathLike[str]) -> Architecture:
    """Finds a model by its name, by a Hugging Face config.json, or by the folder of that file.

    Args:
        name_or_path: a path, one of `MODELS`, or an id on Hugging Face; the case of names does not matter. An existing
            file or folder of that name takes precedence.

    Returns:
        The architecture.

    Raises:
        ValueError: it is neither a file nor a known name, the family is not supported, or the model does not support
            the config.
        OSError: the file cannot be read.

    Example:
        >>> architecture("Qwen/Qwen2-0.5B").num_parameters
        494032768
    """
    name = str(name_or_path)
    path = pathlib.Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        values = checkpoint.config_values(path)
        values, quantized = _without_quantization(values, path)
        return _architecture(name, values, path, quantized)
    return _architecture(name, *_known(name))


def architecture_of(source: Source) -> Architecture:
    """The model of a checkpoint's folder, whose config.json is read once."""
    return _architecture(str(source.folder), source.config, source.path)


def _architecture(
    name: str, values: Mapping[str, Any], source: pathlib.Path, quantized: str | None = None
) -> Architecture:
    family = auto.FAMILIES.get(values.get("model_type"))
    if family is None:
        raise ValueError(
            f"model={name!r} has model_type={values.get('model_type')!r}, which must be one of {sorted(auto.FAMILIES)}."
        )
    config = config_json.read(values, family.config_type, family.config_fixed, source)
    return Architecture(name, family, config, config_json.dtype_of(values, source), quantized)


def _without_quantization(values: Mapping[str, Any], path: pathlib.Path) -> tuple[Mapping[str, Any], str | None]:
    """The fields of a checkpoint that bitsandbytes has quantised, as those of one that is not, and "nf4"."""
    how = values.get("quantization_config")
    if not isinstance(how, dict) or how.get("quant_method") != "bitsandbytes" or not how.get("load_in_4bit"):
        return values, None  # another quantisation is refused where the fields are read
    if (kind := how.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise ValueError(f"{path}: bnb_4bit_quant_type={kind!r} must be 'nf4', the only one that is supported.")
    return {name: value for name, value in values.items() if name != "quantization_config"}, "nf4"


def _known(name: str) -> tuple[dict[str, Any], pathlib.Path, str | None]:
    """The fields of a model's config.json by its name or id, the name as a path, and how its weights are quantised."""
    known, quantized = model_names.without_quantization(_last_part(name))
    for tried in (known, _untrained(known)):
        key, others = model_names.VARIANTS.get(tried, (tried, {}))
        if key in MODELS:
            others = others | {"torch_dtype": defaults.DTYPE} if quantized else others  # whatever it was made of
            return {"torch_dtype": defaults.DTYPE} | MODELS[key] | others, pathlib.Path(name), quantized
    raise ValueError(_unknown(name, _untrained(known)))


def _last_part(name: str) -> str:
    """An id without its organisation, in small letters."""
    return name.lower().rstrip("/").rpartition("/")[2].replace("_", "-")


def _untrained(name: str) -> str:
    """A name without words of `_TRAINING`: "meta-llama-3-8b-instruct" is "llama-3-8b"."""
    return "-".join(word for word in name.split("-") if word not in _TRAINING)


def _unknown(name: str, short: str) -> str:
    """The message for an unknown name: of what kind the model is, or which names of its size look like it."""
    if (reason := model_names.refusal(_last_part(name), auto.FAMILIES)) is not None:
        return f"model={name!r} {reason}"
    size = re.search(r"(?<![\w.])\d+(\.\d+)?[bm]\b", short)
    near = [key for key in (*MODELS, *model_names.VARIANTS) if size is None or size[0] in key.split("-")]
    if made_of := max((key for key in near if f"-{key}-" in f"-{short}-"), key=len, default=None):
        hint = f"If it was trained from {made_of!r}, plan with that name."
    else:
        near = difflib.get_close_matches(short, near, n=3, cutoff=0.8)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known are {', '.join(MODELS)}."
    return f"model={name!r} is neither a file nor known. {hint} For any other model pass the path of its config.json."
