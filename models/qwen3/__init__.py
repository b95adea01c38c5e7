"""Qwen3."""

from liger_jax.models.qwen3.modeling import Qwen3Config as Qwen3Config
from liger_jax.models.qwen3.modeling import Qwen3ForCausalLM as Qwen3ForCausalLM
