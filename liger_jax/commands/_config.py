"""A file of options in TOML, which every command reads.

learning_rate = 1e-4
lora = 16
log = ["csv", "tensorboard"]
pack = true
"""

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.trainers.options_file import OF_A_RUN
from liger_jax.trainers.other_words import in_other_words, meant
from liger_jax.user_errors import UserError

_COMMAND = re.compile(re.escape(OF_A_RUN) + r" of liger-jax (\w+)\.")
_MOST_NAMES = 4  # of options that are not read, in a line
_NO_OPTIONS = ("help", "help_all", "config")
# Options of one name that mean different things, and the commands that agree on what each means.
MEANINGS: Any = {
    "beta": ({"dpo"}, {"grpo"}, {"distill"}),
    "loss_type": ({"dpo", "data"}, {"grpo"}, {"finetune"}),
    "samples": ({"finetune", "dpo", "distill"}, {"grpo"}),
    "temperature": ({"distill"}, {"grpo", "generate", "chat"}),
    "top_k": ({"distill"}, {"grpo", "generate", "chat"}),
}
_KINDS: Any = {int: "a whole number", float: "a number"}


def read(
    path: str, command: str, actions: Mapping[str, argparse.Action], of_all: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Reads a file of options: values by name, as parsing the command line would give them. Options that only other
    commands have, or that mean something else in the command whose run has written the file, are left out, and lines
    say so, which are returned, too. `of_all` are the names of all commands' options.
    """
    known = {name: action for name, action in actions.items() if name not in _NO_OPTIONS}
    name_of = {_name(option): name for name, action in known.items() for option in action.option_strings}
    name_of |= {name: name for name in known}
    values, spelled, others, different = {}, {}, [], []
    text = _text(path)
    writer = written[1] if (written := _COMMAND.match(text)) else command
    for key, value in _table(path, text).items():
        name = name_of.get(_name(key), _name(key))
        if name in spelled:
            raise UserError(f"--config {path}: {spelled[name]} and {key} are the same option. Keep one of them.")
        spelled[name] = key
        if name in known and any(writer in group and command not in group for group in MEANINGS.get(name, ())):
            different.append(key)
        elif name in known:
            values[name] = _value(f"--config {path}: {key}", known[name], value)
        elif name in of_all:
            others.append(key)
        else:
            options = [f"--{each.replace('_', '-')}" for each in known]
            asked = in_other_words(f"--{name}", options) or meant(f"--{name}", options)
            raise UserError(f"--config {path}: {key} is not an option of liger-jax {command}.{asked}")
    lines = [f"{path}: options of other commands are not read: {_some(others)}"] if others else []
    if different:
        means = f"as they mean something else in liger-jax {writer}, which has written the file"
        lines.append(f"{path}: not read, {means}: {', '.join(different)}")
    return values, lines


def _some(names: Sequence[str]) -> str:
    """The first names, and how many there are beside them."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} others"


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # no UTF-8, or a null in the name
        raise _no_toml(path, error) from error


def _table(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_toml(path, error) from error


def _no_toml(path: str, error: Exception) -> UserError:
    return UserError(f"--config {path} is no TOML: {error}. A line is such as: learning_rate = 1e-4")


def _value(where: str, action: argparse.Action, value: Any) -> Any:
    """A value of the file as the argument's own type."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UserError(f"{where} = {json.dumps(value, default=str)} must be true or false.")
        return value
    if value is True and action.nargs == "?" and action.const is not None:
        return action.const
    if isinstance(value, list):
        if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
            return [_one(where, action, each) for each in value]
        value = ",".join(map(str, value))
    converted = _one(where, action, value)
    return [converted] if action.nargs in ("+", "*") else converted


def _one(where: str, action: argparse.Action, value: Any) -> Any:
    shown = f"{where} = {json.dumps(value, default=str, ensure_ascii=False)}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{shown} must be {_KINDS.get(action.type, 'a text')}.")
    if not isinstance(value, str) and action.type is None and not action.choices:
        raise UserError(f"{shown} must be a text, in quotes.")
    try:
        converted = action.type(str(value)) if callable(action.type) else str(value)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{shown} must be {_KINDS.get(action.type, 'a text')}.") from error
    if action.choices is not None and converted not in action.choices:
        raise UserError(f"{shown} must be one of {', '.join(map(str, action.choices))}.")
    return converted
