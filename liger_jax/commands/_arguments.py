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
    add("--format", choices=list(FORMATS), help="the format of rows that have the fields of several")
    add_row_arguments(command)


def add_row_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how any data becomes rows."""
    add = command.add_argument
    data = "what is scored and not trained on, in the place of a share of --data"
    add("--eval-data", nargs="+", metavar="DATA", help=data)
    add("--subset", help="the dataset's configuration")
    add("--pack", action="store_true", help="documents share rows, and none sees another")
    add("--length", type=int, help="tokens in a row (default: 2048)")
    add_rope_argument(command)
    add("--eval-share", type=float, help="of the data that is held out and scored (default: 0.02)")
    add("--seed", type=int, help="of all that is random (default: 0)")


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
    add("--lora-alpha", type=float, help="numerator of their scale (default: twice the rank)")
    add(
        "--lora-targets",
        metavar="NAMES",
        help="q_proj,v_proj or all-linear or a regular expression (default: all seven)",
    )
    add("--lora-experts", action="store_true", help="the experts of a mixture have adapters, too")
    add("--lora-dropout", type=float, help="the share of the adapters' inputs that training drops (default: 0)")
    add("--rslora", action="store_true", help="scale the adapters by alpha/√rank")
    add("--dora", action="store_true", help="train the lengths of the weights' columns, too")
    add("--quantize", choices=KINDS, help="hold the frozen weights of layers in 4 or 8 bits")
    add("--remat", choices=REMATS, help="what layers keep for the backward (default: full; offload… if it must)")
    add("--dtype", choices=DTYPES, help="of the computation (default: bfloat16, on a CPU float32)")
    add("--param-dtype", choices=DTYPES, help="of the weights (default: float32, with --lora the checkpoint's own)")


def _add_step_arguments(command: argparse.ArgumentParser, settings_type: type[Settings]) -> None:
    """How many steps there are, and what a step does."""
    add = command.add_argument
    add("--batch", type=int, help="rows in a step (default: 8)")
    add("--micro-batches", type=int, help="micro-batches of a batch, one after the other (default: as few as fit)")
    add(
        "--mesh",
        help="devices along axes, as fsdp=2,tensor=2 (default: as many along fsdp as divide batch and weights)",
    )
    add("--epochs", type=float, help="how often each row is trained on, such as 2.5 (default: 1)")
    add("--steps", type=int, help="training steps, in the place of --epochs")
    rates = [f"{rate:.0e}".replace("e-0", "e-") for rate in settings_type.peak_rates]
    add("--learning-rate", type=float, help=f"the peak (default: {rates[0]}, with --lora {rates[1]})")
    add("--optimizer", choices=OPTIMIZERS, help="adamw8bit holds its moments in 8 bits (default: adamw)")
    add("--schedule", choices=SCHEDULES, help="of the rate after its peak (default: cosine, down to a tenth)")
    add("--warmup", type=float, help="share of the steps in which the rate rises, or their number (default: 0.03)")
    add("--weight-decay", type=float, help="share of a weight that a step of rate 1 takes away (default: 0.01)")
    add("--clip", type=float, help="largest norm of a gradient, 0 for any (default: 1)")


def _add_run_arguments(command: argparse.ArgumentParser, settings_type: type[Settings]) -> None:
    """What a run looks at, prints and leaves."""
    add = command.add_argument
    add("--every", type=int, help="steps between checkpoints, each with an evaluation (default: 100)")
    add("--samples", type=int, metavar="N", help=f"{settings_type.what_samples} (default: 0)")
    add("--patience", type=int, metavar="N", help="stop after N evaluations without a smaller held-out loss")
    add("--keep", type=int, help="newest checkpoints to keep, beside the best by held-out loss (default: 1)")
    add("--log", type=lambda text: tuple(text.split(",")), help=f"of {', '.join(LOGS)}, with commas (default: csv)")
    add("--out", help=f"folder for checkpoints, logs and the result (default: {settings_type.out})")
    joined = "join the run's other processes: HOST:PORT,INDEX/NUMBER, or nothing under SLURM, Open MPI, on a cloud TPU"
    add(
        "--distributed",
        nargs="?",
        const="",
        metavar="PLACE",
        help=argparse.SUPPRESS if settings_type.is_alone else joined,
    )
    add("--merge", action="store_true", help="add the adapters to the weights in the result")
    add("--save-dtype", choices=SAVE_DTYPES, help="of the weights in the result (default: as the model came)")
    kept = "write the result of this step, whose checkpoint is kept, to OUT/model-STEP or adapters-STEP; train nothing"
    add("--result-of", type=int, metavar="STEP", help=kept)
    add("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    add("--risk-memory", action="store_true", help="begin even if the run does not fit by the planner's estimate")
    add("--verify", action="store_true", help="read all weights to know that the model is still the run's")


def settings_of(args: argparse.Namespace, settings_type: type[Settings] = Settings) -> Settings:
    """The settings of a run."""
    fields = {field.name for field in dataclasses.fields(settings_type) if field.init}
    return settings_type(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
