"""The options of a run's folder: where it is, what is written there, and how often."""

import dataclasses
import os
import re
from typing import ClassVar

from liger_jax import _options
from liger_jax._options import option, within
from liger_jax.trainers.placement import DTYPES
from liger_jax.user_errors import UserError, is_text

LOGS = ("csv", "tensorboard", "wandb")


def _repository(value: str) -> str:
    return "" if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", value) else "must be an owner and a name, such as me/tuned."


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """What a run evaluates, prints and writes. All of it may change when the run is resumed."""

    group_of_options: ClassVar = "what is kept"

    every: int = option(
        100, "steps between checkpoints, each with an evaluation (default: {default})", check=within(1), of_run=False
    )
    samples: int = option(
        0, "how many held-out rows the model continues at each evaluation (default: {default})", check=within(0, 2**16),
        of_run=False, metavar="N",
    )  # fmt: skip
    keep: int = option(
        1, "how many of the newest checkpoints to keep, in addition to the best one (default: {default})",
        check=within(1), of_run=False,
    )  # fmt: skip
    log: tuple[str, ...] = option(
        ("csv",), f"any of {', '.join(LOGS)}, separated by commas (default: csv)", of_run=False,
        type=lambda text: tuple(text.split(",")),
    )  # fmt: skip
    out: str = option(
        "runs/finetune", "folder for checkpoints, logs and the result (default: {default})", of_run=False, first=True
    )
    merge: bool = option(False, "merge the adapters into the weights of the result", of_run=False)
    # `None` for the checkpoint's dtype, if it is smaller than that of the weights.
    save_dtype: str | None = option(
        None, "dtype of the weights in the result (default: the checkpoint's)", choices=(*DTYPES, "float16"),
        of_run=False,
    )  # fmt: skip
    result_of: int | None = option(
        None, "train nothing: export the checkpoint of this step to OUT/model-STEP or OUT/adapters-STEP",
        check=within(1), of_run=False, in_file=False, metavar="STEP",
    )  # fmt: skip
    push: str | None = option(
        None, "hand the result to the hub of Hugging Face, as this repository, which is private if it is new",
        check=_repository, of_run=False, in_file=False, metavar="ID",
    )  # fmt: skip
    fresh: bool = option(False, "start over, even if OUT has checkpoints", of_run=False, in_file=False)

    is_kept: bool = _options.in_memory(lambda: True)  # whether the folder is there after the run

    def __post_init__(self):
        _options.check(self)
        if not is_text(where := os.path.abspath(self.out)):
            raise UserError(
                f"--out={ascii(where)} is not valid UTF-8, and names of checkpoints must be. Pass another --out."
            )
        if self.result_of is not None and self.fresh:
            raise UserError(
                f"--result-of={self.result_of} exports a checkpoint of the existing run, which --fresh discards."
            )
        if unknown := set(self.log) - set(LOGS):
            raise UserError(f"--log={','.join(self.log)}: {min(unknown)!r} must be one of {', '.join(LOGS)}.")
