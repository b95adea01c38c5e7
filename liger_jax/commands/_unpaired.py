"""The losses of single answers with labels by the names of `--loss`."""

import dataclasses
import math
from typing import Any

import jax

from liger_jax import losses
from liger_jax.commands._errors import UserError
from liger_jax.commands._loss_options import LossOptions, flag
from liger_jax.losses import KTOOutput

_WEIGHTS = ("desirable_weight", "undesirable_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unpaired(LossOptions):
    """A loss of single answers with its options."""

    needs_reference = True

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and name not in ("loss_type", "beta", *_WEIGHTS):
                raise UserError(f"{flag(name)} does not go with --loss {self.loss_type}. Leave it out.")
        if not 0 < self.beta < math.inf:
            raise UserError(f"--loss={self.loss_type}: --beta={self.beta} must be a finite number > 0.")
        for name in _WEIGHTS:
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise UserError(f"{flag(name)}={value} must be a finite number, at least 0.")

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
        weights = {name: getattr(self, name) for name in _WEIGHTS}
        options: dict[str, Any] = {name: value for name, value in weights.items() if value is not None}
        options |= {"kl": kl} if self.needs_others else {}
        return losses.kto_loss(log_probs, references, desirable, beta=self.beta, loss_type=self.loss_type, **options)
