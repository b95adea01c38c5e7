"""gpt-oss."""

from liger_jax.models.gpt_oss.modeling import GptOssConfig as GptOssConfig
from liger_jax.models.gpt_oss.modeling import GptOssForCausalLM as GptOssForCausalLM
