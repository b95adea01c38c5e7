"""Mixtral."""

from liger_jax.models.mixtral.modeling import MixtralConfig as MixtralConfig
from liger_jax.models.mixtral.modeling import MixtralForCausalLM as MixtralForCausalLM
