"""`liger-jax plan`: will a training run fit?

liger-jax plan --model llama-3-8b --batch 16 --seq 4096 --device h200:8
liger-jax plan --model config.json --batch 64 --seq 4096 --device v5e:8x8 --level compiled
liger-jax plan --model qwen2-0.5b --seq 512 --device t4 --search batch
"""

import argparse
import os
import sys

import jax

from liger_jax.ops.block_quantized import KINDS
from liger_jax.pallas_kernels.devices import GIB, GPUS, TPUS
from liger_jax.planner import compilers, planning, report
from liger_jax.planner.architectures import MODELS
from liger_jax.planner.planning import LEVELS, SEARCHES, MemoryPlan
from liger_jax.planner.step import LOSSES, OPTIMIZERS, REMATS, STATE_MEMORIES

SUMMARY = "will a training run fit?"
_DTYPES = ("float32", "bfloat16", "float16")


def run(args: argparse.Namespace) -> int:
    """Prints the plan.

    Args:
        args: the parsed arguments that `add_arguments` has added.

    Returns:
        The exit code: 0 if the run fits, 1 if not, 2 for an error.
    """
    if "JAX_PLATFORMS" not in os.environ:  # nothing is run, and looking for an accelerator takes seconds
        jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the compilers' logs
    names = "optimizer state_dtype state_memory param_dtype dtype remat loss micro_batches packed lora quantize".split()
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    where = dict(batch=args.batch, seq=args.seq, device=args.device, mesh=args.mesh)
    try:
        for name in SEARCHES:
            if where[name] is None and args.search != name:
                raise ValueError(f"--{name} is needed, or --search {name} for the largest that fits.")
        if args.picture:
            report.check_picture(args.picture)
        answers = _search(args, where, options) if args.search else []
        found = planning.plan(args.model, **where, level=args.level, **options)
        known = where["batch"] if args.search == "batch" else None
        print(report.text(found, known), *answers, *report.notes(found), *_notes(found), sep="\n", flush=True)
        if args.picture:
            report.picture(found, args.picture)
            print(f"picture: {args.picture}")
    except BrokenPipeError:  # who reads it, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    except (ValueError, OSError, ImportError) as error:
        print("liger-jax plan:", *str(error).split(), file=sys.stderr)  # on one line, whoever raised it
        return 2
    return 0 if found.fits else 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax plan`.

    Args:
        command: its parser.
    """
    command.add_argument("--model", required=True, help=f"a config.json or its folder, or {', '.join(MODELS)}")
    command.add_argument("--batch", type=int, help="sequences in a step, over all devices")
    command.add_argument("--seq", type=int, help="tokens in a sequence")
    command.add_argument(
        "--device", required=True, help=f"{', '.join(GPUS)} (h200:8 for several); {', '.join(TPUS)} (v5e:8x8)"
    )
    command.add_argument("--mesh", help="such as data=2,fsdp=8; default: all devices along fsdp")
    command.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    command.add_argument("--state-dtype", choices=_DTYPES, default="float32", help="of the optimizer's moments")
    command.add_argument("--param-dtype", choices=_DTYPES, default="float32", help="of parameters and gradients")
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the computation")
    command.add_argument("--remat", choices=REMATS, default="full", help="what layers compute again")
    command.add_argument("--loss", choices=LOSSES, default="fused", help="which must fit")
    command.add_argument(
        "--micro-batches", type=int, default=1, help="equal parts of a step's batch, one after the other"
    )
    command.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, and nothing else")
    command.add_argument("--quantize", choices=KINDS, help="hold the frozen weights of layers in fewer bits")
    command.add_argument("--packed", action="store_true", help="rows hold several documents, each by itself")
    command.add_argument("--state-memory", choices=STATE_MEMORIES, default="device", help="where the moments lie")
    command.add_argument("--level", choices=LEVELS, default="estimate", help="formulas, or the compiler itself")
    command.add_argument(
        "--search", choices=SEARCHES, help="the largest that fits, by the compiler; that option is not needed then"
    )
    command.add_argument("--picture", metavar="FILE", help="also draw it, as a PNG or what its name ends in")


def _search(args, where, options) -> list[str]:
    """Sets the size that is looked for, and says what was compiled to find it."""
    args.level = "compiled"  # as the search is
    run = planning.make_run(args.model, **where | {args.search: None}, **options)  # whatever size was typed beside it
    try:
        from tqdm import tqdm

        bar = tqdm(desc=f"largest {args.search}", unit="compilation")
        step = lambda text: (bar.set_postfix_str(text, refresh=False), bar.update())
    except ImportError:
        bar, step = None, lambda text: print(text, file=sys.stderr)
    tell = lambda size, needed, fits: step(f"{size}: {needed / GIB:.2f} GiB {'fits' if fits else 'is too much'}")
    try:
        found = planning.search(run, args.search, tell)
    finally:
        if bar is not None:
            bar.close()
    where[args.search] = largest = getattr(found.run, args.search)
    lines = [f"The largest {args.search} that fits is {largest}. What was compiled to find it:"]
    return lines + [f"  {args.search} {size}: {needed / GIB:.2f} GiB" for size, needed in sorted(found.answers.items())]


def _notes(found: MemoryPlan) -> list[str]:
    if not found.compiled:
        return ["These are estimates; --level compiled asks the compiler."]
    if found.run.target.platform == "gpu" and (reason := compilers.without_cudnn()) is not None:
        return [f"Note: {reason}"]
    return []
