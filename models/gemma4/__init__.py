"""Gemma 4."""

from liger_jax.models.gemma4.modeling import Gemma4ForCausalLM as Gemma4ForCausalLM
from liger_jax.models.gemma4.modeling import Gemma4TextConfig as Gemma4TextConfig
