"""The options of `liger-jax finetune`, beside those of every training run."""

import dataclasses
from typing import Any

from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError

LOSS_TYPES = ("nll", "dft")


@dataclasses.dataclass(frozen=True)
class FinetuneSettings(Settings):
    """A run that trains a model to predict each token from those before it."""

    # "nll", the negative log-likelihood of tokens, or "dft", which multiplies a token's by its own probability.
    loss_type: str = "nll"

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in LOSS_TYPES:
            raise UserError(f"--loss-type={self.loss_type} must be one of {', '.join(LOSS_TYPES)}.")

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same; of a run of before there was a choice, the loss is not among them."""
        return super().of_the_run() | {"loss_type": None if self.loss_type == "nll" else self.loss_type}
