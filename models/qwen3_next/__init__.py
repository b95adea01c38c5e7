"""Qwen3-Next."""

from liger_jax.models.qwen3_next.modeling import Qwen3NextConfig as Qwen3NextConfig
from liger_jax.models.qwen3_next.modeling import Qwen3NextForCausalLM as Qwen3NextForCausalLM
