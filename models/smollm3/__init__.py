"""SmolLM3."""

from liger_jax.models.smollm3.modeling import SmolLM3Config as SmolLM3Config
from liger_jax.models.smollm3.modeling import SmolLM3ForCausalLM as SmolLM3ForCausalLM
