"""Qwen2."""

from liger_jax.models.qwen2.modeling import Qwen2Config as Qwen2Config
from liger_jax.models.qwen2.modeling import Qwen2ForCausalLM as Qwen2ForCausalLM
