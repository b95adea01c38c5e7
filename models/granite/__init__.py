"""Granite."""

from liger_jax.models.granite.modeling import GraniteConfig as GraniteConfig
from liger_jax.models.granite.modeling import GraniteForCausalLM as GraniteForCausalLM
