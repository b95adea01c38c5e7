"""The options of `liger-jax finetune`, beside those of every training run."""

import dataclasses
from typing import Any

from liger_jax._options import again, option
from liger_jax.trainers.options import Settings

LOSS_TYPES = ("nll", "dft")


@dataclasses.dataclass(frozen=True)
class FinetuneSettings(Settings):
    """A run that trains a model to predict each token from those before it."""

    loss_type: str = option(
        "nll", "dft multiplies each token's loss by the token's probability (default: nll)", choices=LOSS_TYPES
    )
    stream: bool = again(Settings, "stream", help="stream a dataset from the hub during the run; needs --steps")

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same; of a run of before there was a choice, the loss is not among them."""
        return super().of_the_run() | {"loss_type": None if self.loss_type == "nll" else self.loss_type}
