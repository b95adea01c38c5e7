"""LLaMA."""

from liger_jax.models.core.config import LlamaConfig as LlamaConfig
from liger_jax.models.llama.modeling import LlamaForCausalLM as LlamaForCausalLM
