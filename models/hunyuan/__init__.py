"""Hunyuan."""

from liger_jax.models.hunyuan.modeling import HunYuanDenseV1Config as HunYuanDenseV1Config
from liger_jax.models.hunyuan.modeling import HunYuanDenseV1ForCausalLM as HunYuanDenseV1ForCausalLM
