"""The command line's arguments that training commands share: an option for each field of `Settings`."""

import argparse
import dataclasses

from liger_jax.data.formats import FORMATS
from liger_jax.models.core.stretched import ROPE_SCALINGS
from liger_jax.ops.block_quantized import KINDS
from liger_jax.planner import defaults
from liger_jax.planner.step import REMATS
from liger_jax.trainers.options import DTYPES, LOGS, OPTIMIZERS, SAVE_DTYPES, SCHEDULES, Settings

ALTERNATIVES = (("steps", "epochs"),)  # a run takes one: that of the command line overrules the other in a file


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how texts and conversations become rows."""
    add = command.add_argument
    add("--column", help="the field that is trained on: a text, or a list of messages (default: by the fields' names)")
    add("--format", choices=list(FORMATS), help="the format, if rows have the fields of several formats")
    add_row_arguments(command)


def add_row_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how any data becomes rows."""
    add = command.add_argument
    data = "data for evaluation only, instead of holding out a share of --data"
    add("--eval-data", nargs="+", metavar="DATA", help=data)
    add("--subset", help="the dataset's configuration")
    add("--pack", action="store_true", help="pack several documents into a row; none attends to another")
    add("--length", type=int, help="tokens in a row (default: 2048)")
    add_rope_argument(command)
    add("--eval-share", type=float, help="fraction of the data that is held out for evaluation (default: 0.02)")
    add("--seed", type=int, help="seed of all random numbers (default: 0)")


def add_rope_argument(command: argparse.ArgumentParser) -> None:
    """Adds the argument for rows beyond a model's positions."""
    longer = "how the rotary embedding reaches rows beyond the model's positions (default: they are refused)"
    command.add_argument("--rope-scaling", choices=list(ROPE_SCALINGS), help=longer)


def add_training_arguments(command: argparse.ArgumentParser, settings_type: type[Settings]) -> None:
    """Adds the arguments of every command that trains a model, apart from those of its data."""
    model = "a checkpoint's folder or id, such as Qwen/Qwen2.5-0.5B; or adapters"
    command.add_argument("--model", required=True, help=model)
    _add_model_arguments(command)
    _add_step_arguments(command, settings_type)
    _add_run_arguments(command, settings_type)


def _add_model_arguments(command: argparse.ArgumentParser) -> None:
    """What is trained, and in which precision."""
    add = command.add_argument
    add(
        "--lora",
        type=int,
        nargs="?",
        const=defaults.RANK,
        metavar="RANK",
        help="train adapters of this rank (default: 16)",
    )
    add("--lora-alpha", type=float, help="the adapters' alpha; they are scaled by alpha/rank (default: twice the rank)")
    add(
        "--lora-targets",
        metavar="NAMES",
        help="modules with adapters: q_proj,v_proj, all-linear or a regular expression (default: all seven)",
    )
    add("--lora-experts", action="store_true", help="also add adapters to the experts of a mixture")
    add("--lora-dropout", type=float, help="dropout probability of the adapters' inputs (default: 0)")
    add("--rslora", action="store_true", help="scale the adapters by alpha/√rank")
    add("--dora", action="store_true", help="weight-decomposed adapters: also train the norms of the weights' columns")
    add("--quantize", choices=KINDS, help="quantize the frozen weights of the layers to 4 or 8 bits")
    add(
        "--remat",
        choices=REMATS,
        help="what layers keep for the backward (default: full, or an offload where full does not fit)",
    )
    add("--dtype", choices=DTYPES, help="dtype of the computation (default: bfloat16, on a CPU float32)")
    add("--param-dtype", choices=DTYPES, help="dtype of the weights (default: float32, with --lora the checkpoint's)")


def _add_step_arguments(command: argparse.ArgumentParser, settings_type: type[Settings]) -> None:
    """How many steps there are, and what a step does."""
    add = command.add_argument
    add("--batch", type=int, help="rows in a step (default: 8)")
    add(
        "--micro-batches",
        type=int,
        help="micro-batches into which a batch is cut for gradient accumulation (default: as few as fit)",
    )
    add(
        "--mesh",
        help="devices along each mesh axis: fsdp=2,tensor=2 (default: as many along fsdp as divide batch and weights)",
    )
    add("--epochs", type=float, help="how often each row is trained on, such as 2.5 (default: 1)")
    add("--steps", type=int, help="number of training steps, instead of --epochs")
    rates = [f"{rate:.0e}".replace("e-0", "e-") for rate in settings_type.peak_rates]
    add("--learning-rate", type=float, help=f"the peak learning rate (default: {rates[0]}, with --lora {rates[1]})")
    add("--optimizer", choices=OPTIMIZERS, help="adamw8bit holds its moments in 8 bits (default: adamw)")
    add("--schedule", choices=SCHEDULES, help="learning rate after its peak (default: cosine, which decays to a tenth)")
    add("--warmup", type=float, help="warmup steps: a fraction of all steps, or from 1 on their number (default: 0.03)")
    add("--weight-decay", type=float, help="AdamW's decoupled weight decay (default: 0.01)")
    add("--clip", type=float, help="clip the global norm of the gradients at this value; 0 does not clip (default: 1)")


def _add_run_arguments(command: argparse.ArgumentParser, settings_type: type[Settings]) -> None:
    """What a run looks at, prints and leaves."""
    add = command.add_argument
    add("--every", type=int, help="steps between checkpoints, each with an evaluation (default: 100)")
    add("--samples", type=int, metavar="N", help=f"{settings_type.what_samples} (default: 0)")
    add("--patience", type=int, metavar="N", help="stop after N evaluations without a lower held-out loss")
    add("--keep", type=int, help="how many of the newest checkpoints to keep, in addition to the best one (default: 1)")
    add(
        "--log",
        type=lambda text: tuple(text.split(",")),
        help=f"any of {', '.join(LOGS)}, separated by commas (default: csv)",
    )
    add("--out", help=f"folder for checkpoints, logs and the result (default: {settings_type.out})")
    joined = (
        "join the run's other processes: HOST:PORT,INDEX/NUMBER, or no value under SLURM, Open MPI and on cloud TPUs"
    )
    add(
        "--distributed",
        nargs="?",
        const="",
        metavar="PLACE",
        help=argparse.SUPPRESS if settings_type.is_alone else joined,
    )
    add("--merge", action="store_true", help="merge the adapters into the weights of the result")
    add("--save-dtype", choices=SAVE_DTYPES, help="dtype of the weights in the result (default: the checkpoint's)")
    kept = "train nothing: export the checkpoint of this step to OUT/model-STEP or OUT/adapters-STEP"
    add("--result-of", type=int, metavar="STEP", help=kept)
    add("--fresh", action="store_true", help="start over, even if OUT has checkpoints")
    add("--risk-memory", action="store_true", help="start even if the planner estimates that the run does not fit")
    add(
        "--verify",
        action="store_true",
        help="read all weights of the model to check that they have not changed since the run began",
    )


def settings_of(args: argparse.Namespace, settings_type: type[Settings] = Settings) -> Settings:
    """The settings of a run."""
    fields = {field.name for field in dataclasses.fields(settings_type) if field.init}
    return settings_type(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
