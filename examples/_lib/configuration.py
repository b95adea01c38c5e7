"""How a model is trained: one dataclass, with a flag of the command line for each field."""

import argparse
import dataclasses
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp

from liger_jax.models import KernelOptions
from liger_jax.models.core.remat import Mode
from liger_jax.user_errors import UserError

REMATS = get_args(Mode)
OPTIMIZERS = ("adamw", "adamw8bit")
DTYPES = ("float32", "bfloat16")
SWITCHES = ("rope", "rms_norm", "glu")
LOSSES = {  # by the options of KernelOptions
    "fused": dict(fused_linear_cross_entropy=True, cross_entropy=False),
    "logits": dict(fused_linear_cross_entropy=False, cross_entropy=False),
    "kernel_on_logits": dict(fused_linear_cross_entropy=False, cross_entropy=True),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A training run of any model.

    Attributes:
        batch: sequences in a step.
        length: tokens in a sequence.
        steps: training steps.
        learning_rate: the peak.
        micro_batches: equal parts of a step's batch, whose gradients are accumulated.
        optimizer: "adamw", or "adamw8bit", whose moments have 8 bits.
        remat: what layers keep for the backward.
        dtype: dtype of the computation; `None` for float32 on a CPU and bfloat16 elsewhere.
        param_dtype: dtype of parameters and gradients; AdamW's moments are float32.
        pack: whole documents share rows, whose segments do not see each other; else rows are cut out of running text.
        kernels: which ops of the model run as kernels, and whether there are logits.
    """

    batch: int
    length: int
    steps: int
    learning_rate: float
    micro_batches: int = 1
    optimizer: str = "adamw"
    remat: str = "full"
    dtype: str | None = None
    param_dtype: str = "float32"
    pack: bool = False
    kernels: KernelOptions = KernelOptions()

    def model_options(self) -> dict[str, Any]:
        """The options that the model's constructor takes.

        Returns:
            Arguments by name.
        """
        dtype = self.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        precision = dict(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(self.param_dtype))
        return dict(kernels=self.kernels, remat=self.remat, **precision)


def with_loss(kernels: KernelOptions, loss: str) -> KernelOptions:
    """Kernel options with another loss.

    Args:
        kernels: the options to begin with.
        loss: one of `LOSSES`.

    Returns:
        The options.

    Example:
        >>> with_loss(KernelOptions(), "logits").fused_linear_cross_entropy
        False
    """
    return dataclasses.replace(kernels, **LOSSES[loss])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the flags of `Training`; a flag that is not passed changes nothing.

    Args:
        parser: the program's parser.
    """
    for name, help in dict(
        batch="sequences in a step", length="tokens in a sequence", steps="training steps",
        micro_batches="equal parts of a step's batch, whose gradients are accumulated",
    ).items():  # fmt: skip
        parser.add_argument(_flag(name), type=int, help=help)
    parser.add_argument("--learning-rate", type=float, help="the peak")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="adamw8bit holds its moments in 8 bits")
    parser.add_argument("--remat", choices=REMATS, help="what layers keep for the backward")
    parser.add_argument("--dtype", choices=DTYPES, help="of the computation")
    parser.add_argument("--param-dtype", choices=DTYPES, help="of parameters and gradients")
    parser.add_argument("--pack", action="store_true", default=None, help="rows hold whole documents, each by itself")
    parser.add_argument("--kernels", choices=("on", "off"), help="all kernels; the flags below are exceptions")
    parser.add_argument("--loss", choices=LOSSES, help="without logits, or on logits in plain jnp or by the kernel")
    for name in SWITCHES:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=f"the kernel {name}")
    parser.add_argument("--mode", choices=("auto", "fast", "lean"), help="how the fused loss trades time for memory")
    parser.add_argument("--implementation", help="of the kernels, such as xla, triton or mosaic_tpu")


def from_flags(args: argparse.Namespace, default: Training) -> Training:
    """The training that the flags ask for.

    Args:
        args: what a parser with these flags returned.
        default: the training without any flag.

    Returns:
        The training.

    Raises:
        UserError: a number is out of its range, or the batch cannot be cut into so many micro-batches.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_flags(parser)
        >>> args = parser.parse_args(["--no-rms-norm", "--loss", "logits", "--batch", "4"])
        >>> training = from_flags(args, Training(batch=8, length=512, steps=10, learning_rate=1e-3))
        >>> training.batch, training.kernels.rms_norm, training.kernels.rope
        (4, False, True)
    """
    passed = {name: value for name, value in vars(args).items() if value is not None}
    kernels = {"on": KernelOptions(), "off": KernelOptions.off()}.get(args.kernels, default.kernels)
    of_kernels = {name: passed[name] for name in (*SWITCHES, "mode", "implementation") if name in passed}
    kernels = dataclasses.replace(kernels, **of_kernels, **LOSSES.get(args.loss, {}))
    fields = {field.name for field in dataclasses.fields(Training)} - {"kernels"}
    training = dataclasses.replace(
        default, kernels=kernels, **{name: value for name, value in passed.items() if name in fields}
    )
    _check(training)
    return training


def _check(training: Training) -> None:
    for name, least in dict(batch=1, length=2, steps=1, micro_batches=1).items():
        value = getattr(training, name)
        if value < least:
            reason = ": a token is predicted from those before it" if name == "length" else ""
            raise UserError(f"{_flag(name)}={value} must be at least {least}{reason}.")
    if training.batch % training.micro_batches:
        raise UserError(f"--micro-batches={training.micro_batches} must divide --batch={training.batch}.")
    if not 0 < training.learning_rate < math.inf:
        raise UserError(f"--learning-rate={training.learning_rate} must be a finite number above 0.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
