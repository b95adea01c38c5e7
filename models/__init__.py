"""Flax NNX language models built on liger_jax.ops: import a class, call it with labels, get the loss."""

from liger_jax.models.auto import AutoModelForCausalLM as AutoModelForCausalLM
from liger_jax.models.causal_lm import CausalLM as CausalLM
from liger_jax.models.common import CausalLMOutput as CausalLMOutput
from liger_jax.models.common import KernelOptions as KernelOptions
from liger_jax.models.llama import LlamaConfig as LlamaConfig
from liger_jax.models.llama import LlamaForCausalLM as LlamaForCausalLM
from liger_jax.models.qwen2 import Qwen2Config as Qwen2Config
from liger_jax.models.qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
