"""LFM2."""

from liger_jax.models.lfm2.modeling import Lfm2Config as Lfm2Config
from liger_jax.models.lfm2.modeling import Lfm2ForCausalLM as Lfm2ForCausalLM
