"""Kernel times on an NVIDIA GPU, and tables of them."""

import datetime
import importlib.metadata
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

WARM_UP_SECONDS = 1.0
RESULTS = pathlib.Path(__file__).parent / "results"


def program_ms(compiled, *args, iterations: int = 12) -> float:
    """The median over runs of the summed time of all kernels of a compiled program, in milliseconds (CUPTI).

    A GPU draws full power after a while and then slows down, a matrix product by a sixth: every program runs for a
    second before its figures are taken. Where there is no GPU: `wall_ms`.
    """
    if jax.default_backend() != "gpu":
        return wall_ms(lambda: compiled(*args), jax.block_until_ready)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        jax.block_until_ready(compiled(*args))
    # The outputs of all runs are held until the last: no more than 32 GiB of them.
    output_bytes = compiled.memory_analysis().output_size_in_bytes
    iterations = max(5, min(iterations, 2**35 // max(1, output_bytes)))
    _, times = profiler.measure(compiled, iterations=iterations)(*args)
    return statistics.median(times[2:])


def heat(compiled, *args, seconds: float = 8.0) -> None:
    """Runs a program for a while, so that what is timed first meets the same clocks as what is timed last."""
    start = time.perf_counter()
    while jax.default_backend() == "gpu" and time.perf_counter() - start < seconds:
        jax.block_until_ready(compiled(*args))


def kernel_ms(f, *args, iterations: int = 12) -> float:
    """`program_ms` of jit(f)."""
    return program_ms(jax.jit(f).lower(*args).compile(), *args, iterations=iterations)


def wall_ms(run: Callable[[], Any], wait: Callable[[Any], Any], iterations: int = 10) -> float:
    """The median host time from calling run() until wait(its result) returns, in milliseconds, after two warm runs."""
    times = []
    for _ in range(2 + iterations):
        start = time.perf_counter()
        wait(run())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def extra_mib(f, *args) -> float:
    """What the compiled program needs beside its inputs and outputs, in MiB, by the compiler's figures."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def heading(command: str) -> str:
    """Where and when: device, versions, date and the command."""
    device, jaxlib = jax.devices()[0].device_kind, importlib.metadata.version("jaxlib")
    return f"{device}, jax {jax.__version__}, jaxlib {jaxlib}, {datetime.date.today().isoformat()}, `{command}`\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def save(name: str, text: str, folder: pathlib.Path = RESULTS) -> None:
    """Prints a result and writes it to a folder."""
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf8")
