"""OUT/completions.jsonl: completions that a run of `liger-jax grpo` has sampled, with their rewards, to be read."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.user_errors import UserError

NAME = "completions.jsonl"
_BEGINNING = '{"step": '


class CompletionsFile:
    """The file of a run, to which each step adds some lines. A resumed run first removes the lines of later steps."""

    def __init__(self, folder: Path):
        self._path, self._is_open = folder / NAME, False
        try:
            text = self._path.read_text("utf-8", errors="replace") if self._path.exists() else ""
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror}.") from error
        if text and not text.startswith(_BEGINNING):
            raise UserError(
                f"{self._path} was not written by a run, and would be overwritten. Move it, or pass another --out."
            )
        self._lines = text.split("\n")

    def add(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds a step's lines."""
        lines = [json.dumps({"step": step, **record}, ensure_ascii=False) for record in records]
        try:
            if not self._is_open:
                kept = [line for line in self._lines if _step(line) < step]
                self._path.write_text("".join(f"{line}\n" for line in kept), "utf-8")
                self._is_open = True
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:  # such as a full disk, which must not end a run between two checkpoints
            print(f"{self._path} cannot be written: {error.strerror}.")


def _step(line: str) -> float:
    """The step of a line; infinite for one that was cut off as the run was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return math.inf
