"""LoRA: small matrices A and B beside frozen projections, which alone are trained.

    y = x·W + scale·(x·A)·B,   A (in, rank), B (rank, out),   scale = alpha/rank

A starts random and B at zero, so that a model with new adapters computes what it did before. Adapters are stacked like
the layers that they belong to.
"""

from liger_jax.models.core.dropout import DropoutKey as DropoutKey
from liger_jax.models.lora.adapters import EXPERT_PARAMETERS as EXPERT_PARAMETERS
from liger_jax.models.lora.adapters import add_lora as add_lora
from liger_jax.models.lora.adapters import merge_lora as merge_lora
from liger_jax.models.lora.adapters import trainable as trainable
from liger_jax.models.lora.adapters import with_adapters as with_adapters
from liger_jax.models.lora.adapters import with_dropout as with_dropout
from liger_jax.models.lora.files import load_adapters as load_adapters
from liger_jax.models.lora.files import save_adapters as save_adapters
from liger_jax.models.lora.linear import LoRALinear as LoRALinear
from liger_jax.models.lora.whole import TrainedWeight as TrainedWeight
from liger_jax.models.lora.whole import train_more as train_more
