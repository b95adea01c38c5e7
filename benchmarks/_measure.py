"""Kernel times on an NVIDIA GPU, and tables of them."""

import datetime
import pathlib
import statistics

import jax
import jaxlib
from jax.experimental.mosaic.gpu import profiler

RESULTS = pathlib.Path(__file__).parent / "results"


def kernel_ms(f, *args, iterations: int = 12) -> float:
    """The median over runs of the summed time of all kernels that jit(f) launches, in milliseconds (CUPTI)."""
    compiled = jax.jit(f).lower(*args).compile()
    _, times = profiler.measure(compiled, iterations=iterations)(*args)
    return statistics.median(times[2:])


def extra_mib(f, *args) -> float:
    """What the compiled program needs beside its inputs and outputs, in MiB, by the compiler's figures."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def heading(command: str) -> str:
    """Where and when: device, versions, date and the command."""
    device = jax.devices()[0].device_kind
    return (
        f"{device}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {datetime.date.today().isoformat()}, "
        f"`{command}`\n"
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def save(name: str, text: str) -> None:
    """Prints a result and writes it to results/."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf8")
