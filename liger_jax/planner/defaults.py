"""The defaults of a training run, for both `liger-jax finetune` and `liger-jax plan`."""

import jax

from liger_jax.training.rows import LENGTH as LENGTH

BATCH, MICRO_BATCHES = 8, 1
RANK = 16  # of adapters
OPTIMIZER = "adamw"
REMAT = "full"
DTYPE = "bfloat16"  # of the computation on an accelerator


def dtype() -> str:
    """The dtype of the computation on this machine: float32 on a CPU, whose bfloat16 is emulated."""
    return "float32" if jax.default_backend() == "cpu" else DTYPE


def param_dtype(lora: int | None, stored: str) -> str:
    """The dtype of the weights: float32 where they are trained, and the checkpoint's own beside adapters."""
    return "float32" if lora is None else stored


def batch(unit: int) -> int:
    """The sequences of a step: the least multiple of `unit` that is at least `BATCH`."""
    return -(-BATCH // unit) * unit
