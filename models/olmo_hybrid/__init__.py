"""OLMo Hybrid."""

from liger_jax.models.olmo_hybrid.modeling import OlmoHybridConfig as OlmoHybridConfig
from liger_jax.models.olmo_hybrid.modeling import OlmoHybridForCausalLM as OlmoHybridForCausalLM
