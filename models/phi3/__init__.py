"""Phi-3 and Phi-4."""

from liger_jax.models.phi3.modeling import Phi3Config as Phi3Config
from liger_jax.models.phi3.modeling import Phi3ForCausalLM as Phi3ForCausalLM
