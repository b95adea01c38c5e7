"""Mistral."""

from liger_jax.models.mistral.modeling import MistralConfig as MistralConfig
from liger_jax.models.mistral.modeling import MistralForCausalLM as MistralForCausalLM
