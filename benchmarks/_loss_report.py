"""The table and the picture of linear cross entropies measured beside each other."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import _figures

REFERENCE = "XLA full logits, bf16"
HEADER = ["(N, D, V)", "who", "fwd ms", "fwd+bwd ms", "× three matmuls", "extra MiB", "dW error, × unfused bf16"]
COLOURS = {"liger-jax": "tab:red", "jax": "tab:blue", "torch": "tab:green"}


@dataclasses.dataclass
class Row:
    """What was measured of one implementation; None where it was not."""

    who: str
    family: str  # a key of COLOURS
    forward_ms: float | None = None
    both_ms: float | None = None
    extra_mib: float | None = None
    weight_error: float | None = None  # RMS, absolute
    loss: float | None = None
    true_loss: float | None = None  # of its own data, where that is not the shape's
    failure: str | None = None
    key: str = ""  # of its programs, while they wait to be timed


class Results(NamedTuple):
    three_ms: float  # of three matmuls
    rows: list[Row]
    loss: float  # the true one


def step_ms(row: Row) -> float:
    """The step's time; the forward's where nothing is trained."""
    return row.both_ms or row.forward_ms or math.inf


def table_lines(shape: tuple[int, int, int], three_ms: float, rows: list[Row]) -> list[list[str]]:
    """A shape's lines, the fastest step first and failed peers last."""
    unit = next((row.weight_error for row in rows if row.who == REFERENCE), None)
    size = ", ".join(map(str, shape))
    show = lambda x, digits: "–" if x is None else f"{x:,.{digits}f}"
    speed = f"{6 * math.prod(shape) / three_ms / 1e9:,.0f} TFLOP/s"
    lines = [[f"**{size}**", f"*three matmuls, {speed}*", "", show(three_ms, 2), "1.00", "", ""]]
    for row in sorted(rows, key=step_ms):
        if row.family == "liger-jax" and row.failure is not None:
            continue  # told by `notes` alone
        times_three = None if row.both_ms is None else row.both_ms / three_ms
        error = None if not unit or row.weight_error is None else row.weight_error / unit
        figures = [(row.forward_ms, 2), (row.both_ms, 2), (times_three, 2), (row.extra_mib, 0)]
        who = row.who if row.failure is None else f"{row.who}: failed"
        lines.append([size, who, *(show(*figure) for figure in figures), show(error, 2)])
    return lines


def notes(rows: list[Row], shape_loss: float) -> Iterator[str]:
    """Why some did not run, and which losses are off by more than bf16's rounding."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        true_loss = shape_loss if row.true_loss is None else row.true_loss
        if row.failure is not None:
            reasons.setdefault(row.failure, []).append(row.who)
        elif row.loss is not None and not abs(row.loss - true_loss) <= 2e-3 * abs(true_loss):
            yield f"{row.who}: its loss is {row.loss:.4f}, where the true one is {true_loss:.4f}"
    for reason, names in reasons.items():
        yield f"{'; '.join(names)}: {reason}"


def draw(results: dict[tuple[int, int, int], Results], path: pathlib.Path, title: str) -> None:
    """Time against extra memory, a panel for each shape; names stand in a column in the order of time."""
    if (pyplot := _figures.pyplot()) is None:
        return
    figure, panels = pyplot.subplots(len(results), 1, figsize=(13, 5.5 * len(results)), squeeze=False)
    for panel, (shape, result) in zip(panels[:, 0], results.items(), strict=True):
        draw_panel(panel, [row for row in result.rows if row.extra_mib is not None], result.three_ms)
        panel.set_title(f"N, D, V = {', '.join(map(str, shape))}")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_panel(panel, rows: list[Row], three_ms: float) -> None:
    panel.set(xscale="log", yscale="log", xlabel="extra memory, MiB (0.5 where less)", ylabel="ms a step")
    for products, style in ((3, "-"), (4, "--")):
        label = f"{products} matmuls"
        panel.axhline(three_ms * products / 3, color="grey", linewidth=0.8, linestyle=style, label=label)
    panel.xaxis.set_major_formatter("{x:,g}")
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.yaxis.set_minor_formatter("{x:,g}")
    points: dict[tuple[float, float, str], list[str]] = {}
    for row in sorted(rows, key=step_ms):  # rows of one program share a point
        points.setdefault((row.extra_mib or 0.0, step_ms(row), row.family), []).append(row.who)
    for i, ((extra_mib, ms, family), names) in enumerate(points.items()):
        point, colour = (max(extra_mib, 0.5), ms), COLOURS[family]
        name = " = ".join([names[0], *(name.removeprefix("liger-jax ") for name in names[1:])])
        panel.plot(*point, "o", color=colour)
        panel.annotate(
            f"{name}: {ms:,.2f} ms, {extra_mib:,.0f} MiB",
            point,
            xytext=(1.03, (i + 0.5) / len(points)),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.5, "relpos": (0, 0.5)},
        )
    panel.legend(loc="best", fontsize=8)
