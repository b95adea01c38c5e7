"""The losses of single answers with labels by the names of `--loss`."""

import dataclasses
import math
from typing import Any

import jax

from liger_jax import losses
from liger_jax.commands._errors import UserError
from liger_jax.losses import KTOOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unpaired:
    """A loss of single answers with its options, as in `losses.kto_loss`."""

    loss_type: str  # "kto" or "apo_zero_unpaired"
    beta: float = 0.1  # how strongly the reference binds
    desirable_weight: float | None = None  # the weight of good answers; `None` for 1
    undesirable_weight: float | None = None  # the weight of bad answers; `None` for 1

    needs_reference = True
    ld_alpha = None

    def __post_init__(self):
        if not 0 < self.beta < math.inf:
            raise UserError(f"--loss={self.loss_type}: --beta={self.beta} must be a finite number > 0.")
        for name in ("desirable_weight", "undesirable_weight"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise UserError(f"--{name.replace('_', '-')}={value} must be a finite number, at least 0.")

    @property
    def sorts(self) -> bool:
        """Whether the loss is no sum over answers: KTO's baseline is of the whole batch."""
        return self.needs_others

    @property
    def needs_others(self) -> bool:
        """Whether the loss reads answers to other prompts, for its baseline."""
        return self.loss_type == "kto"

    def losses(self, log_probs: jax.Array, references: jax.Array, desirable: jax.Array, kl: jax.Array) -> KTOOutput:
        """The losses of answers."""
        weights = {name: getattr(self, name) for name in ("desirable_weight", "undesirable_weight")}
        options: dict[str, Any] = {name: value for name, value in weights.items() if value is not None}
        options |= {"kl": kl} if self.needs_others else {}
        return losses.kto_loss(log_probs, references, desirable, beta=self.beta, loss_type=self.loss_type, **options)
