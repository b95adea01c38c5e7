"""The file of options, in TOML, that a run writes and that repeats it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OF_A_RUN = "# The options of the run in this folder, for --config"  # the beginning of a file that a run writes


def heading(command: str) -> str:
    """The first line of the file that a run of a command writes.

    >>> heading("dpo")
    '# The options of the run in this folder, for --config of liger-jax dpo.'
    """
    return f"{OF_A_RUN} of liger-jax {command}."


def write(path: Path, options: Mapping[str, Any], first: str) -> None:
    """Writes a file of options in one rename. Options that are `None` are left out."""
    lines = [first, *(f"{name} = {_toml(value)}" for name, value in options.items() if value is not None)]
    new = path.with_name(f".{path.name}.new")  # a process that is killed leaves either the old file or the new one
    new.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    new.replace(path)


def _toml(value: Any) -> str:
    if isinstance(value, str):  # a JSON string is one of TOML, but for one character that TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
