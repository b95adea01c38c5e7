"""What a run of `liger-jax finetune` is told, and what is refused of it: one dataclass, an option for each field."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from liger_jax.commands._errors import UserError
from liger_jax.commands._row_formats import FORMATS

DTYPES = ("float32", "bfloat16")
SAVE_DTYPES = (*DTYPES, "float16")
LOGS = ("csv", "tensorboard")
MOST = 2**31 - 1  # JAX counts in int32
_BOUNDS = dict(
    length=(2, MOST), batch=(1, MOST), micro_batches=(1, MOST), steps=(1, MOST), lora=(1, 2**16), every=(1, MOST),
    keep=(1, MOST), seed=(0, 2**32 - 1),
)  # fmt: skip
_MOST_FLOAT = 3.4e38  # of float32


@dataclasses.dataclass(frozen=True)
class Settings:
    """A fine-tuning run.

    Attributes:
        model: a checkpoint's folder, or an id such as "org/name".
        data: files, globs, folders, and ids of datasets on the hub; a weight may follow each, as in "chats.jsonl=2".
        eval_data: the same, of what is scored and not trained on; none to hold out a share of the data.
        subset: the dataset's configuration.
        column: the field of a row that is trained on; `None` for what the names of its fields say.
        format: the format of rows that have the fields of several; `None` for what the names of their fields say.
        stream: read the dataset from the hub while the run goes on.
        lora: rank of the adapters that are trained; `None` to train all weights.
        lora_alpha: numerator of the adapters' scale; `None` for twice the rank.
        quantize: how the frozen weights of layers are held, "nf4" or "int8"; `None` for as they are.
        pack: documents share rows, whose segments do not see each other; else each has rows of its own.
        length: tokens in a row.
        batch: rows in a step.
        micro_batches: equal parts of a step's batch, whose gradients are accumulated.
        epochs: how often each row is trained on; `None` for once, or for what `steps` says.
        steps: training steps; `None` for what `epochs` says.
        learning_rate: the peak; `None` for 2e-4 with adapters and 1e-5 without.
        remat: what layers keep for the backward.
        dtype: dtype of the computation; `None` for float32 on a CPU and bfloat16 elsewhere.
        param_dtype: dtype of the weights; `None` for float32, or the checkpoint's own if they are frozen.
        eval_share: the share of the data that is held out and scored; `None` for 0.02, or none beside `eval_data`.
        every: steps between checkpoints, each with an evaluation.
        keep: how many of the newest checkpoints are kept, beside the one with the least held-out loss.
        seed: seed of the adapters, the held-out data, the order of the rows and the rounding of bfloat16 weights.
        log: where each step's figures go, names of `LOGS`.
        out: folder for checkpoints, logs and the result.
        merge: add the adapters to the weights in the result.
        save_dtype: dtype of the weights in the result; `None` for the checkpoint's own, if it is smaller than theirs.
        fresh: start over, whatever checkpoint there is.
        verify: read all of the model's weights to know whether they are still those of the run.

    Raises:
        UserError: a value is out of its range, or does not go with another.
    """

    model: str
    data: str | Sequence[str]
    eval_data: Sequence[str] = ()
    subset: str | None = None
    column: str | None = None
    format: str | None = None
    stream: bool = False
    lora: int | None = None
    lora_alpha: float | None = None
    quantize: str | None = None
    pack: bool = False
    length: int = 2048
    batch: int = 8
    micro_batches: int = 1
    epochs: float | None = None
    steps: int | None = None
    learning_rate: float | None = None
    remat: str = "full"
    dtype: str | None = None
    param_dtype: str | None = None
    eval_share: float | None = None
    every: int = 100
    keep: int = 1
    seed: int = 0
    log: tuple[str, ...] = ("csv",)
    out: str = "runs/finetune"
    merge: bool = False
    save_dtype: str | None = None
    fresh: bool = False
    verify: bool = False

    def __post_init__(self):
        for name in ("data", "eval_data"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        named = [(name, (getattr(self, name) or "",)) for name in ("model", "subset", "column", "out")]
        for name, values in (*named, ("data", self.data), ("eval-data", self.eval_data)):
            if wrong := [value for value in values if "\0" in value]:
                raise UserError(f"--{name}={wrong[0]!r} holds a null character, which no name has.")
        for name, (least, most) in _BOUNDS.items():
            if (value := getattr(self, name)) is None or least <= value <= most:
                continue
            shown = f"--{name.replace('_', '-')}={value}" if abs(value) < 10**30 else f"--{name.replace('_', '-')}"
            raise UserError(f"{shown} must be at least {least}" + (f" and at most {most}." if value > most else "."))
        if self.batch * self.length > MOST:
            raise UserError(
                f"--batch={self.batch} rows of --length={self.length} are more than the {MOST:,} tokens that a step "
                "can have. Pass a smaller --batch."
            )
        if self.batch % self.micro_batches:
            raise UserError(f"--micro-batches={self.micro_batches} must divide --batch={self.batch}.")
        for name in ("learning_rate", "epochs", "lora_alpha"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')}={value} must be a finite number above 0.")
            if value is not None and value > _MOST_FLOAT:
                raise UserError(f"--{name.replace('_', '-')}={value} is more than a float32 holds.")
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"--steps={self.steps} and --epochs={self.epochs} both say how long the run is. Pass one of them."
            )
        if not 0 <= self.share_held_out < 1:
            raise UserError(f"--eval-share={self.eval_share} must be in [0, 1); 0 holds nothing out.")
        if self.eval_data and self.eval_share:
            raise UserError(
                f"--eval-share={self.eval_share} and --eval-data both say what is scored. Pass one of them."
            )
        if self.stream and (self.steps is None or not self.eval_data):
            raise UserError(
                "--stream has no end that is known, and no share of it is held out: pass --steps and --eval-data."
            )
        if self.stream and len(self.data) > 1:
            raise UserError("--stream reads one dataset of the hub. Pass --data one id.")
        for name in ("lora_alpha", "quantize", "merge"):
            if getattr(self, name) and self.lora is None:
                raise UserError(f"--{name.replace('_', '-')} is for adapters: pass --lora, such as --lora 16, as well.")
        if self.save_dtype is not None and self.lora is not None and not self.merge:
            raise UserError(f"--save-dtype={self.save_dtype} is for weights, not adapters: pass --merge as well.")
        if unknown := set(self.log) - set(LOGS):
            raise UserError(f"--log={','.join(self.log)}: {min(unknown)!r} must be one of {', '.join(LOGS)}.")

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.learning_rate or (1e-5 if self.lora is None else 2e-4)

    @property
    def share_held_out(self) -> float:
        """The share of the data that is held out."""
        return (0.0 if self.eval_data else 0.02) if self.eval_share is None else self.eval_share

    @property
    def epochs_to_train(self) -> float | None:
        """How often each row is trained on, or `None` where the number of steps is given."""
        return None if self.steps is not None else self.epochs or 1.0

    def check_length(self, model: str, longest: int) -> None:
        """Checks that the model takes rows of this length.

        Args:
            model: its name.
            longest: the most tokens of a row that it takes.

        Raises:
            UserError: it does not.
        """
        if self.length > longest:
            raise UserError(
                f"--length={self.length} is more than the {longest} positions of {model}. Pass --length {longest}."
            )

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is continued.

        Returns:
            Values by name: all but where the figures go, and how often the run saves.
        """
        found = dataclasses.asdict(self) | {
            "epochs": self.epochs_to_train,
            "data": " ".join(self.data),
            "eval_data": " ".join(self.eval_data),
            "eval_share": self.share_held_out,
            "column": self.column or "text",
        }
        return {
            name: value
            for name, value in found.items()
            if name not in ("log", "out", "fresh", "every", "keep", "merge", "save_dtype", "verify")
        }


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how the data becomes rows.

    Args:
        command: a parser.
    """
    add = command.add_argument
    data = "what is scored and not trained on, in the place of a share of --data"
    add("--eval-data", nargs="+", metavar="DATA", help=data)
    add("--subset", help="the dataset's configuration")
    add("--column", help="the field that is trained on: a text, or a list of messages (default: by the fields' names)")
    add("--format", choices=list(FORMATS), help="the format of rows that have the fields of several")
    add("--pack", action="store_true", help="documents share rows, and none sees another")
    add("--length", type=int, help="tokens in a row (default: 2048)")
    add("--eval-share", type=float, help="of the data that is held out and scored (default: 0.02)")
    add("--seed", type=int, help="of all that is random (default: 0)")


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of a run.

    Args:
        args: parsed arguments, of which those that `Settings` does not have are passed over.

    Returns:
        The settings, with defaults for what was not given.

    Raises:
        UserError: a value is out of its range, or does not go with another.
    """
    fields = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
