"""Kernels against the speed of a copy: what the benchmarks of memory-bound ops share.

The programs of a case take turns in rounds. In its turn a program runs several times, each time on the next of several
equal sets of buffers, together at least four times the L2 cache, and its outputs are held until the turn is over: no
run finds its data in the cache. Times count the kernels alone (CUPTI). They are summed over a run; the figure is the
median over the runs of a turn, and then over the rounds. The yardstick is the fastest of several kernels that copy as
many bytes as the op must read and write, timed in the same rounds.

Torch's programs run in the same process on copies of the same data. Triton and torch.compile have compiled theirs
before the rounds begin.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import math
import os
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import triton as pltriton

from benchmarks import _figures, _measure
from liger_jax._install import install_command
from liger_jax.pallas_kernels.tiles import cdiv, round_up

ROTATED_BYTES = 4 * 128 * 2**20  # four times the largest L2 so far, of a B200; an H200's is 50 MiB
HELD_BYTES = 8 * 2**30  # of a turn's outputs, unless the least number of runs holds more
COPY_WIDTH = 1024  # float32 elements of a row of the copied array
COPY_TILES = ((1, 4), (2, 4), (4, 4), (4, 8), (8, 8))  # rows of a program, and its warps
PICTURES = pathlib.Path(__file__).parents[1] / "docs"
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels")

HEADER = ["shape", "who", "forward µs", "TB/s", "of copy", "backward µs", "TB/s", "of copy"]

Op = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An op at one shape: its arrays, our implementations of it and its peers.

    `make` takes a key and returns the op's arrays. The first `num_differentiated` have gradients; the backward reads
    those whose indices are in `saved`. `ours` has our functions of them by name. `peers` has a function for each peer
    that imports it, raises where it is not installed, and returns a function of torch's tensors.
    """

    op: str
    shape: str
    make: Callable[[jax.Array], tuple[jax.Array, ...]]
    ours: dict[str, Op]
    peers: dict[str, Callable[[], Op]]
    num_differentiated: int
    saved: tuple[int, ...]
    unread_bytes: int = 0  # bytes of the `saved` arrays that neither direction reads


@dataclasses.dataclass
class Row:
    """What was measured of one implementation; None where it was not."""

    who: str
    forward_us: float | None = None
    backward_us: float | None = None
    failure: str | None = None


class Result(NamedTuple):
    """An op's rows at one shape; what forward and backward move, and how fast the best copy of as much is, in TB/s."""

    op: str
    shape: str
    num_bytes: tuple[int, int]
    copy_speeds: tuple[float, float]
    rows: list[Row]


def figures(time_us: float | None, num_bytes: int, copy_speed: float) -> list[str]:
    if time_us is None:
        return ["–", "–", "–"]
    speed = num_bytes / time_us / 1e6
    return [f"{time_us:.1f}", f"{speed:.2f}", f"{100 * speed / copy_speed:.0f} %"]


def step_us(row: Row) -> float:
    """Forward and backward; rows that were not measured come last."""
    return math.inf if row.forward_us is None or row.backward_us is None else row.forward_us + row.backward_us


def table_lines(result: Result) -> Iterator[list[str]]:
    """A case's lines: the copy, then the fastest first."""
    ideal = [n / speed / 1e6 for n, speed in zip(result.num_bytes, result.copy_speeds, strict=True)]
    copy = Row("*copy*", *ideal)
    rows = [row for row in result.rows if row.failure is None]
    for row in (copy, *sorted(rows, key=step_us)):
        shape = result.shape if row is not copy else f"**{result.shape}**"
        times = zip((row.forward_us, row.backward_us), result.num_bytes, result.copy_speeds, strict=True)
        yield [shape, row.who, *itertools.chain(*(figures(*each) for each in times))]


def text_of(results: list[Result], heading: str) -> str:
    text = f"{heading}\n\nKernel times; the yardstick is the best copy of as many bytes in the same rounds.\n"
    for op, group in itertools.groupby(results, key=lambda result: result.op):
        group = list(group)
        lines = itertools.chain(*map(table_lines, group))
        text += f"\n## {op}\n\n{_measure.table(HEADER, list(lines))}"
        failures = dict.fromkeys(f"- {row.who}: {row.failure}\n" for r in group for row in r.rows if row.failure)
        text += "".join(["\n" if failures else "", *failures])
    return text


def draw(results: list[Result], path: pathlib.Path, title: str) -> None:
    """Percent of the copy's speed for each shape: a column of panels for each op, forward above backward."""
    if (pyplot := _figures.pyplot()) is None:
        return
    groups = {op: list(group) for op, group in itertools.groupby(results, key=lambda result: result.op)}
    whos = dict.fromkeys(row.who for result in results for row in result.rows if row.failure is None)
    size_inches = 6 * len(groups), 9
    figure, panels = pyplot.subplots(2, len(groups), figsize=size_inches, squeeze=False, sharey=True)
    for column, (op, group) in enumerate(groups.items()):
        for i, which in enumerate(("forward", "backward")):
            panel = panels[i, column]
            panel.axhline(100, color="grey", linewidth=0.8)
            panel.set(title=f"{op}, {which}", ylabel="% of copy speed", ylim=(0, 115))
            for who in whos:
                points = list(speeds_of(who, i, group))
                ours = who.startswith("liger-jax")
                panel.plot(*zip(*points, strict=True), "o-" if ours else "s--", label=who, linewidth=2 if ours else 1)
            panel.set_xticks(range(len(group)), [r.shape for r in group], rotation=60, ha="right", fontsize=7)
    # Above the panels, where it covers no point.
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=len(whos), fontsize=8)
    figure.suptitle(title, fontsize=8, y=0.95)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def speeds_of(who: str, direction: int, group: list[Result]) -> Iterator[tuple[int, float]]:
    """Where a shape stands on the axis, and the percentage there; NaN where it was not measured."""
    for i, result in enumerate(group):
        row = next((row for row in result.rows if row.who == who), Row(who))
        time_us = (row.forward_us, row.backward_us)[direction] or math.nan
        yield i, 100 * result.num_bytes[direction] / time_us / 1e6 / result.copy_speeds[direction]


# --- programs ---------------------------------------------------------------------------------------------------------


class Rotation(jax.stages.Wrapped):
    """Calls `run` with one set of arguments after the other. `profiler.measure` takes it for a jitted function."""

    def __init__(self, run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], output_bytes: int):
        self.run, self.sets, self.num_sets = run, itertools.cycle(sets), len(sets)
        self.iterations = max(8, min(40, HELD_BYTES // max(1, output_bytes)))

    def __call__(self) -> Any:
        return self.run(*next(self.sets))

    def trace(self, *arguments: Any, **named: Any) -> NoReturn:  # the protocol asks for it; `measure` does not
        raise NotImplementedError

    lower = trace

    def warm_up(self) -> None:
        for _ in range(self.num_sets):
            jax.block_until_ready(self())


def in_rounds(programs: dict[str, Rotation], rounds: int) -> dict[str, float]:
    """Microseconds of kernel time a run of each program, the median over rounds in which each has its turn."""
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            _, turn = profiler.measure(program, iterations=program.iterations)()
            if turn is None:
                raise RuntimeError(f"CUPTI saw no kernel of {name}.")
            times[name].append(statistics.median(turn[program.iterations // 5 :]))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def size(tree: Any) -> int:
    """Bytes of the arrays, or of their types, in a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def pullback(function: Op, num_differentiated: int, *arrays: jax.Array) -> Callable[..., tuple[jax.Array, ...]]:
    """The function from the outputs' cotangents to the gradients. It holds what the forward saves."""
    constants = arrays[num_differentiated:]
    return jax.vjp(lambda *xs: function(*xs, *constants), *arrays[:num_differentiated])[1]


def jax_programs(function: Op, case: Case, sets: list[tuple[Any, ...]]) -> tuple[Rotation, Rotation]:
    """Forward and backward; a set is the outputs' cotangents and the arrays."""
    forward = jax.jit(lambda dy, *arrays: function(*arrays)).lower(*sets[0]).compile()
    save = jax.jit(functools.partial(pullback, function, case.num_differentiated))
    saved = [(save(*arrays), dy) for dy, *arrays in sets]
    backward = jax.jit(lambda pull, dy: pull(dy)).lower(*saved[0]).compile()
    dy, *arrays = sets[0]
    return (
        Rotation(forward, sets, size(dy)),
        Rotation(backward, saved, size(arrays[: case.num_differentiated])),
    )


def copy_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def copied(x: jax.Array, n_block_size: int, num_warps: int) -> jax.Array:
    """x (N, COPY_WIDTH), N a multiple of n_block_size → a copy."""
    spec = pl.BlockSpec((n_block_size, COPY_WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        copy_kernel,
        grid=(x.shape[0] // n_block_size,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        name="copy",
    )(x)


def copy_programs(num_bytes: int, torch: Any) -> tuple[int, dict[str, Rotation]]:
    """The bytes that are moved, `num_bytes` rounded up, and the programs that move them: our copies and torch's."""
    rows = round_up(cdiv(num_bytes, 2 * 4 * COPY_WIDTH), max(tile[0] for tile in COPY_TILES))
    moved = 2 * 4 * COPY_WIDTH * rows
    num_sets = max(2, cdiv(ROTATED_BYTES, moved))
    sets = [(jnp.full((rows, COPY_WIDTH), i, jnp.float32),) for i in range(num_sets)]
    programs = {
        f"copy {tile}": Rotation(jax.jit(copied, static_argnums=(1, 2)).lower(*sets[0], *tile).compile(), sets, moved)
        for tile in COPY_TILES
    }
    if torch is not None:  # its copies are no kernels; its negation moves the same bytes
        tensors = [(torch.from_dlpack(x),) for (x,) in sets]
        programs["copy torch"] = Rotation(lambda x: TorchOutput(torch, torch.neg(x)), tensors, moved)
    return moved, programs


class TorchOutput:
    """A result of torch that `jax.block_until_ready` can wait for."""

    def __init__(self, torch: Any, value: Any):
        self.torch, self.value = torch, value

    def block_until_ready(self) -> "TorchOutput":
        self.torch.cuda.synchronize()
        return self


def torch_programs(torch: Any, function: Op, case: Case, sets: list[tuple[Any, ...]]) -> tuple[Rotation, Rotation]:
    """Forward without a graph, and backward through one that is kept: some peers overwrite what they saved."""
    tensor = lambda x: torch.from_dlpack(x).clone()
    leaves, graphs = [], []
    for dy, *arrays in sets:
        xs = [tensor(x) for x in arrays]
        leaves.append(tuple(xs))
        variables = [x.clone().requires_grad_() for x in xs[: case.num_differentiated]]
        ys = function(*variables, *xs[case.num_differentiated :])
        graphs.append((ys, variables, jax.tree.map(tensor, dy)))

    def forward(*xs):
        with torch.no_grad():
            return TorchOutput(torch, function(*xs))

    def backward(ys, variables, dys):
        return TorchOutput(torch, torch.autograd.grad(ys, variables, dys, retain_graph=True))

    dy, *arrays = sets[0]
    return (
        Rotation(forward, leaves, size(dy)),
        Rotation(backward, graphs, size(arrays[: case.num_differentiated])),
    )


def torch_if_installed() -> Any:
    """Torch with a GPU, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # or no compiled graph can be kept
    return torch


# --- a case -----------------------------------------------------------------------------------------------------------


def make_sets(case: Case) -> list[tuple[Any, ...]]:
    """Sets of the outputs' cotangents and the arrays, as many as overflow the cache together."""
    types = jax.eval_shape(case.make, jax.random.key(0))
    outputs = jax.eval_shape(next(iter(case.ours.values())), *types)

    @jax.jit
    def make(key):
        leaves, tree = jax.tree.flatten(outputs)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        dys = [jax.random.normal(key, y.shape, y.dtype) for key, y in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, dys), *case.make(key)

    num_sets = max(2, cdiv(ROTATED_BYTES, size(types) + size(outputs)))
    return [make(key) for key in jax.random.split(jax.random.key(0), num_sets)]


def bytes_moved(case: Case, dy: Any, arrays: Sequence[jax.Array]) -> tuple[int, int]:
    """The least that forward and backward read and write."""
    gradients = arrays[: case.num_differentiated]
    forward = size(arrays) + size(dy)
    backward = size(dy) + size([arrays[i] for i in case.saved]) + size(gradients)
    return forward - case.unread_bytes, backward - case.unread_bytes


def measured(case: Case, peers: Sequence[str], rounds: int) -> Result:
    """Measures all rows of a case."""
    torch, sets = torch_if_installed(), make_sets(case)
    num_bytes = bytes_moved(case, sets[0][0], sets[0][1:])
    copies = {n: copy_programs(n, torch) for n in dict.fromkeys(num_bytes)}
    programs = {f"{name}, {n}": program for n, (_, each) in copies.items() for name, program in each.items()}
    rows = []

    def attempt(who, make):
        row = Row(who)
        rows.append(row)
        try:
            both = make()
            for program in both:
                program.warm_up()
        except Exception as error:  # what cannot run here is a result too
            row.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        else:
            programs.update(zip((f"forward, {who}", f"backward, {who}"), both, strict=True))
        print(f"  {who}: {row.failure or 'ready'}", flush=True)

    print(f"{case.op} {case.shape}: {len(sets)} sets of buffers", flush=True)
    for who, function in case.ours.items():
        attempt(f"liger-jax, {who}", functools.partial(jax_programs, function, case, sets))
    for who in peers:
        if who in case.peers:
            if torch is None:
                rows.append(Row(who, failure="no torch with a GPU"))
                continue
            attempt(who, lambda who=who: torch_programs(torch, case.peers[who](), case, sets))
    for _, each in copies.values():
        for program in each.values():
            program.warm_up()
    times = in_rounds(programs, rounds)
    for row in rows:
        row.forward_us, row.backward_us = (times.get(f"{which}, {row.who}") for which in ("forward", "backward"))
    speeds = [copies[n][0] / min(times[f"{name}, {n}"] for name in copies[n][1]) / 1e6 for n in num_bytes]
    del programs, copies, sets
    if torch is not None:
        torch.cuda.empty_cache()
    return Result(case.op, case.shape, num_bytes, tuple(speeds), rows)


# --- the command ------------------------------------------------------------------------------------------------------


def main(name: str, make_cases: Callable[[], list[Case]]) -> None:
    """Measures the cases of `benchmarks.<name>`, writing table and picture after each."""
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cases = make_cases()
    peers = list(dict.fromkeys(itertools.chain(*(case.peers for case in cases))))
    ops = list(dict.fromkeys(case.op for case in cases))
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--shapes", nargs="+", help="only shapes that contain one of these", default=[""])
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    parser.add_argument("--name", default=name, help="of the files, without their endings")
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS, help="of the table")
    parser.add_argument("--pictures", type=pathlib.Path, default=PICTURES, help="folder of the picture")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(
            f"benchmarks.{name} times kernels on an NVIDIA GPU by CUPTI, and JAX finds only a {jax.default_backend()} "
            f"here. Run it where there is one, after {install_command('cuda')}"
        )
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    heading = "; ".join(filter(None, (_measure.heading(command).rstrip(), _measure.versions(*PACKAGES))))
    results = []
    for case in cases:
        if case.op in options.ops and any(part in case.shape for part in options.shapes):
            results.append(measured(case, options.peers, options.rounds))
            _measure.save(options.name, text_of(results, heading), options.folder)
            draw(results, options.pictures / f"{options.name}.png", heading.split(", `")[0])
