"""The options of a training run, and their checks: one dataclass, whose fields are the options."""

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_jax import _options
from liger_jax._options import MOST, above_0, at_least_0, option, within
from liger_jax.data.formats import FORMATS
from liger_jax.models.core.stretched import ROPE_SCALINGS
from liger_jax.models.hugging_face.checkpoint import ADAPTERS
from liger_jax.ops.block_quantized import KINDS
from liger_jax.planner import defaults
from liger_jax.planner.step import REMATS
from liger_jax.training.meshes import parse_mesh
from liger_jax.user_errors import UserError, is_text, user_errors

DTYPES = ("float32", "bfloat16")
LOGS = ("csv", "tensorboard", "wandb")
_TEXT = "text, or rows of text or messages: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A fine-tuning run. An option that may change when a run is continued says where figures and results go, how often
    the run saves and looks at itself, or how a step is laid into memory.
    """

    model: str = option(help="a checkpoint's folder or id, such as Qwen/Qwen2.5-0.5B; or adapters")
    data: str | Sequence[str] = option(help=_TEXT, metavar="DATA")
    eval_data: Sequence[str] = option(
        (), "data for evaluation only, instead of holding out a share of --data", metavar="DATA"
    )
    subset: str | None = option(None, "the dataset's configuration")
    column: str | None = option(
        None, "the field that is trained on: a text, or a list of messages (default: by the fields' names)"
    )
    format: str | None = option(None, "the format, if rows have the fields of several formats", choices=list(FORMATS))
    stream: bool = option(False, "stream a dataset from the hub during the run")
    lora: int | None = option(
        None, f"train adapters of this rank (default: {defaults.RANK})", check=within(1, 2**16),
        nargs="?", const=defaults.RANK, metavar="RANK",
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "the adapters' alpha; they are scaled by alpha/rank (default: twice the rank)", check=above_0
    )
    lora_targets: str | None = option(
        None,
        "modules with adapters: q_proj,v_proj, all-linear or a regular expression (default: all seven)",
        metavar="NAMES",
    )
    lora_experts: bool = option(False, "also add adapters to the experts of a mixture")
    # `None` for none, or as the adapters' folder says.
    lora_dropout: float | None = option(None, "dropout probability of the adapters' inputs (default: 0)")
    rslora: bool = option(False, "scale the adapters by alpha/√rank")
    dora: bool = option(False, "weight-decomposed adapters: also train the norms of the weights' columns")
    adapters: str | None = None  # the folder of adapters that training goes on from, if `--model` was one
    quantize: str | None = option(None, "quantize the frozen weights of the layers to 4 or 8 bits", choices=KINDS)
    pack: bool = option(False, "pack several documents into a row; none attends to another")
    length: int = option(defaults.LENGTH, "tokens in a row (default: {default})", check=within(2))
    rope_scaling: str | None = option(
        None, "how the rotary embedding reaches rows beyond the model's positions (default: they are refused)",
        choices=list(ROPE_SCALINGS),
    )  # fmt: skip
    batch: int = option(defaults.BATCH, "rows in a step (default: {default})", check=within(1))
    micro_batches: int | None = option(
        None,
        "micro-batches into which a batch is cut for gradient accumulation (default: as few as fit)",
        check=within(1),
        of_run=False,
    )
    epochs: float | None = option(None, "how often each row is trained on, such as 2.5 (default: 1)", check=above_0)
    steps: int | None = option(None, "number of training steps, instead of --epochs", check=within(1))
    learning_rate: float | None = option(
        None, "the peak learning rate (default: {peaks[0]}, with --lora {peaks[1]})", check=above_0
    )  # fmt: skip
    optimizer: str = option(
        defaults.OPTIMIZER, "adamw8bit holds its moments in 8 bits (default: {default})", choices=("adamw", "adamw8bit")
    )
    schedule: str = option(
        "cosine", "learning rate after its peak (default: {default}, which decays to a tenth)",
        choices=("cosine", "linear", "constant"),
    )  # fmt: skip
    warmup: float = option(
        0.03, "warmup steps: a fraction of all steps, or from 1 on their number (default: {default})", check=at_least_0
    )
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay (default: {default})", check=at_least_0)
    clip: float = option(
        1.0,
        "clip the global norm of the gradients at this value; 0 does not clip (default: {default:g})",
        check=at_least_0,
    )
    # `None` for "full"; where that does not fit for "offload_attention", if rows are long and the host has room for it,
    # else for "offload".
    remat: str | None = option(
        None,
        "what layers keep for the backward (default: full, or an offload where full does not fit)",
        choices=REMATS,
        of_run=False,
    )
    dtype: str | None = option(None, "dtype of the computation (default: bfloat16, on a CPU float32)", choices=DTYPES)
    param_dtype: str | None = option(
        None, "dtype of the weights (default: float32, with --lora the checkpoint's)", choices=DTYPES
    )
    # `None` for 0.02, or none beside `eval_data`.
    eval_share: float | None = option(None, "fraction of the data that is held out for evaluation (default: 0.02)")
    every: int = option(
        100, "steps between checkpoints, each with an evaluation (default: {default})", check=within(1), of_run=False
    )
    samples: int = option(
        0, "how many held-out rows the model continues at each evaluation (default: {default})", check=within(0, 2**16),
        of_run=False, metavar="N",
    )  # fmt: skip
    patience: int | None = option(
        None, "stop after N evaluations without a lower held-out loss", check=within(1), of_run=False, metavar="N"
    )
    keep: int = option(
        1, "how many of the newest checkpoints to keep, in addition to the best one (default: {default})",
        check=within(1), of_run=False,
    )  # fmt: skip
    seed: int = option(0, "seed of all random numbers (default: {default})", check=within(0, 2**32 - 1))
    log: tuple[str, ...] = option(
        ("csv",), f"any of {', '.join(LOGS)}, separated by commas (default: csv)", of_run=False,
        type=lambda text: tuple(text.split(",")),
    )  # fmt: skip
    out: str = option("runs/finetune", "folder for checkpoints, logs and the result (default: {default})", of_run=False)
    merge: bool = option(False, "merge the adapters into the weights of the result", of_run=False)
    # `None` for the checkpoint's own, if it is smaller than that of the weights.
    save_dtype: str | None = option(
        None,
        "dtype of the weights in the result (default: the checkpoint's)",
        choices=(*DTYPES, "float16"),
        of_run=False,
    )
    result_of: int | None = option(
        None,
        "train nothing: export the checkpoint of this step to OUT/model-STEP or OUT/adapters-STEP",
        check=within(1), of_run=False, in_file=False, metavar="STEP",
    )  # fmt: skip
    fresh: bool = option(False, "start over, even if OUT has checkpoints", of_run=False, in_file=False)
    mesh: str | None = option(
        None, "devices along each mesh axis: fsdp=2,tensor=2 (default: as many along fsdp as divide batch and weights)",
        of_run=False,
    )  # fmt: skip
    distributed: str | None = option(
        None,
        "join the run's other processes: HOST:PORT,INDEX/NUMBER, or no value under SLURM, Open MPI and on cloud TPUs",
        of_run=False, in_file=False, nargs="?", const="", metavar="PLACE",
    )  # fmt: skip
    verify: bool = option(
        False,
        "read all weights of the model to check that they have not changed since the run began",
        of_run=False,
        in_file=False,
    )
    risk_memory: bool = option(
        False, "start even if the planner estimates that the run does not fit", of_run=False
    )  # fmt: skip

    command = "finetune"
    is_alone = False  # whether the command trains in one process
    peak_rates = 1e-5, 2e-4  # the learning rates without `lora` and with it
    no_options = ()  # fields that the command decides about

    def __post_init__(self):
        for name in ("data", "eval_data"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        _options.check(self)
        self._check_run()
        self._check_scored()
        self._check_adapters()
        self._check_data()
        self._check_result()

    def _check_run(self) -> None:
        if self.is_alone and self.distributed is not None:
            raise UserError("--distributed: this command trains in one process. Leave it out.")
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
        if self.warmup > 1 and self.warmup % 1:
            raise UserError(f"--warmup={self.warmup} must be a share of the steps below 1, or a whole number of steps.")
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
                "--stream reads data of unknown length, so no share can be held out: pass --steps and --eval-data."
            )
        if self.stream and len(self.data) > 1:
            raise UserError("--stream reads one dataset of the hub. Pass --data one id.")

    def _check_result(self) -> None:
        if self.save_dtype is not None and self.has_adapters and not self.merge:
            raise UserError(f"--save-dtype={self.save_dtype} is for weights, not adapters: pass --merge as well.")
        if self.result_of is not None and self.fresh:
            raise UserError(
                f"--result-of={self.result_of} exports a checkpoint of the existing run, which --fresh discards."
            )
        if not is_text(where := os.path.abspath(self.out)):
            raise UserError(
                f"--out={ascii(where)} is not valid UTF-8, and names of checkpoints must be. Pass another --out."
            )
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

    @classmethod
    def options(cls) -> Iterator[dataclasses.Field[Any]]:
        """The options that the command has."""
        return (field for field in _options.options_of(cls) if field.init and field.name not in cls.no_options)

    @classmethod
    def argument(cls, field: dataclasses.Field[Any]) -> dict[str, Any]:
        """The keywords of `ArgumentParser.add_argument` for an option, as the command has it."""
        hidden = dict(help=argparse.SUPPRESS) if cls.is_alone and field.name == "distributed" else {}
        peaks = [f"{rate:.0e}".replace("e-0", "e-") for rate in cls.peak_rates]
        return _options.argument(field, peaks=peaks) | hidden

    def to_write(self) -> dict[str, Any]:
        """The settings as a file of options has them.

        Returns values by name; `None` where the default depends on others. A file neither starts a run over nor has all
        weights read, and is the same for all processes.
        """
        return self._values("in_file")

    def of_all_processes(self) -> dict[str, Any]:
        """The settings that are the same in all processes of a run."""
        values = dataclasses.asdict(self)
        return {f"--{name.replace('_', '-')}": value for name, value in values.items() if name != "distributed"}

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is continued, by name."""
        return self._values("of_run") | {
            "epochs": self.epochs_to_train,
            "learning_rate": self.peak_rate,
            "data": " ".join(self.data),
            "eval_data": " ".join(self.eval_data),
            "eval_share": self.share_held_out,
            "column": self.column or "text",
        }

    def _values(self, kind: str) -> dict[str, Any]:
        """The values by name of the fields that are of a kind; of what is no option, too."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields if field.metadata.get(kind, True)}
