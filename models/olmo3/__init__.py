"""OLMo 3."""

from liger_jax.models.olmo3.modeling import Olmo3Config as Olmo3Config
from liger_jax.models.olmo3.modeling import Olmo3ForCausalLM as Olmo3ForCausalLM
