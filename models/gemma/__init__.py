"""Gemma."""

from liger_jax.models.gemma.config import Gemma2Config as Gemma2Config
from liger_jax.models.gemma.config import Gemma3TextConfig as Gemma3TextConfig
from liger_jax.models.gemma.config import GemmaConfig as GemmaConfig
from liger_jax.models.gemma.modeling import Gemma2ForCausalLM as Gemma2ForCausalLM
from liger_jax.models.gemma.modeling import Gemma3ForCausalLM as Gemma3ForCausalLM
from liger_jax.models.gemma.modeling import GemmaForCausalLM as GemmaForCausalLM
