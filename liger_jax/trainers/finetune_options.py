"""The options of `liger-jax finetune`, beside those of every training run."""

import dataclasses
from typing import Any

from liger_jax._options import option
from liger_jax.trainers.method import Method

LOSS_TYPES = ("nll", "dft")


@dataclasses.dataclass(frozen=True)
class FinetuneOptions(Method):
    """A model is trained to predict each token from those before it."""

    loss_type: str = option(
        "nll",
        "dft multiplies each token's loss by the token's probability (default: nll)", choices=LOSS_TYPES,
        group="schedule",
    )  # fmt: skip

    command = "finetune"
    changes = dict(stream=dict(help="stream a dataset from the hub during the run; needs --steps"))

    def of_the_run(self) -> dict[str, Any]:
        """Without the default loss, since checkpoints from before there was a choice do not name one."""
        return {"loss_type": None if self.loss_type == "nll" else self.loss_type}
