"""The pictures that a training run leaves behind."""

import importlib
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples._lib.memory import BATCHES, Memory

MEMORY_CAPTION = (
    "Without fusion the loss grows with the logits: batch × length × vocabulary. With it, the step's total grows with\n"
    "activations only. The loss's own part is the step minus the same step with a plain sum of hidden states for a\n"
    "loss; it is 0 where the loss fits into the memory that the layers' backward takes anyway."
)


def _figure(width: float, height: float) -> Any:
    """An empty picture; `None` without matplotlib, and a line says so: a picture must not stop a run."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it announces its first look at the fonts
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        print("no picture: the package 'matplotlib' is missing, which pip install matplotlib brings")
        return None
    return figure.Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def loss_curve(losses: list[float], held_out: dict[str, float], path: Path) -> None:
    """Draws the training loss, with held-out losses as lines across.

    Args:
        losses: one for each step.
        held_out: held-out losses by their names.
        path: the PNG's path.
    """
    if (figure := _figure(7, 4.4)) is None:
        return
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    for i, (name, value) in enumerate(held_out.items()):
        axes.axhline(value, linestyle="--", color=f"C{i + 1}", label=f"held out, {name}: {value:.2f}")
    axes.set(xlabel="step", ylabel="nats per token", title="Loss")
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def curves(panels: dict[str, dict[str, tuple[Sequence[float], list[float]]]], title: str, path: Path) -> None:
    """Draws what moves while a program trains, a panel for each quantity.

    Args:
        panels: by the quantity's name and then the curve's: the steps, and the values after them.
        title: what the picture shows, in words.
        path: the PNG's path.
    """
    if (figure := _figure(5.2 * len(panels), 4.4)) is None:
        return
    for axes, (quantity, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for style, (name, (steps, values)) in zip(itertools.cycle(["-", "--", ":"]), lines.items(), strict=False):
            axes.plot(steps, values, style, linewidth=1.5, label=name)  # curves that are on each other show
        axes.set(xlabel="step", ylabel=quantity)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    _save(figure, path)


def memory_picture(rows: list[Memory], title: str, path: Path) -> None:
    """Draws the step's memory and the loss's own part of it against the batch size.

    Args:
        rows: what `measure` returns.
        title: the model and the sequence's length, in words.
        path: the PNG's path.
    """
    if (figure := _figure(9, 4.6)) is None:
        return
    parts = (("total", "the step's total"), ("own", "the loss's own part"))
    for axes, (part, heading) in zip(figure.subplots(1, 2), parts, strict=True):
        for loss, label in (("logits", "loss on logits"), ("fused", "fused loss")):
            mebibytes = [getattr(row, part)[loss] / 2**20 for row in rows]
            axes.plot(BATCHES, mebibytes, "o-", label=label)
        axes.set(title=heading, xlabel="batch", ylabel="MiB", xticks=BATCHES)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"Memory of a training step: {title}", fontsize=11)
    figure.supxlabel(MEMORY_CAPTION, fontsize=8)
    _save(figure, path)
