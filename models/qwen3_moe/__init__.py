"""Qwen3-MoE."""

from liger_jax.models.qwen3_moe.modeling import Qwen3MoeConfig as Qwen3MoeConfig
from liger_jax.models.qwen3_moe.modeling import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
