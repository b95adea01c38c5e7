"""GLM-4."""

from liger_jax.models.glm4.modeling import Glm4Config as Glm4Config
from liger_jax.models.glm4.modeling import Glm4ForCausalLM as Glm4ForCausalLM
