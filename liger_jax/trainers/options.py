"""The options of a training run, and their checks: one dataclass, whose fields are the options."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_jax.models.core.config_fields import MOST
from liger_jax.models.hugging_face.checkpoint import ADAPTERS
from liger_jax.planner import defaults
from liger_jax.training.meshes import parse_mesh
from liger_jax.user_errors import UserError, is_text, user_errors

DTYPES = ("float32", "bfloat16")
SAVE_DTYPES = (*DTYPES, "float16")
OPTIMIZERS = ("adamw", "adamw8bit")
LOGS = ("csv", "tensorboard", "wandb")
SCHEDULES = ("cosine", "linear", "constant")
LEAST_FLOAT, MOST_FLOAT = 1.1754944e-38, 3.4e38  # of float32: devices take a smaller number for 0
_BOUNDS = dict(
    length=(2, MOST), batch=(1, MOST), micro_batches=(1, MOST), steps=(1, MOST), lora=(1, 2**16), every=(1, MOST),
    keep=(1, MOST), result_of=(1, MOST), seed=(0, 2**32 - 1), samples=(0, 2**16), patience=(1, MOST),
)  # fmt: skip
# What may change when a run is continued: where figures and results go, how often it saves and looks at itself, and how
# a step is laid into memory.
_NOT_OF_THE_RUN = (
    "log", "out", "fresh", "every", "samples", "patience", "keep", "merge", "save_dtype", "verify", "mesh",
    "distributed", "remat", "micro_batches", "result_of", "risk_memory",
    "reward_timeout",
)  # fmt: skip
_NOT_WRITTEN = ("fresh", "verify", "distributed", "result_of")  # into a run's file of options


@dataclasses.dataclass(frozen=True)
class Settings:
    """A fine-tuning run."""

    model: str  # a checkpoint's folder, or an id such as "org/name"; or adapters, whose training then goes on
    # Files, globs, folders, and ids of datasets on the hub; a weight may follow each, as in "chats.jsonl=2".
    data: str | Sequence[str]
    # The same, of what is scored and not trained on; none to hold out a share of the data.
    eval_data: Sequence[str] = ()
    subset: str | None = None  # the dataset's configuration
    column: str | None = None  # the field of a row that is trained on; `None` for what the names of its fields say
    # The format of rows that have the fields of several; `None` for what the names of their fields say.
    format: str | None = None
    stream: bool = False  # read the dataset from the hub while the run goes on
    lora: int | None = None  # rank of the adapters that are trained; `None` to train all weights
    lora_alpha: float | None = None  # numerator of the adapters' scale; `None` for twice the rank
    # What has adapters: names with commas between them, "all-linear" or a regular expression; `None` for all
    # projections of layers.
    lora_targets: str | None = None
    lora_experts: bool = False  # the experts of a mixture have adapters, too
    # The share of the adapters' inputs that training drops; `None` for none, or as their folder says.
    lora_dropout: float | None = None
    rslora: bool = False  # scale the adapters by alpha/√rank
    dora: bool = False  # train the lengths of the weights' columns, too
    adapters: str | None = None  # the folder of adapters that training goes on from, if `--model` was one
    quantize: str | None = None  # how the frozen weights of layers are held, "nf4" or "int8"; `None` for as they are
    pack: bool = False  # documents share rows, whose segments do not see each other; else each has its own rows
    length: int = defaults.LENGTH  # tokens in a row
    # How the rotary embedding reaches rows that are longer than the model's positions, a name of `ROPE_SCALINGS`;
    # `None` to refuse them.
    rope_scaling: str | None = None
    batch: int = defaults.BATCH  # rows in a step
    # Micro-batches of a step's batch, whose gradients are accumulated; `None` for as few as fit.
    micro_batches: int | None = None
    epochs: float | None = None  # how often each row is trained on; `None` for once, or for what `steps` says
    steps: int | None = None  # training steps; `None` for what `epochs` says
    learning_rate: float | None = None  # the peak; `None` for that of `peak_rates`
    optimizer: str = defaults.OPTIMIZER  # "adamw", or "adamw8bit", whose moments have 8 bits
    schedule: str = "cosine"  # how the rate goes on after the peak, a name of `SCHEDULES`
    warmup: float = 0.03  # the share of the steps in which the rate rises, or from 1 on their number
    weight_decay: float = 0.01  # the share of each weight that a step of rate 1 takes away
    clip: float = 1.0  # a gradient with a larger norm is scaled down to it; 0 to leave all as they are
    # What layers keep for the backward; `None` for "full"; where that does not fit for "offload_attention", if rows are
    # long and the host has room for it, else for "offload".
    remat: str | None = None
    dtype: str | None = None  # dtype of the computation; `None` for float32 on a CPU and bfloat16 elsewhere
    # Dtype of the weights; `None` for float32, or the checkpoint's own if they are frozen.
    param_dtype: str | None = None
    # The share of the data that is held out and scored; `None` for 0.02, or none beside `eval_data`.
    eval_share: float | None = None
    every: int = 100  # steps between checkpoints, each with an evaluation
    samples: int = 0  # how many held-out rows are continued and printed at each evaluation
    # The run ends once so many evaluations have not improved the held-out loss; `None` for all steps.
    patience: int | None = None
    keep: int = 1  # how many of the newest checkpoints are kept, beside the one with the least held-out loss
    seed: int = 0  # seed of the adapters, the held-out data, the order of the rows and the rounding of bfloat16 weights
    log: tuple[str, ...] = ("csv",)  # where each step's figures go, names of `LOGS`
    out: str = "runs/finetune"  # folder for checkpoints, logs and the result
    merge: bool = False  # add the adapters to the weights in the result
    # Dtype of the weights in the result; `None` for the checkpoint's own, if it is smaller than theirs.
    save_dtype: str | None = None
    result_of: int | None = None  # no training, but the result of this step, whose checkpoint is kept; `None` to train
    fresh: bool = False  # start over, whatever checkpoint there is
    # The devices along each axis, such as "fsdp=2,tensor=2"; `None` for as many along fsdp as divide the run.
    mesh: str | None = None
    # Join the other processes of the run, as `processes.begin` takes it; `None` for a single process.
    distributed: str | None = None
    verify: bool = False  # read all of the model's weights to know whether they are still those of the run
    risk_memory: bool = False  # begin even if the run does not fit by the planner's estimate

    command = "finetune"
    is_alone = False  # whether the command trains in one process
    peak_rates = 1e-5, 2e-4  # the learning rates without `lora` and with it
    what_samples = "how many held-out rows the model continues at each evaluation"

    def __post_init__(self):
        self._check_texts()
        self._check_numbers()
        self._check_scored()
        self._check_adapters()
        self._check_data()
        self._check_result()

    def _check_texts(self) -> None:
        if self.is_alone and self.distributed is not None:
            raise UserError("--distributed: this command trains in one process. Leave it out.")
        for name in ("data", "eval_data"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        named = [(name, (getattr(self, name) or "",)) for name in ("model", "subset", "column", "out", "lora_targets")]
        for name, values in (*named, ("data", self.data), ("eval-data", self.eval_data)):
            if wrong := [value for value in values if "\0" in value]:
                raise UserError(f"--{name.replace('_', '-')}={wrong[0]!r} holds a null character, which no name has.")
        if not is_text(where := os.path.abspath(self.out)):
            raise UserError(
                f"--out={ascii(where)} is no UTF-8, which names of checkpoints must be. Pass another --out."
            )

    def _check_numbers(self) -> None:
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
        if self.batch % self.num_micro_batches:
            raise UserError(f"--micro-batches={self.micro_batches} must divide --batch={self.batch}.")
        if self.mesh is not None:
            with user_errors():
                parse_mesh(self.mesh)
        for name in ("learning_rate", "epochs", "lora_alpha"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')}={value} must be a finite number above 0.")
            if value is not None and value > MOST_FLOAT:
                raise UserError(f"--{name.replace('_', '-')}={value} is more than a float32 holds.")
        for name in ("warmup", "weight_decay", "clip"):
            if not 0 <= (value := getattr(self, name)) <= MOST_FLOAT:
                raise UserError(f"--{name.replace('_', '-')}={value} must be a finite number, at least 0.")
        if self.warmup > 1 and self.warmup % 1:
            raise UserError(f"--warmup={self.warmup} must be a share of the steps below 1, or a whole number of steps.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"--schedule={self.schedule} must be one of {', '.join(SCHEDULES)}.")
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"--steps={self.steps} and --epochs={self.epochs} both say how long the run is. Pass one of them."
            )

    def _check_scored(self) -> None:
        if not 0 <= self.share_held_out < 1:
            raise UserError(f"--eval-share={self.eval_share} must be in [0, 1); 0 holds nothing out.")
        for name in ("samples", "patience"):
            if getattr(self, name) and not (self.share_held_out or self.eval_data):
                raise UserError(f"--{name} is for data that is held out, and --eval-share=0 holds out none.")

    def _check_adapters(self) -> None:
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora-dropout={self.lora_dropout} must be in [0, 1); 0 drops nothing.")
        of_adapters = ("lora_alpha", "lora_targets", "lora_experts", "lora_dropout", "rslora", "dora")
        for name in (*of_adapters, "quantize", "merge"):
            if getattr(self, name) and not self.has_adapters:
                raise UserError(f"--{name.replace('_', '-')} is for adapters: pass --lora, such as --lora 16, as well.")

    def _check_data(self) -> None:
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

    def _check_result(self) -> None:
        if self.save_dtype is not None and self.has_adapters and not self.merge:
            raise UserError(f"--save-dtype={self.save_dtype} is for weights, not adapters: pass --merge as well.")
        if self.result_of is not None and self.fresh:
            raise UserError(f"--result-of={self.result_of} is of the run that is there, which --fresh forgets.")
        if unknown := set(self.log) - set(LOGS):
            raise UserError(f"--log={','.join(self.log)}: {min(unknown)!r} must be one of {', '.join(LOGS)}.")

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained: new ones, or those of a folder."""
        return self.lora is not None or (Path(self.model) / ADAPTERS.config).is_file()

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step: one where their number is still left to the run."""
        return self.micro_batches or defaults.MICRO_BATCHES

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the loss takes a batch in one micro-batch."""
        return False

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.learning_rate or self.peak_rates[self.lora is not None]

    @property
    def share_held_out(self) -> float:
        """The share of the data that is held out."""
        return (0.0 if self.eval_data else 0.02) if self.eval_share is None else self.eval_share

    @property
    def epochs_to_train(self) -> float | None:
        """How often each row is trained on, or `None` where the number of steps is given."""
        return None if self.steps is not None else self.epochs or 1.0

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the run keeps in OUT beside checkpoints, logs and the result, by the names of `result.BESIDE`."""
        return ("tokens",)

    def to_write(self) -> dict[str, Any]:
        """The settings as a file of options has them.

        Returns values by name; `None` where the default depends on others. A file neither starts a run over nor has all
        weights read, and is the same for all processes.
        """
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _NOT_WRITTEN}

    def of_all_processes(self) -> dict[str, Any]:
        """The settings that are the same in all processes of a run."""
        values = dataclasses.asdict(self)
        return {f"--{name.replace('_', '-')}": value for name, value in values.items() if name != "distributed"}

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is continued.

        Returns values by name: all but where the figures go, and how often the run saves.
        """
        values = dataclasses.asdict(self) | {
            "epochs": self.epochs_to_train,
            "learning_rate": self.peak_rate,
            "data": " ".join(self.data),
            "eval_data": " ".join(self.eval_data),
            "eval_share": self.share_held_out,
            "column": self.column or "text",
        }
        return {name: value for name, value in values.items() if name not in _NOT_OF_THE_RUN}
