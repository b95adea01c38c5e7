"""Ministral 3."""

from liger_jax.models.ministral3.modeling import Ministral3Config as Ministral3Config
from liger_jax.models.ministral3.modeling import Ministral3ForCausalLM as Ministral3ForCausalLM
