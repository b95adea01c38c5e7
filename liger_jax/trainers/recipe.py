"""The recipe of a run: its steps, their batches and rates."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from liger_jax import _options
from liger_jax._options import MOST, above_0, at_least_0, option, within
from liger_jax.planner import defaults
from liger_jax.training import (
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    linear_schedule_with_warmup,
    optimizer_named,
    rows,
)
from liger_jax.user_errors import UserError

_SCHEDULES = {
    "cosine": cosine_schedule_with_warmup,
    "linear": linear_schedule_with_warmup,
    "constant": constant_schedule_with_warmup,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained, on any data."""

    group_of_options: ClassVar = "schedule"

    batch: int = option(
        defaults.BATCH,
        "documents in a step, or rows with --pack (default: {default})",
        check=within(1),
        group="speed and memory",
        first=True,
    )
    micro_batches: int | None = option(
        None, "micro-batches into which a batch is cut for gradient accumulation (default: what is fastest)",
        check=within(1), of_run=False, group="speed and memory"
    )  # fmt: skip
    epochs: float | None = option(
        None, "how often each row is trained on, such as 2.5 (default: 1)", check=above_0, first=True
    )
    steps: int | None = option(None, "number of training steps, instead of --epochs", check=within(1))
    learning_rate: float | None = option(
        None, "the peak learning rate (default: {peaks[0]}, with --lora {peaks[1]})", check=above_0, first=True
    )  # fmt: skip
    optimizer: str = option(
        defaults.OPTIMIZER, "adamw8bit holds its moments in 8 bits (default: {default})", choices=("adamw", "adamw8bit")
    )
    schedule: str = option(
        "cosine", "learning rate after its peak (default: {default}, which decays to a tenth)",
        choices=tuple(_SCHEDULES),
    )  # fmt: skip
    warmup: float = option(
        0.03, "warmup steps: a fraction of all steps, or from 1 on their number (default: {default})", check=at_least_0
    )
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay (default: {default})", check=at_least_0)
    clip: float = option(
        1.0, "clip the global norm of the gradients at this value; 0 does not clip (default: {default:g})",
        check=at_least_0,
    )  # fmt: skip
    patience: int | None = option(
        None, "stop after N evaluations without a lower held-out loss", check=within(1), of_run=False, metavar="N"
    )
    seed: int = option(0, "seed of all random numbers (default: {default})", check=within(0, 2**32 - 1))

    def __post_init__(self):
        _options.check(self)
        if self.batch % self.num_micro_batches:
            raise UserError(f"--micro-batches={self.micro_batches} must divide --batch={self.batch}.")
        if self.warmup > 1 and self.warmup % 1:
            raise UserError(f"--warmup={self.warmup} must be a share of the steps below 1, or a whole number of steps.")
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"--steps={self.steps} and --epochs={self.epochs} both say how long the run is. Pass one of them."
            )

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step: one where their number is still left to the run."""
        return self.micro_batches or defaults.MICRO_BATCHES

    @property
    def rows_at_once(self) -> int:
        """Rows in a micro-batch."""
        return self.batch // self.num_micro_batches

    @property
    def epochs_to_train(self) -> float | None:
        """How often each row is trained on, or `None` where the number of steps is given."""
        return None if self.steps is not None else self.epochs or 1.0

    @property
    def order(self) -> tuple[int, int, float | None]:
        """What decides the order of rows: the rows of a step, the seed, and the epochs."""
        return self.batch, self.seed, self.epochs_to_train

    def num_steps(self, rows_in_epoch: int) -> int:
        """The number of steps of the run."""
        if self.steps is not None:
            return self.steps
        epochs = self.epochs_to_train or 1.0
        if rows_in_epoch * epochs > MOST:
            raise UserError(f"--epochs={epochs} of {rows_in_epoch:,} rows are more than {MOST:,} rows. Pass fewer.")
        return rows.num_steps(rows_in_epoch, self.batch, epochs)

    def rate(self, peak: float, steps: int) -> Callable[[Any], Any]:
        """The learning rate of each step."""
        share = self.warmup
        if share >= 1:
            if share > steps:
                raise UserError(
                    f"--warmup={share:g} steps are more than the {steps} of the run. Pass fewer, or a share."
                )
            share = (share - 0.5) / steps  # schedules round up: this fraction gives so many steps in spite of rounding
        return _SCHEDULES[self.schedule](peak, steps, warm_up=share)

    def optimizer_of(self, rate: Any) -> Any:
        """The optimizer."""
        return optimizer_named(
            self.optimizer, rate, weight_decay=self.weight_decay, max_norm=self.clip or None, seed=self.seed
        )
