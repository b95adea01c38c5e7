"""Gemma 4."""

from liger_jax.models.gemma4.config import Gemma4TextConfig as Gemma4TextConfig
from liger_jax.models.gemma4.modeling import Gemma4ForCausalLM as Gemma4ForCausalLM
