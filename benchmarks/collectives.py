"""The collectives of a training step, read in the program that is compiled for devices that are not there.

    python -m benchmarks.collectives [--model llama-3-8b] [--device h200:8] [--mesh fsdp=4,tensor=2 …] [--seq 4096]
                                     [--rows 2] [--program FILE] [--name collectives]

Each row counts what a layer, or the rest of a step, sends: how often, over how many devices, and the MiB that a device
puts on its links, loops multiplied out. `--program` keeps the program's text, or reads it if the file is there.
"""

import argparse
import math
import os
import pathlib
import sys

import jax

from benchmarks import _measure
from benchmarks._collectives import by_kind, collectives
from liger_jax.planner import compile_run
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run
from liger_jax.training.meshes import BATCH_AXES, in_words, parse_mesh

HEADER = ["of", "collective", "devices", "times", "MiB that a device sends"]


def program(run: Run, path: pathlib.Path | None) -> str:
    """The text of a run's compiled step, kept in a file if there is a path."""
    if path is not None and path.is_file():
        return path.read_text(encoding="utf8")
    executable = compile_run(run).program
    if executable is None:
        raise SystemExit("The compiler refused the program for its memory.")
    text = executable.as_text()
    if path is not None:
        path.write_text(text, encoding="utf8")
    return text


def section(run: Run, text: str) -> tuple[str, bool]:
    """A run's table, and whether it sends no array as large as a device's logits, but for the embedding."""
    sent, config = collectives(text), run.model.config
    most, logits = max(each.largest for each in sent), run.tokens * config.vocab_size // run.tensor
    table = config.vocab_size * config.hidden_size // run.tensor
    told = (
        f"\n{run.model.name}, {run.batch} × {run.seq}, {in_words(run.mesh)} of {run.target.name}, remat {run.remat}\n\n"
    )
    told += _measure.table(HEADER, by_kind(sent, run.model.config.num_hidden_layers))
    told += f"\nThe largest array that is sent has {most:,} elements; a device's logits have {logits:,}"
    told += ", and its embedding as many as the largest.\n" if most == table else ".\n"
    return told, all(each.largest < logits or each.largest == table for each in sent)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives")
    parser.add_argument("--model", default="llama-3-8b", help="as the planner takes it")
    parser.add_argument("--device", default="h200:8", help="as the planner takes it")
    default = [parse_mesh("fsdp=4,tensor=2")]
    parser.add_argument("--mesh", type=parse_mesh, nargs="+", default=default, help="such as fsdp=4,tensor=2")
    parser.add_argument("--rows", type=int, default=2, help="of each device, or of the devices that share rows")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--program", type=pathlib.Path, help="a file for the program's text, of a single mesh")
    parser.add_argument("--name", help="of a file under results/")
    arguments = parser.parse_args()
    if arguments.program is not None and len(arguments.mesh) > 1:
        parser.error("--program is the text of one mesh's program.")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    text = _measure.heading(" ".join(["python -m benchmarks.collectives", *sys.argv[1:]]), arguments.device)
    are_smaller = []
    for mesh in arguments.mesh:
        groups = math.prod(size for name, size in mesh.items() if name in (*BATCH_AXES, "expert"))
        sizes = dict(batch=arguments.rows * groups, seq=arguments.seq)
        # Packed rows run a kernel on GPUs whether or not cuDNN is installed.
        run = make_run(arguments.model, device=arguments.device, mesh=mesh, packed=True, **sizes)
        told, is_smaller = section(run, program(run, arguments.program))
        text += told
        are_smaller.append(is_smaller)
    _measure.show_or_save(arguments.name, text)
    return 0 if all(are_smaller) else 1


if __name__ == "__main__":
    sys.exit(main())
