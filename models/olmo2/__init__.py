"""OLMo 2."""

from liger_jax.models.olmo2.modeling import Olmo2Config as Olmo2Config
from liger_jax.models.olmo2.modeling import Olmo2ForCausalLM as Olmo2ForCausalLM
