"""The prompts of a run that samples its own completions: lines of the data, their tokens, and their order."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from liger_jax.data import file_rows, formats, reading
from liger_jax.data.documents import Document
from liger_jax.data.pieces import Piece
from liger_jax.data.sources import DataSource
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import digests
from liger_jax.training.rows import Rows
from liger_jax.user_errors import UserError, counted

_MULTIPLE = 16  # prompts are padded to a multiple of it


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the data."""

    where: str  # its place in the data, in words
    tokens: np.ndarray  # (tokens,) int32, the prompt's
    fields: Mapping[str, Any]  # its values by name, which are passed to rewards


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """The prompts of a run, with a row for each completion: each prompt has a group of equal rows."""

    lines: Sequence[Line]  # the lines of the data
    batch: int  # completions in a step, a multiple of `group`
    group: int  # completions of a prompt
    seed: int  # seed of the order
    # The name, weight and number of lines of each source that `--data` names.
    sources: Sequence[tuple[str, float, int]]

    held_out_rows = None

    @property
    def summary(self) -> str:
        """How many there are, in words."""
        sizes = [len(line.tokens) for line in self.lines]
        return (
            f"data: {counted(len(self.lines), 'prompt')} of {min(sizes)} to {max(sizes)} tokens; a step has "
            f"{counted(self.batch // self.group, 'prompt')} with {counted(self.group, 'completion')} each"
        )

    @property
    def num_in_epoch(self) -> int:
        """How many rows an epoch has, in whole steps."""
        return self._steps_in_epoch * self.batch

    @property
    def length(self) -> int:
        """Tokens of the prompts after padding."""
        return -(-max(len(line.tokens) for line in self.lines) // _MULTIPLE) * _MULTIPLE

    def made_of(self) -> dict[str, str]:
        """Texts that identify the data."""
        fields = (json.dumps(line.fields, default=str, sort_keys=True).encode() for line in self.lines)
        contents = (line.tokens.tobytes() + each for line, each in zip(self.lines, fields, strict=True))
        return {"documents": f"{len(self.lines)} prompts {digests.of_bytes(*contents)[:12]}"}

    def lines_of(self, step: int) -> list[Line]:
        """The lines of a step."""
        epoch, first = divmod(step, self._steps_in_epoch)
        number = self.batch // self.group
        return [self.lines[i] for i in self._order(epoch)[first * number : (first + 1) * number]]

    def batches(self) -> Callable[[int], Rows]:
        """The rows of each step, numbered from 0.

        Returns a function of the step. The rows are padded on the left; labels are the tokens.
        """

        def rows_of(step: int) -> Rows:
            tokens = [line.tokens for line in self.lines_of(step) for _ in range(self.group)]
            in_front = lambda some, fill: np.pad(some, (self.length - len(some), 0), constant_values=fill)
            return {
                "input_ids": np.stack([in_front(some, 0) for some in tokens]),
                "labels": np.stack([in_front(some, IGNORE_INDEX) for some in tokens]),
                "attention_mask": np.stack([in_front(np.ones_like(some), 0) for some in tokens]),
            }

        return rows_of

    def held_out(self, most: int) -> list[Piece]:
        """Always empty: no prompts are held out."""
        return []

    def keep(self) -> None:
        """Keeps nothing: prompts are tokenised at each start."""

    @property
    def _steps_in_epoch(self) -> int:
        visits = sum(max(1, round(weight * count)) for _, weight, count in self.sources)
        return -(-visits // (self.batch // self.group))

    def _order(self, epoch: int) -> np.ndarray:
        """The lines of an epoch. The last step is filled up with lines that were used already."""
        random, orders, first = np.random.default_rng([self.seed, epoch]), [], 0
        for _, weight, count in self.sources:
            visits = max(1, round(weight * count))
            turns = [random.permutation(count) for _ in range(-(-visits // count))]
            orders.append(first + np.concatenate(turns)[:visits])
            first += count
        visits, needed = np.concatenate(orders), self._steps_in_epoch * (self.batch // self.group)
        order = random.permutation(visits)
        return np.concatenate([order, *[random.permutation(visits) for _ in range(needed // len(order))]])[:needed]


def prepared(
    subset: str | None,
    batch: int,
    seed: int,
    group: int,
    longest: int,
    encoder: Tokenizer,
    sources: Mapping[str, list[DataSource]],
) -> PromptRows:
    """Reads the prompts of a run. `longest`: the most tokens of one."""
    lines, counts = [], []
    for source in sources["--data"]:
        before = len(lines)
        for where, values in _rows(source, subset):
            tokens = encoder.prompt(formats.prompt(where, values))
            if len(tokens) > longest:
                raise UserError(
                    f"{where} has {len(tokens)} tokens, and --prompt-length={longest} is the longest "
                    f"prompt. Leave the line out, or pass --prompt-length {len(tokens)}."
                )
            lines.append(Line(where, np.asarray(tokens, np.int32), values))
        if len(lines) == before:
            raise reading.no_text([source.name], rows=source.rows)
        counts.append((source.name, source.weight, len(lines) - before))
    for line in encoder.notices().values():
        print(line)
    return PromptRows(lines, batch, group, seed, counts)


def _rows(source: DataSource, subset: str | None) -> Iterator[tuple[str, Any]]:
    """The rows of files or of a dataset of the hub, each with its place."""
    if not source.paths:
        yield from reading.numbered(reading.rows_of(source, subset), source.name)
    for path in source.paths:
        for item in file_rows.of_file(path):
            if isinstance(item, Document):
                raise UserError(f"{path} is plain text, and must have lines with a prompt or with messages.")
            where, values = item
            yield where, file_rows.of_line(where, values) if isinstance(values, file_rows.Line) else values
