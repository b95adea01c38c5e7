"""Normalisations against their peers on one GPU: kernel time, forward and backward, beside a copy of the same bytes.

    python -m benchmarks.norms [--ops …] [--widths …] [--rows 16384] [--peers …] [--smoke]

Times are kernel times by CUPTI, of JAX's and torch's kernels alike, in one process. A backward is the gradient alone,
by rows and parameters, from what its forward kept. The bytes are those that the op cannot avoid: each array of rows
once.
"""

import argparse
import functools
import importlib.metadata
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import _bandwidth, _measure, _norm_peers
from benchmarks._bandwidth import Case, Program
from liger_jax.pallas_kernels import fused_add_rms_norm, layer_norm, rms_norm

WIDTHS = (896, 2048, 2304, 3584, 4096, 5120, 8192, 18432)
RMS_OPTIONS = {"eps": _norm_peers.EPS, "offset": 0.0}


class Op(NamedTuple):
    """Its kernels' folder, options, and how many arrays of rows and of parameters go in, and of rows come out."""

    kernels: Any
    options: dict[str, Any]
    forward_options: dict[str, Any]
    rows_in: int
    parameters: int
    rows_out: int


OPS = {
    "rms_norm": Op(rms_norm, RMS_OPTIONS, {"casting_mode": "llama"}, 1, 1, 1),
    "fused_add_rms_norm": Op(fused_add_rms_norm, RMS_OPTIONS, {"casting_mode": "llama"}, 2, 1, 2),
    "layer_norm": Op(layer_norm, {"eps": _norm_peers.EPS}, {}, 1, 2, 1),
}


class Inputs(NamedTuple):
    """One set: what goes in, the cotangents, and what a forward keeps (a sum, where several arrays of rows go in)."""

    arrays: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, ...]
    kept: tuple[jax.Array, ...]


def make_inputs(op: Op, rows: int, width: int, seed: int) -> Inputs:
    keys = iter(jax.random.split(jax.random.key(seed), op.rows_in + op.parameters + op.rows_out))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    matrices = tuple(normal(rows, width) for _ in range(op.rows_in))
    parameters = tuple(normal(width) for _ in range(op.parameters))
    cotangents = tuple(normal(rows, width) for _ in range(op.rows_out))
    return Inputs((*matrices, *parameters), cotangents, (sum(matrices[1:], start=matrices[0]), *parameters))


def num_bytes(op: Op, rows: int, width: int, direction: str) -> int:
    """Forward: rows in and out. Backward: the cotangents and the kept rows, and one gradient of rows."""
    matrices = op.rows_in + op.rows_out if direction == "forward" else op.rows_out + 1 + 1
    return 2 * width * (matrices * rows + op.parameters)


def our_function(op: Op, kernel: str, direction: str) -> Callable[..., Any]:
    """A kernel as the op calls it, without the op."""
    name, _, interpret = kernel.partition(":")
    module = importlib.import_module(f"{op.kernels.__name__}.{name}")
    options = op.options | (op.forward_options if direction == "forward" else {})
    options |= {} if name == "xla" else {"interpret": bool(interpret)}
    return functools.partial(getattr(module, direction), **options)


def attempt(who: str, family: str, calls: Callable[[], Sequence[Callable[[], Any]]], **options: Any) -> Program:
    """A program in any case: what cannot run here is a result too."""
    try:
        return Program(who, family, calls(), **options)
    except Exception as error:
        return Program(who, family, [], failure=" ".join(f"{type(error).__name__}: {error}".split())[:300])


def programs(
    name: str,
    op: Op,
    sets: list[Inputs],
    direction: str,
    options: argparse.Namespace,
    peers: dict[str, _norm_peers.Ops],
) -> Iterator[Program]:
    arrays = [s.arrays if direction == "forward" else (*s.cotangents, *s.kept) for s in sets]

    def ours(kernel):
        compiled = jax.jit(our_function(op, kernel, direction)).lower(*arrays[0]).compile()
        return [functools.partial(compiled, *each) for each in arrays]

    for kernel in options.implementations:
        yield attempt(f"liger-jax {kernel}", "liger-jax", functools.partial(ours, kernel))
    for who, ops in peers.items():
        if name in ops:
            calls = lambda ops=ops: [
                _norm_peers.calls(ops[name], each.arrays, each.cotangents, direction) for each in sets
            ]
            yield attempt(who, "torch", calls, wait=_norm_peers.wait)


def importable(names: list[str], absent: dict[str, str]) -> dict[str, _norm_peers.Ops]:
    """The ops of the peers that are installed; why the others are not."""
    found = {}
    for name in names:
        who, make = _norm_peers.PEERS[name]
        try:
            found[who] = make()
        except Exception as error:  # some packages raise more than ImportError when a GPU or a version is wrong
            absent[who] = f"{type(error).__name__}: {error}"
    return found


def versions() -> str:
    found = []
    for package in _norm_peers.PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norms")
    parser.add_argument("--ops", nargs="+", choices=tuple(OPS), default=list(OPS))
    parser.add_argument("--rows", nargs="+", type=int, default=[16384])
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--directions", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    parser.add_argument("--implementations", nargs="*", default=["xla", "triton"])
    parser.add_argument("--peers", nargs="*", choices=tuple(_norm_peers.PEERS), default=list(_norm_peers.PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="norms", help="of the files, without their endings")
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any machine, to try this program")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.widths, options.rounds = [64], [128, 200], 1
        options.implementations = ["xla", "triton:interpret", "mosaic_tpu:interpret"]
    elif jax.default_backend() != "gpu":
        parser.error(
            f"kernel times need an NVIDIA GPU, and JAX's backend is {jax.default_backend()}; "
            "--smoke tries the program with tiny sizes."
        )
    return options


def report(options: argparse.Namespace, cases: list[Case], absent: dict[str, str], command: str) -> None:
    heading = "; ".join(filter(None, (_measure.heading(command).rstrip(), versions())))
    setting = "Kernel times by CUPTI" if jax.default_backend() == "gpu" else "Times on the wall, of a smoke test"
    setting += ", bfloat16, medians over rounds in which every program has its turn; 100 % is the better of the copies."
    lines = [line for case in cases for line in _bandwidth.table_lines(case)]
    text = f"{heading}\n\n{setting}\n\n{_measure.table(_bandwidth.HEADER, lines)}\n{_bandwidth.notes(cases)}"
    text += "".join(f"- not importable: {who} ({reason})\n" for who, reason in absent.items())
    _measure.save(options.name, text, options.folder)
    title = f"{heading.split(', `')[0]}. Rows: {', '.join(map(str, options.rows))}; bfloat16."
    _bandwidth.draw(cases, options.folder / f"{options.name}.png", title)


def measured(
    name: str, rows: int, width: int, options: argparse.Namespace, peers: dict[str, _norm_peers.Ops]
) -> Iterator[Case]:
    """A case for each direction."""
    op = OPS[name]
    count = 1 if options.smoke else _bandwidth.num_sets(2 * rows * width * op.rows_in)
    sets = [make_inputs(op, rows, width, seed) for seed in range(count)]
    for direction in options.directions:
        moved = num_bytes(op, rows, width, direction)
        found = list(programs(name, op, sets, direction, options, peers))
        case = Case(name, rows, width, direction, moved, _bandwidth.copies(moved), found)
        _bandwidth.time_in_rounds((*case.copies, *case.programs), options.rounds)
        # What was timed lets go of its arrays.
        for program in (*case.copies, *case.programs):
            program.calls = []
        yield case


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options, absent, cases = parse_options(sys.argv[1:]), {}, []
    command = " ".join(["python -m benchmarks.norms", *sys.argv[1:]])
    peers = importable(options.peers, absent)
    for name, rows, width in itertools.product(options.ops, options.rows, options.widths):
        for case in measured(name, rows, width, options, peers):
            cases.append(case)
            print(
                f"{case.op} {case.rows} × {case.width} {case.direction}: copy {1e3 * case.copy_ms:.1f} µs", flush=True
            )
    report(options, cases, absent, command)


if __name__ == "__main__":
    main()
