"""The table and the picture of memory-bound ops beside a copy of the same bytes."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import _figures, _measure

HEADER = ["shape", "who", "forward µs", "TB/s", "of copy", "backward µs", "TB/s", "of copy"]


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
