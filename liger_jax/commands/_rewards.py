"""Reward functions of the user's: found by their names, called line by line, and checked."""

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        try:
            given = self._given(fields)
            found = self.function(completions=list(completions), **given)
            numbers = [float(number) for number in found]
        except Exception as error:  # whatever the user's code may raise
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UserError(f"{where}: the reward {self.name} has failed with {problem}. Mend it.") from error
        if len(numbers) != len(completions) or not all(map(math.isfinite, numbers)):
            raise UserError(
                f"{where}: the reward {self.name} has returned {found!r} for {len(completions)} completions. It must "
                "return a finite number for each."
            )
        return numbers

    def _given(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in fields.items() if name != "completions"}
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return others
        return {parameter.name: others[parameter.name] for parameter in parameters if parameter.name in others}


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
    try:
        with _current_folder_first():
            function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the user's module may raise
        raise UserError(f"--reward={text}: {module} cannot be imported: {type(error).__name__}: {error}.") from error
    if not callable(function):
        raise UserError(f"--reward={text}: {module} has no function {name}.")
    return Reward(name, function, weight)


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """A context in which modules beside the user are found: an installed command does not look there."""
    sys.path.insert(0, folder := os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(folder)
