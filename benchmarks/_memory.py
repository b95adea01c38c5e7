"""What the experiments on memory share: steps compiled in processes of their own, and figures kept as they come."""

import concurrent.futures
import dataclasses
import datetime
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import _measure
from liger_jax.planner import compile_run, search
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run

try:
    from matplotlib.figure import Figure
except ImportError:  # the figures and their tables are made without it
    Figure = None

DOCS = pathlib.Path(__file__).parent.parent / "docs"
COLORS = {"logits": "#c00000", "fused": "#2e75b6"}


def run_of(spec: dict[str, Any]) -> Run:
    """The run that arguments of `make_run` say; "memory_gib" is what a process has, in place of what it would get."""
    run = make_run(**{name: value for name, value in spec.items() if name != "memory_gib"})
    if "memory_gib" in spec:
        memory = int(spec["memory_gib"] * GIB)
        capped = dataclasses.replace(run.target, memory_bytes=memory, capacity_bytes=memory)
        run = dataclasses.replace(run, target=capped)
    return run


def kernels_in(program: str) -> list[str]:
    """The names of the Pallas kernels that a compiled program calls.

    A kernel is a custom call to one of Pallas' backends, of an operation named ".../KERNEL/pallas_call", or "/mpmd_map"
    where it is Mosaic's for GPUs. Other operations of that name prepare its arguments.
    """
    kernel = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu|__gpu\$xla\.gpu\.triton)')
    calls = filter(kernel.search, re.split(r"\n(?= +(?:ROOT )?%)", program))  # an operation may have several lines
    names = [name for call in calls for name in re.findall(r'op_name="[^"]*?([^/"]+)/(?:pallas_call|mpmd_map)"', call)]
    return sorted({re.sub(r".*\(|\)", "", name) for name in names})  # without "transpose(jvp(…))"


# --- in a process of its own ------------------------------------------------------------------------------------------


def compiled(spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step by its compiler, and the kernels that it calls; the device need not be there."""
    jax.config.update("jax_platforms", "cpu")
    start = time.monotonic()
    compilation = compile_run(run_of(spec))
    kernels = (
        kernels_in(compilation.program.as_text()) if compilation.program else None
    )  # a program refused for its memory is none
    figure = dict(
        total=compilation.total, arguments=compilation.arguments, temporaries=compilation.temporaries, kernels=kernels
    )
    return figure | dict(seconds=round(time.monotonic() - start), **stamp())


def largest_compiled(spec: dict[str, Any]) -> dict[str, Any]:
    """The largest batch that fits by the compiler, with all that it was asked."""
    jax.config.update("jax_platforms", "cpu")
    largest = search(run_of(spec | {"batch": 1}), "batch")
    return dict(batch=largest.run.batch, answers=largest.answers, **stamp())


def stamp(device: str | None = None) -> dict[str, str]:
    """The JAX, day and device of a figure."""
    told = dict(jax=jax.__version__, date=datetime.date.today().isoformat())
    return told | ({"device": device} if device else {})


# --- in the command's -------------------------------------------------------------------------------------------------


class Figures:
    """Figures by name in a JSON file, written with each that comes: a command that was ended goes on from there."""

    def __init__(self, name: str, folder: pathlib.Path | None):
        """Reads the figures of `folder`, or else of `results/`, and writes to `folder`."""
        kept = [place / f"{name}.json" for place in (folder, _measure.RESULTS) if place is not None]
        self.path, self.lock = kept[0], threading.Lock()
        file = next((path for path in kept if path.is_file()), None)
        self.values: dict[str, Any] = json.loads(file.read_text(encoding="utf8")) if file else {}

    def __getitem__(self, key: str) -> Any:
        """The figure, or None."""
        return self.values.get(key)

    def make(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        """The figure, made in a process of its own if it is not there or had failed."""
        if key not in self.values or "failure" in self.values[key]:
            start = time.monotonic()
            try:
                figure = _measure.in_own_process(function, *args)
            except Exception as error:  # what cannot be compiled or run is a result too
                figure = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300], **stamp()}
            print(f"  {key}: {figure} ({time.monotonic() - start:.0f} s)", flush=True)
            with self.lock:
                self.values[key] = figure
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(dict(sorted(self.values.items())), indent=1) + "\n", encoding="utf8")
        return self.values[key]

    def compile(self, spec: dict[str, Any]) -> Any:
        """`compiled` of a run, by the run's name."""
        return self.make(named(spec), compiled, spec)

    def compiled(self, spec: dict[str, Any]) -> Any:
        """The figure of a run if it was made before, or None."""
        return self[named(spec)]

    def stamps(self) -> str:
        """The JAX, day and device of the figures, in words."""
        words = lambda v: f"{v.get('device', 'compiled')}, jax {v['jax']}, {v['date']}"
        return "; ".join(sorted({words(value) for value in self.values.values()}))


def named(spec: dict[str, Any]) -> str:
    """A run's arguments as a text."""
    return ", ".join(f"{name}={value}" for name, value in sorted(spec.items()))


def both(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The run with each loss."""
    return {loss: spec | {"loss": loss} for loss in ("logits", "fused")}


def gib(figure: Any, digits: int = 2) -> str:
    """Bytes, or the total of a figure, for a table."""
    if figure is None:
        return "–"
    if isinstance(figure, dict):
        if "failure" in figure:
            return "failed"
        figure = figure["total"]
    return f"{figure / GIB:.{digits}f}"


def in_threads(function: Callable[[Any], Any], items: list[Any], workers: int) -> list[Any]:
    """Calls a function of each, several at a time: each call waits for processes of its own."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def draw(picture: Callable[[Figures], Any], figures: Figures, name: str, folder: pathlib.Path | None) -> None:
    """Writes a picture of the figures to a folder, or to `docs/`."""
    if Figure is None:
        print("no picture: matplotlib is not installed")
        return
    (folder or DOCS).mkdir(parents=True, exist_ok=True)
    picture(figures).savefig((folder or DOCS) / f"{name}.png", dpi=130)


def estimated(spec: dict[str, Any]):
    """The estimate of a run."""
    return estimate(run_of(spec))
