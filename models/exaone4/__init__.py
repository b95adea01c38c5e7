"""EXAONE 4."""

from liger_jax.models.exaone4.modeling import Exaone4Config as Exaone4Config
from liger_jax.models.exaone4.modeling import Exaone4ForCausalLM as Exaone4ForCausalLM
