"""Flax NNX language models built on liger_jax.ops: import a class, call it with labels, get the loss."""

from liger_jax.models.auto import AutoModelForCausalLM as AutoModelForCausalLM
from liger_jax.models.causal_lm import CausalLM as CausalLM
from liger_jax.models.core.cache import KVCache as KVCache
from liger_jax.models.core.generation import generate as generate
from liger_jax.models.core.kernel_options import KernelOptions as KernelOptions
from liger_jax.models.core.layout import Layout as Layout
from liger_jax.models.core.output import CausalLMOutput as CausalLMOutput
from liger_jax.models.gemma import Gemma2Config as Gemma2Config
from liger_jax.models.gemma import Gemma2ForCausalLM as Gemma2ForCausalLM
from liger_jax.models.gemma import Gemma3ForCausalLM as Gemma3ForCausalLM
from liger_jax.models.gemma import Gemma3TextConfig as Gemma3TextConfig
from liger_jax.models.gemma import GemmaConfig as GemmaConfig
from liger_jax.models.gemma import GemmaForCausalLM as GemmaForCausalLM
from liger_jax.models.llama import LlamaConfig as LlamaConfig
from liger_jax.models.llama import LlamaForCausalLM as LlamaForCausalLM
from liger_jax.models.mistral import MistralConfig as MistralConfig
from liger_jax.models.mistral import MistralForCausalLM as MistralForCausalLM
from liger_jax.models.olmo2 import Olmo2Config as Olmo2Config
from liger_jax.models.olmo2 import Olmo2ForCausalLM as Olmo2ForCausalLM
from liger_jax.models.qwen2 import Qwen2Config as Qwen2Config
from liger_jax.models.qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from liger_jax.models.qwen3 import Qwen3Config as Qwen3Config
from liger_jax.models.qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from liger_jax.models.smollm3 import SmolLM3Config as SmolLM3Config
from liger_jax.models.smollm3 import SmolLM3ForCausalLM as SmolLM3ForCausalLM
