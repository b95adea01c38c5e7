"""Pictures of results: matplotlib where it is installed, and the one kind of picture that several benchmarks draw."""

import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def pyplot() -> Any:
    """matplotlib's pyplot, which draws to files; `None`, and a line that says so, where it is not installed."""
    try:
        found: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        print(f"no picture: {error}")
        return None
    found.switch_backend("agg")
    return found


def memory_against_tokens(
    figures: Mapping[str, Sequence[float]],
    styles: Sequence[str],
    tokens: Sequence[int],
    title: str,
    path: pathlib.Path,
    **axis: Any,
) -> None:
    """Draws MiB beside inputs and gradients, a line for each name; `axis` are options of the vertical one."""
    if (plot := pyplot()) is None:
        return
    figure, panel = plot.subplots(figsize=(7, 4.5))
    for (name, values), style in zip(figures.items(), styles, strict=True):
        panel.plot(tokens, values, style, label=name)
    panel.set(xscale="log", xlabel="tokens", ylabel="MiB beside inputs and gradients", **axis)
    panel.set_xticks(tokens, [f"{n:,}" for n in tokens])
    panel.minorticks_off()
    panel.set_title(title, fontsize=9)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plot.close(figure)
