"""OLMoE."""

from liger_jax.models.olmoe.modeling import OlmoeConfig as OlmoeConfig
from liger_jax.models.olmoe.modeling import OlmoeForCausalLM as OlmoeForCausalLM
