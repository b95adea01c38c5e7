"""Qwen3.5: its language models."""

from liger_jax.models.qwen3_5.modeling import Qwen3_5ForCausalLM as Qwen3_5ForCausalLM
from liger_jax.models.qwen3_5.modeling import Qwen3_5MoeForCausalLM as Qwen3_5MoeForCausalLM
from liger_jax.models.qwen3_5.modeling import Qwen3_5MoeTextConfig as Qwen3_5MoeTextConfig
from liger_jax.models.qwen3_5.modeling import Qwen3_5TextConfig as Qwen3_5TextConfig
