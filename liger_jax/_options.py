"""The options of a run: fields of frozen dataclasses. What is to be known of one stands in its field alone, and from it
the command line, files of options, a run's identity and refusals are made.
"""

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from liger_jax.user_errors import Spelling, UserError

LEAST_FLOAT, MOST_FLOAT = 1.1754944e-38, 3.4e38  # of float32: devices take a smaller number for 0
MOST = 2**31 - 1
Check = Callable[[Any], str]  # says what a value must be; "" if it is right


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    check: Check | None = None,
    flag: str | None = None,
    of_run: bool = True,
    in_file: bool = True,
    of_all: bool = True,
    offered: Sequence[str] | None = None,
    group: str | None = None,
    first: bool = False,
    **argument: Any,
) -> Any:
    """A field that is an option.

    `help`: its words on the command line, where `{default}` is the command's default. `check`: what a value must be,
    beside one of `choices`. `flag`: its name on the command line, if it is another one. `of_run`: whether it must stay
    the same when a run is continued. `in_file`: whether a run writes it into its file of options. `of_all`: whether it
    is the same in all processes of a run. `offered`: choices of the command line alone. `group`: that of the help text,
    if it is not its dataclass's. `first`: whether `--help` shows it, and not only `--help-all`. `argument`: keywords of
    `ArgumentParser.add_argument`, where the type does not say them.
    """
    choices = argument.get("choices")
    argument |= dict(choices=offered) if offered is not None else {}
    stored = dict(of_run=of_run, in_file=in_file, of_all=of_all, group=group, first=first)
    own = dict(help=help, choices=choices, check=check, flag=flag, argument=argument)
    return dataclasses.field(default=default, metadata=own | stored)


def in_memory(made: Callable[[], Any] = dict) -> Any:
    """A field that only a program has: with what it gives by itself, by the name that an option has for it, or other.

    `made`: makes the default.
    """
    kinds = dict(of_run=False, in_file=False, of_all=False)
    return dataclasses.field(default_factory=made, metadata=kinds, compare=False, repr=False)


def changed(field: dataclasses.Field[Any], changes: Mapping[str, Any]) -> dataclasses.Field[Any]:
    """An option with another `default` or other `help`."""
    field = copy.copy(field)
    field.default = changes.get("default", field.default)
    field.metadata = types.MappingProxyType({**field.metadata, **changes})
    return field


def within(least: int, most: int = MOST) -> Check:
    """A check of a whole number."""

    def check(value: int) -> str:
        if least <= value <= most:
            return ""
        return f"must be at least {least}" + (f" and at most {most}." if value > most else ".")

    return check


def above_0(value: float) -> str:
    """A check of a number."""
    if not 0 < value < math.inf:
        return "must be a finite number above 0."
    return "is more than a float32 holds." if value > MOST_FLOAT else ""


def at_least_0(value: float) -> str:
    """A check of a number."""
    return "" if 0 <= value <= MOST_FLOAT else "must be a finite number, at least 0."


def of_float32(value: float) -> str:
    """A check of a number by which a device divides."""
    holds = LEAST_FLOAT <= value <= MOST_FLOAT
    return "" if holds else "must be a finite number above 0 that float32 can represent."


def up_to_1(value: float) -> str:
    """A check of a probability that is not 0."""
    return "" if LEAST_FLOAT <= value <= 1 else "must be above 0 as a float32, and at most 1."


def share(of_0: str) -> Check:
    """A check of a number in [0, 1), with words for what 0 does."""
    return lambda value: "" if 0 <= value < 1 else f"must be in [0, 1); {of_0}."


def options_of(owner: Any) -> Iterator[dataclasses.Field[Any]]:
    """The options of a dataclass, or of an instance."""
    return (field for field in dataclasses.fields(owner) if "help" in field.metadata)


def flag(field: dataclasses.Field[Any]) -> str:
    """An option's name on the command line."""
    return field.metadata["flag"] or f"--{field.name.replace('_', '-')}"


def python_name(field: dataclasses.Field[Any]) -> str:
    """An option's name in Python, which is that of its flag."""
    return flag(field).removeprefix("--").replace("-", "_")


def spellings(fields: Iterable[dataclasses.Field[Any]], names: Mapping[str, str]) -> dict[str, Spelling]:
    """How Python spells flags. `names`: those of options that have another name there."""
    by_flag = {}
    for field in fields:
        choices = field.metadata["choices"] or field.metadata["argument"].get("choices") or ()
        name = names.get(field.name, python_name(field))
        by_flag[flag(field)] = Spelling(name, is_switch=bool in kinds(field), choices=tuple(choices))
    return by_flag


def kinds(field: dataclasses.Field[Any]) -> list[Any]:
    """The types of which a value is one."""
    return [*typing.get_args(field.type)] if isinstance(field.type, types.UnionType) else [field.type]


def check(owner: Any) -> None:
    """Refuses a value that an option cannot have, whatever the others are."""
    for field in options_of(owner):
        if (value := getattr(owner, field.name)) is None:
            continue
        choices, told = field.metadata["choices"], field.metadata["check"]
        several = value if isinstance(value, tuple) else (value,)
        if wrong := [each for each in several if isinstance(each, str) and "\0" in each]:
            raise UserError(f"{flag(field)}={wrong[0]!r} holds a null character, which file names cannot have.")
        if choices is not None and value not in choices:
            if isinstance(value, str) and value.isdecimal() and int(value) in choices:
                names, cure = ", ".join(choices[:-1]), f"{flag(field)}={int(value)}"
                raise UserError(f"{flag(field)}={value!r} must be one of {names}, or a number, not its text: {cure}.")
            raise UserError(f"{flag(field)}={value} must be one of {', '.join(choices)}.")
        if told is not None and (problem := told(value)):
            is_long = isinstance(value, int) and abs(value) >= 10**30
            raise UserError(f"{flag(field)}{'' if is_long else f'={value}'} {problem}")


def texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Texts of which one may stand alone."""
    return (value,) if isinstance(value, str) else tuple(value)


def argument(field: dataclasses.Field[Any], **words: Any) -> dict[str, Any]:
    """The keywords of `ArgumentParser.add_argument` for an option: by its type, and what its field says beside that.

    `words`: what stands in its help in braces.
    """
    of_types = kinds(field)
    found: dict[str, Any] = dict(dest=field.name, help=field.metadata["help"].format(default=field.default, **words))
    if bool in of_types:
        found |= dict(action="store_true")
    elif any(typing.get_origin(kind) is Sequence for kind in of_types):
        found |= dict(nargs="+")
    elif numbers := [kind for kind in of_types if kind in (int, float)]:
        found |= dict(type=numbers[0])
    if field.default is dataclasses.MISSING:
        found |= dict(required=True)
    return found | field.metadata["argument"]
