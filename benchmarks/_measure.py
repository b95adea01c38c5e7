"""Kernel times on an NVIDIA GPU, and tables of them."""

import concurrent.futures
import datetime
import importlib.metadata
import math
import multiprocessing
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

RESULTS = pathlib.Path(__file__).parent / "results"


def program_ms(compiled, *args, iterations: int = 12) -> float:
    """The median over runs of the summed time of all kernels of a compiled program, in milliseconds (CUPTI).

    Where there is no GPU: `wall_ms`.
    """
    if jax.default_backend() != "gpu":
        return wall_ms(lambda: compiled(*args), jax.block_until_ready)
    # The outputs of all runs are held until the last: no more than 32 GiB of them.
    output_bytes = compiled.memory_analysis().output_size_in_bytes
    iterations = max(5, min(iterations, 2**35 // max(1, output_bytes)))
    _, times = profiler.measure(compiled, iterations=iterations)(*args)
    return statistics.median(times[2:])


def in_rounds(
    programs: dict[str, Callable[[], Any]],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    rounds: int = 5,
    seconds: float = 0.4,
) -> dict[str, float]:
    """Milliseconds a run of each program, the median over rounds in which every program has its turn.

    Power and temperature slow a GPU under full load, by a sixth and more. So only programs that run in turn, equally
    long and equally densely, can be compared. In its turn a program's runs are queued for `seconds`, and the outputs of
    a run are freed when the next one is queued. The first fifth of the runs is not timed.
    """
    times = {name: [] for name in programs}
    estimates = {name: wall_ms(run, wait, iterations=2) for name, run in programs.items()}
    for _ in range(rounds):
        for name, run in programs.items():
            count = max(3, math.ceil(1e3 * seconds / estimates[name]))
            _queue(run, wait, max(1, count // 5))
            start = time.perf_counter()
            _queue(run, wait, count)
            times[name].append(1e3 * (time.perf_counter() - start) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def _queue(run: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> None:
    """Queues `count` runs, each run's outputs freed as the next is queued, and waits for the last."""
    result = run()
    for _ in range(count - 1):
        result = run()
    wait(result)


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


def queued_ms(run: Callable[[], Any], wait: Callable[[Any], Any], count: int, turns: int = 3) -> float:
    """The host time of a run: the median over turns. A turn is `count` runs, and waits for the last one only."""
    times = []
    for _ in range(1 + turns):
        start = time.perf_counter()
        _queue(run, wait, count)
        times.append(1e3 * (time.perf_counter() - start) / count)
    return statistics.median(times[1:])


def extra_mib(f, *args) -> float:
    """What the compiled program needs beside its inputs and outputs, in MiB, by the compiler's figures."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a new process. Its memory is freed when it ends, and a failure ends that process only."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_plain_errors, function, *args).result()


def _with_plain_errors(function: Callable[..., Any], *args: Any) -> Any:
    """Some packages' errors cannot be sent to another process, where a broken pool is all that would be seen."""
    try:
        return function(*args)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def versions(*packages: str) -> str:
    """Names and versions of those that are installed."""
    named = []
    for package in dict.fromkeys(packages):
        try:
            named.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(named)


def heading(command: str, device: str | None = None) -> str:
    """Where and when: device (None for JAX's), versions, date and the command."""
    device, jaxlib = device or jax.devices()[0].device_kind, importlib.metadata.version("jaxlib")
    return f"{device}, jax {jax.__version__}, jaxlib {jaxlib}, {datetime.date.today().isoformat()}, `{command}`\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show_or_save(name: str | None, text: str) -> None:
    """Prints a result, and writes it to `RESULTS` if it has a name."""
    if name:
        save(name, text)
    else:
        print(text)


def save(name: str, text: str, folder: pathlib.Path = RESULTS) -> None:
    """Prints a result and writes it to a folder."""
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf8")
