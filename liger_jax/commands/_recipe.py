"""The learning rates and the optimizer of a run, from its settings."""

from typing import Any

from liger_jax.commands._errors import UserError
from liger_jax.commands._settings import Settings
from liger_jax.training import (
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    linear_schedule_with_warmup,
    optimizer_named,
)

_SCHEDULES = {
    "cosine": cosine_schedule_with_warmup,
    "linear": linear_schedule_with_warmup,
    "constant": constant_schedule_with_warmup,
}


def schedule(settings: Settings, steps: int) -> Any:
    """The learning rate of each step."""
    share = settings.warmup
    if share >= 1:
        if share > steps:
            raise UserError(f"--warmup={share:g} steps are more than the {steps} of the run. Pass fewer, or a share.")
        share = (share - 0.5) / steps  # schedules round up: this is so many steps whatever a division leaves
    return _SCHEDULES[settings.schedule](settings.peak_rate, steps, warm_up=share)


def optimizer(settings: Settings, rate: Any) -> Any:
    """The optimizer."""
    return optimizer_named(
        settings.optimizer,
        rate,
        weight_decay=settings.weight_decay,
        max_norm=settings.clip or None,
        seed=settings.seed,
    )
