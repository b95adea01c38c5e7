"""Kernel times of programs that memory bounds, against a copy of the same bytes: timing, table, picture.

A program runs over several sets of inputs in turn, together larger than four times the L2, so that none of them is
found there; the copy does the same. All programs of a case have their turn in every round.
"""

import dataclasses
import importlib
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import triton as pltriton

from benchmarks import _measure

L2_BYTES = 50 * 2**20  # of an H100 or H200
HEADER = ["op", "rows × width", "direction", "who", "µs", "TB/s", "of the copy's speed"]
COLOURS = {"liger-jax": "tab:red", "jax": "tab:blue", "torch": "tab:green"}


@dataclasses.dataclass
class Program:
    """Something to time: one call for each set of inputs. `wait` is for results that JAX does not know."""

    who: str
    family: str  # a key of COLOURS
    calls: Sequence[Callable[[], Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    times: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.times) if self.times else math.inf


@dataclasses.dataclass
class Case:
    """One op at one size in one direction: its bytes, the copies' times and the programs'."""

    op: str
    rows: int
    width: int
    direction: str
    num_bytes: int
    copies: list[Program]
    programs: list[Program]

    @property
    def copy_ms(self) -> float:
        return min(copy.ms for copy in self.copies)


class _Rotation:
    """The calls of a program, one after the other, in the guise of a jitted function: CUPTI's wrapper runs no other."""

    def __init__(self, program: Program):
        self.program, self.count = program, 0

    def __call__(self) -> Any:
        self.count += 1
        result = self.program.calls[self.count % len(self.program.calls)]()
        self.program.wait(result)
        return result

    def trace(self) -> Any:
        raise NotImplementedError

    lower = trace


def num_sets(bytes_of_one: int) -> int:
    """How many sets of inputs are four times the L2."""
    return max(1, math.ceil(4 * L2_BYTES / bytes_of_one))


def time_in_rounds(programs: Sequence[Program], rounds: int) -> None:
    """Adds each program's kernel time to its times, once a round; without a GPU, the time on the wall."""
    for _ in range(rounds):
        for program in programs:
            if program.failure is None:
                try:
                    program.times.append(_once(program))
                except Exception as error:
                    program.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _once(program: Program) -> float:
    rotation = _Rotation(program)
    iterations = max(6, len(program.calls))
    if jax.default_backend() != "gpu":
        return _measure.wall_ms(rotation, lambda _: None, iterations=iterations)
    _, times = profiler.measure(rotation, iterations=iterations)()
    if times is None:
        raise RuntimeError("no kernel ran")
    return statistics.median(times[2:])


def copies(num_bytes: int) -> list[Program]:
    """Copies that read and write `num_bytes` in all: a Pallas kernel's, and torch's where it has the GPU."""
    size = max(1, num_bytes // 8 // _COPY_BLOCK) * _COPY_BLOCK
    sources = [jnp.full(size, i, jnp.int32) for i in range(num_sets(4 * size))]
    on_gpu = jax.default_backend() == "gpu"
    copy = jax.jit(_pallas_copy if on_gpu else jnp.copy)
    programs = [Program("copy, Pallas", "jax", [lambda x=x: copy(x) for x in sources])]
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return programs
    if on_gpu and torch.cuda.is_available():
        tensors = [torch.from_dlpack(x) for x in sources]
        calls = [lambda x=x: x.clone() for x in tensors]
        programs.append(Program("copy, torch", "torch", calls, lambda _: torch.cuda.synchronize()))
    return programs


_COPY_BLOCK = 4096  # int32: 16 KiB a program, 128 bytes a thread


def _pallas_copy(x: jax.Array) -> jax.Array:
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    block_spec = pl.BlockSpec((_COPY_BLOCK,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        grid=(x.size // _COPY_BLOCK,),
        in_specs=[block_spec],
        out_specs=block_spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="copy",
    )(x)


def table_lines(case: Case) -> list[list[str]]:
    """The copies first, then the programs from the fastest to the slowest; what failed last."""
    lines = []
    speed = lambda ms: f"{case.num_bytes / ms / 1e9:.2f}"
    for program in sorted(case.copies, key=lambda p: p.ms) + sorted(case.programs, key=lambda p: p.ms):
        size = f"{case.rows} × {case.width}"
        head = [case.op, size, case.direction, program.who]
        if program.failure is not None:
            lines.append([*head[:3], f"{program.who}: failed", "–", "–", "–"])
            continue
        lines.append([*head, f"{1e3 * program.ms:.1f}", speed(program.ms), f"{case.copy_ms / program.ms:.0%}"])
    return lines


def notes(cases: Sequence[Case]) -> str:
    """Why some did not run."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for program in (*case.copies, *case.programs):
            if program.failure is not None:
                what = f"{case.op} {case.rows} × {case.width} {case.direction}"
                reasons.setdefault((program.who, program.failure), []).append(what)
    return "".join(f"- {who}, {'; '.join(what)}: {reason}\n" for (who, reason), what in reasons.items())


def draw(cases: Sequence[Case], path: pathlib.Path, title: str) -> None:
    """The share of the copy's speed over the width: a panel for each op and direction, a line for each program."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        print(f"no picture: {error}")
        return
    pyplot.switch_backend("agg")
    ops, directions = (
        list(dict.fromkeys(values)) for values in zip(*((c.op, c.direction) for c in cases), strict=True)
    )
    size = (6.5 * len(directions), 4 * len(ops))
    figure, panels = pyplot.subplots(len(ops), len(directions), figsize=size, squeeze=False, sharey=True)
    for op, row in zip(ops, panels, strict=True):
        for direction, panel in zip(directions, row, strict=True):
            _draw_panel(panel, [case for case in cases if (case.op, case.direction) == (op, direction)])
            panel.set_title(f"{op}, {direction}")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(panel, cases: Sequence[Case]) -> None:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for case in cases:
        for program in case.programs:
            if program.times:
                point = case.width, 100 * case.copy_ms / program.ms
                lines.setdefault((program.who, program.family), []).append(point)
    for i, ((who, family), points) in enumerate(lines.items()):
        panel.plot(*zip(*sorted(points), strict=True), color=COLOURS[family], marker="os^vDPX*<>"[i % 10], label=who)
    panel.axhline(100, color="grey", linewidth=0.8)
    panel.set(xscale="log", xlabel="width", ylabel="% of a copy's speed", ylim=(0, None))
    panel.set_xticks(sorted({case.width for case in cases}), minor=False)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.tick_params(axis="x", rotation=45)
    panel.legend(fontsize=7)
