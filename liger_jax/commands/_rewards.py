"""Reward functions of the user's: found by their names, called line by line, and checked."""

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from liger_jax.commands._errors import UserError


@dataclasses.dataclass(frozen=True)
class Reward:
    """A function that scores the completions of a line.

    Attributes:
        name: the function's name.
        function: takes `completions`, a list of texts, and fields of the line by their names; returns a number for each
            completion.
        weight: the factor of its numbers.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def of(self, where: str, completions: Sequence[str], fields: Mapping[str, Any]) -> list[float]:
        """Scores the completions of one line.

        Args:
            where: the line, in words.
            completions: their texts.
            fields: the line's values. A function that names its parameters gets those alone.

        Returns:
            A number for each completion, without the weight.

        Raises:
            UserError: the function raises an error, lacks a field, or returns something else.
        """
        self.check(where, fields)
        try:
            found = self.function(completions=list(completions), **self._given(fields))
            if isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping | Set):
                found = list(found)  # a generator fails while it is read
        except Exception as error:  # whatever the user's code may raise
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
            file = getattr(getattr(inspect.unwrap(self.function), "__code__", None), "co_filename", None)
            told = f"{where}: the reward {self.name} has failed with {problem}{_place(error, file)}. Mend it."
            raise UserError(told) from error
        numbers = _numbers(found)
        if len(numbers) != len(completions) or not all(map(math.isfinite, numbers)):
            raise UserError(
                f"{where}: the reward {self.name} has returned {found!r} for {len(completions)} completions. It must "
                "return a finite number for each."
            )
        return numbers

    def check(self, where: str, fields: Mapping[str, Any]) -> None:
        """Looks at the function's parameters, before anything is computed.

        Args:
            where: a line, in words.
            fields: its values.

        Raises:
            UserError: the function does not take completions, or needs what the line does not have.
        """
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # of a function that does not tell them
            return
        is_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        if not is_any and "completions" not in [each.name for each in parameters]:
            raise UserError(f"The reward {self.name} must have a parameter completions, a list of texts.")
        named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        needed = [each.name for each in named if each.default is each.empty and each.name != "completions"]
        if missing := [name for name in needed if name not in fields]:
            there = ", ".join(sorted(name for name in fields if name != "completions")) or "none"
            raise UserError(
                f"{where}: the reward {self.name} needs {missing[0]!r}, and the line's fields are {there}. Rename the "
                "parameter, or give it a default."
            )

    def _given(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in fields.items() if name != "completions"}
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return others
        return {parameter.name: others[parameter.name] for parameter in parameters if parameter.name in others}


def _numbers(found: Any) -> list[float]:
    """What a function has returned as numbers; empty where it is something else, such as texts or a table."""
    if not isinstance(found, list) or any(isinstance(each, str | bytes | bytearray) for each in found):
        return []  # of "0.5" Python would make a number as well
    try:
        return [float(each) for each in found]
    except (TypeError, ValueError, OverflowError):
        return []


def found(given: Sequence[str]) -> list[Reward]:
    """The functions that `--reward` names.

    Args:
        given: each "module:function", perhaps with a weight behind it, as in "rewards:right=0.5". Modules of the
            current folder are found, too.

    Returns:
        One reward for each.

    Raises:
        UserError: a module cannot be imported, has no such function, or two functions have one name.
    """
    rewards = [_reward(text) for text in given]
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--reward names two functions {name!r}, whose figures could not be told apart. Rename one."
            )
    return rewards


def _reward(text: str) -> Reward:
    path, equals, number = text.partition("=")
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise UserError(f"--reward={text} must name a function as module:function, such as rewards:right.")
    try:
        weight = float(number) if equals else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"--reward={text}: what stands behind {path}= must be a number, such as {path}=0.5.")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(f"--reward={text} must name a module, and {module} is a file. Pass --reward {dotted}:{name}.")
    try:
        with _current_folder_first():
            imported = importlib.import_module(module)
    except Exception as error:  # whatever the user's module may raise
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"--reward={text}: {module} cannot be imported: {problem}{_place(error)}.") from error
    if not callable(function := getattr(imported, name, None)):
        there = ", ".join(key for key, value in vars(imported).items() if inspect.isfunction(value)) or "none"
        raise UserError(f"--reward={text}: {module} has no function {name}. Its functions are: {there}.")
    return Reward(name, function, weight)


def _place(error: Exception, file: str | None = None) -> str:
    """Where the user's code has raised an error, as " at rewards.py:9"; "" where it was raised elsewhere.

    Args:
        error: the error.
        file: the code's file; `None` for any that is not Python's import or this one.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    mine = [each for each in frames if each.filename == file or file is None and "importlib" not in each.filename]
    return f" at {Path(mine[-1].filename).name}:{mine[-1].lineno}" if mine else ""


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """A context in which modules beside the user are found: an installed command does not look there."""
    sys.path.insert(0, folder := os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(folder)
