"""`liger-jax plan`: will a training run fit?

liger-jax plan --model qwen2.5-7b --device rtx4090 --lora 16
liger-jax plan --model llama-3-8b --batch 16 --seq 4096 --device h200:8 --details
liger-jax plan --model config.json --batch 64 --seq 4096 --device v5e:8x8 --level compiled
liger-jax plan --model qwen2-0.5b --seq 512 --device t4 --search batch
liger-jax plan --model llama-3-70b --batch 8 --seq 8192 --device h200:16 --mesh fsdp=8,tensor=2
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from liger_jax.commands._exit_code import exit_code
from liger_jax.models.core.stretched import ROPE_SCALINGS
from liger_jax.ops.block_quantized import KINDS
from liger_jax.pallas_kernels.devices import GIB, GPUS, TPUS
from liger_jax.planner import compilers, defaults, device_names, planning, report, searching
from liger_jax.planner.architectures import MODELS
from liger_jax.planner.choosing import smallest
from liger_jax.planner.devices import target
from liger_jax.planner.planning import LEVELS, MemoryPlan
from liger_jax.planner.searching import SEARCHES
from liger_jax.planner.step import LOSSES, OPTIMIZERS, REMATS, STATE_MEMORIES, as_remat
from liger_jax.trainers import adapters
from liger_jax.training.meshes import AUTO, in_words, parse_mesh
from liger_jax.user_errors import user_errors

SUMMARY = "will a training run fit?"
_DTYPES = ("float32", "bfloat16", "float16")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit code: 0 if the run fits, 1 if not, 2 for an error."""
    if "JAX_PLATFORMS" not in os.environ:  # nothing is run, and looking for an accelerator takes seconds
        jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the compilers' logs

    def work():
        with user_errors():
            return _planned(args)

    return exit_code(args, work)


def _planned(args: argparse.Namespace) -> int:
    names = "memory optimizer state_dtype state_memory param_dtype dtype remat loss micro_batches".split()
    names += ["packed", "lora", "lora_experts", "dora", "quantize", "host_memory", "rope_scaling"]
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.lora_targets is not None:
        options["lora_targets"] = adapters.targets(args.lora_targets)
    mesh = None if args.mesh in (None, AUTO) else parse_mesh(args.mesh)
    where = dict(batch=args.batch, seq=args.seq, device=args.device, mesh=mesh)
    if args.device is None and args.memory is None:
        raise ValueError("--device is needed, such as --device rtx4090; or a GPU's memory, such as --memory 24GiB.")
    if args.picture:
        report.check_picture(args.picture)
    level, why = _level(args)
    answers = _search(args, where, options, level, why) if args.search else []
    plan = planning.plan(args.model, **where, level=level, **options)
    known = where["batch"] if args.search == "batch" else None
    lines = [report.text(plan, known, details=bool(args.details)), *answers, *report.notes(plan), *_notes(plan, args)]
    print(*lines, sep="\n", flush=True)
    if args.picture:
        report.picture(plan, args.picture)
        print(f"picture: {args.picture}")
    return 0 if plan.fits else 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax plan`."""
    command.add_argument(
        "--model", required=True, help=f"a config.json or its folder; or an id, such as one of {', '.join(MODELS)}"
    )
    command.add_argument("--batch", type=int, help=f"sequences in a step, over all devices (default: {defaults.BATCH})")
    command.add_argument(
        "--seq", "--length", type=int, help=f"tokens in a sequence (default: {defaults.LENGTH}, or the model's most)"
    )
    command.add_argument("--device", help=f"{', '.join(GPUS)} (h200:8 for several); {', '.join(TPUS)} (v5e:8x8)")
    command.add_argument(
        "--memory", help="a GPU's memory, such as 24GiB: instead of --device, or of the device's own memory"
    )
    command.add_argument(
        "--mesh", help="such as fsdp=4,tensor=2 (or data=…, expert=…, sequence=…); default: all devices along fsdp"
    )
    command.add_argument("--optimizer", choices=OPTIMIZERS, help=f"(default: {defaults.OPTIMIZER})")
    command.add_argument("--state-dtype", choices=_DTYPES[:2], help="dtype of adamw's moments (default: float32)")
    command.add_argument(
        "--param-dtype", choices=_DTYPES, help="dtype of the weights (default: float32, with --lora the checkpoint's)"
    )
    command.add_argument("--dtype", choices=_DTYPES, help=f"dtype of the computation (default: {defaults.DTYPE})")
    command.add_argument(
        "--remat",
        type=as_remat,
        choices=REMATS,
        help="what layers keep for the backward, or how many of the last ones keep their products (default: auto, "
        "the fastest that fits)",
    )
    command.add_argument(
        "--loss", choices=LOSSES, help="the loss that the step computes: fused, or on logits (default: fused)"
    )
    command.add_argument(
        "--micro-batches",
        type=int,
        help="micro-batches into which a step's batch is cut for gradient accumulation (default: what is fastest)",
    )
    command.add_argument(
        "--lora", type=int, nargs="?", const=defaults.RANK, metavar="RANK", help="train only adapters, of this rank"
    )
    command.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="modules with adapters: q_proj,v_proj, all-linear or a regular expression",
    )
    command.add_argument("--lora-experts", action="store_true", help="also add adapters to the experts of a mixture")
    command.add_argument(
        "--dora", action="store_true", help="weight-decomposed adapters: also train the norms of the weights' columns"
    )
    command.add_argument("--quantize", choices=KINDS, help="quantize the frozen weights of the layers to 4 or 8 bits")
    command.add_argument(
        "--packed", "--pack", action="store_true", help="rows hold several documents, none of which attends to another"
    )
    command.add_argument(
        "--state-memory", choices=STATE_MEMORIES, help="where the optimizer's moments are stored (default: device)"
    )
    longer = "how the rotary embedding is scaled for rows longer than the model's positions"
    command.add_argument("--rope-scaling", choices=list(ROPE_SCALINGS), help=longer)
    command.add_argument("--host-memory", help="the host's memory, such as 128GiB, for what is offloaded to it")
    command.add_argument(
        "--level",
        choices=LEVELS,
        help="estimate by formulas, or compile the step (default: estimate; with --search compiled)",
    )
    command.add_argument(
        "--search",
        choices=SEARCHES,
        help="find the largest batch or sequence, or the first mesh, that fits; leave out that option itself",
    )
    command.add_argument("--details", action="store_true", help="also print a table and bars of what takes the memory")
    command.add_argument(
        "--picture",
        metavar="FILE",
        help="also draw the memory into this file, in the format of its suffix (default: PNG)",
    )


def _level(args: argparse.Namespace) -> tuple[str, str]:
    """Who says what a step needs, and why a search asks the estimate where it does."""
    if args.level is not None or not args.search:
        return args.level or "estimate", ""
    devices = target(args.device, args.memory)
    if devices.platform == "gpu" and devices.name.partition(":")[0] not in GPUS:
        return "estimate", ", since no chip is named for which a step could be compiled"
    missing = compilers.missing_compiler(devices.platform)
    return ("compiled", "") if missing is None else ("estimate", f", since {missing}")


def _search(args, where, options, level: str, why: str) -> list[str]:
    """Sets the size that is looked for, and says what was compiled to find it; or why nothing was."""
    where[args.search] = None  # whatever was typed beside it
    if level == "compiled":
        compilers.need_compiler(target(args.device, args.memory).platform)  # before there is a bar
    with _progress(args.search, level) as tell:
        if args.search == "mesh":
            others = {name: value for name, value in where.items() if name != "mesh"}
            result = searching.search_mesh(searching.runs_on_meshes(args.model, **others, **options), tell, level)
            summary = f"Of the meshes that send least, {in_words(result.run.mesh)} is the first that fits"
            answers = list(result.answers.items())
        else:
            run, open_to = planning.make_run(args.model, **where, **options), planning.left_open(options)
            # A batch is looked for that one micro-batch holds, and a row that any way of the run holds.
            way = (lambda run: smallest(run, **open_to)) if args.search == "seq" else lambda run: run
            result = searching.search(run, args.search, tell, level, way)
            summary = f"The largest {args.search} that fits is {getattr(result.run, args.search)}"
            answers = sorted(result.answers.items())
    where[args.search] = getattr(result.run, args.search)
    if level == "estimate":
        return [f"{summary} by the estimate{why}."]
    lines = [f"  {args.search} {size}: {needed / GIB:.2f} GiB" for size, needed in answers]
    return [f"{summary}. What was compiled to find it:", *lines]


@contextlib.contextmanager
def _progress(what: str, level: str) -> Iterator[Callable[..., Any]]:
    """A context that gives a function which tells of each compilation; estimates take no time."""
    if level == "estimate":
        yield lambda size, needed, fits: None
        return
    try:
        from tqdm import tqdm

        bar = tqdm(desc=f"--search {what}", unit="compilation")
        step = lambda text: (bar.set_postfix_str(text, refresh=False), bar.update())
    except ImportError:
        bar, step = None, lambda text: print(text, file=sys.stderr)
    try:
        yield lambda size, needed, fits: step(f"{size}: {needed / GIB:.2f} GiB {'fits' if fits else 'is too much'}")
    finally:
        if bar is not None:
            bar.close()


def _notes(plan: MemoryPlan, args: argparse.Namespace) -> list[str]:
    notes, key = [], plan.run.target.name.partition(":")[0]
    if args.device and key in GPUS and (others := device_names.others_with_that_name(key, args.device)):
        notes.append(f"Note: {args.device} is taken for {key}; there is {' and '.join(others)}, too.")
    if not plan.compiled:
        details = "" if args.details else "; --details shows what takes the memory"
        return [*notes, f"These are estimates; --level compiled asks the compiler{details}."]
    if plan.run.target.platform == "gpu" and (reason := compilers.without_cudnn()) is not None:
        notes.append(f"Note: {reason}")
    return notes
