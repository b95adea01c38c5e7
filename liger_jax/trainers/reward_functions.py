"""The user's reward functions: imported by their names, and checked before a run calls them."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import inspect
import math
import operator
import os.path
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.data.prompt_rows import Line
from liger_jax.trainers.users_code import OutOfTimeError, folder_kept, limited
from liger_jax.user_errors import UserError

GIVEN = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")  # the call's own arguments
NO_COLUMNS = (*GIVEN, "prompt", "completion", "trainer_state")  # fields under other names, or not passed


@dataclasses.dataclass(frozen=True)
class Reward:
    """A function that scores completions."""

    name: str  # the function's name
    function: Callable[..., Any]  # is called as TRL calls it, with the arguments that its parameters name
    weight: float = 1.0  # the factor of its numbers
    module: str = ""  # the module's name

    @functools.cached_property
    def _signature(self) -> list[inspect.Parameter]:
        try:
            return list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # the function has no signature to look at
            return [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]

    @property
    def takes_all(self) -> bool:
        """Whether the function takes arguments of any name."""
        return any(each.kind is each.VAR_KEYWORD for each in self._signature)

    @property
    def named(self) -> dict[str, bool]:
        """The names of the function's parameters, each with whether it has a default."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {each.name: each.default is not each.empty for each in self._signature if each.kind in kinds}

    def check(self, lines: Sequence[Line]) -> None:
        """Checks the function's parameters, before anything is computed."""
        for each in self._signature:
            if each.kind is each.POSITIONAL_ONLY and each.default is each.empty:
                raise UserError(
                    f"The reward {self.name} takes {each.name!r} as a positional-only argument, but arguments are "
                    "passed by name. Remove the / after it."
                )
        if not self.takes_all and not {"completions", "completion_ids"} & self.named.keys():
            raise UserError(f"The reward {self.name} must have a parameter completions or completion_ids, a list.")
        for name, has_default in self.named.items():
            if name not in GIVEN:
                self._check_field(name, has_default, lines)

    def _check_field(self, name: str, has_default: bool, lines: Sequence[Line]) -> None:
        if name in NO_COLUMNS:
            if not has_default:
                cure = {
                    "prompt": "Take prompts, a list with the prompt of each completion.",
                    "completion": "Take completions, a list.",
                    "trainer_state": "It is the state of transformers' trainer. Give the parameter a default: "
                    "trainer_state=None.",
                }
                raise UserError(f"The reward {self.name} needs {name!r}, which rewards do not get here. {cure[name]}")
            return
        lacking = [line for line in lines if name not in line.fields]
        if not lacking or len(lacking) == len(lines) and has_default:
            return
        there = ", ".join(sorted(each for each in lacking[0].fields if each not in NO_COLUMNS)) or "none"
        cure = "Rename the parameter, or give it a default."
        if len(lacking) < len(lines):
            cure = "Write the field into each line, with null where there is no value."
        raise UserError(
            f"{lacking[0].where}: the reward {self.name} needs {name!r}, and the line's fields are {there}. {cure}"
        )


def found(
    text: str,
    home: str | None,
    seconds: float,
    tell: Callable[[str], None],
    given: Mapping[str, Callable[..., Any]] = types.MappingProxyType({}),
) -> Reward:
    """The function that `--reward` names, or that a call has passed under this name."""
    path, equals, number = text.partition("=")
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise UserError(f"--reward={text} must name a function as module:function, such as rewards:right.")
    try:
        weight = float(number) if equals else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"--reward={text}: what comes after {path}= must be a number, such as {path}=0.5.")
    if path in given:
        return Reward(name.rpartition(".")[2], given[path], weight, module)
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(f"--reward={text} must name a module, and {module} is a file. Pass --reward {dotted}:{name}.")
    taken = _taken(module, home)
    too_long = f"--reward={text}: {module} is not imported within --reward-timeout={seconds:g} seconds."
    try:
        moved = lambda folder: tell(f"{module} has left the current folder for {folder}; the run goes back to {home}")
        with folder_kept(home, moved), limited(seconds, lambda: print(too_long, file=sys.stderr)):
            imported = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except OutOfTimeError:
        raise UserError(too_long) from None
    except BaseException as error:  # whatever the user's module may raise
        raise UserError(
            f"--reward={text}: {module} cannot be imported: {problem_of(error)}{place_of(error)}.{taken()}"
        ) from error
    if note := taken():
        raise UserError(f"--reward={text}:{note}")
    try:
        function = operator.attrgetter(name)(imported)
    except AttributeError:
        function = None
    _check_callable(text, module, name, imported, function)
    return Reward(name, function, weight, module)


def _check_callable(text: str, module: str, name: str, imported: Any, function: Any) -> None:
    """Refuses what cannot be called with completions: not a function, a class, or a method without its object."""
    if not callable(function):
        there = ", ".join(key for key, value in vars(imported).items() if inspect.isfunction(value)) or "none"
        raise UserError(f"--reward={text}: {module} has no function {name}. Its functions are: {there}.")
    owner, _, method = name.rpartition(".")
    cls = operator.attrgetter(owner)(imported) if owner else None
    if inspect.isclass(function):
        cls, call, problem = name, "", "is a class, and a reward is a function or an object that is called"
    elif inspect.isclass(cls) and inspect.isfunction(inspect.getattr_static(cls, method, None)):
        cls, call, problem = owner, f".{method}", "is a method without its object"
    else:
        return
    raise UserError(
        f"--reward={text}: {module}.{name} {problem}. Write scorer = {cls}() in {module}, and pass --reward "
        f"{module}:scorer{call}."
    )


def _taken(module: str, home: str | None) -> Callable[[], str]:
    """A function that says, after an import, if it took another module than the one in the current folder."""
    top, spec = module.partition(".")[0], None
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = home and importlib.machinery.PathFinder.find_spec(top, [home])

    def note() -> str:
        own, taken = getattr(spec, "origin", None), sys.modules.get(top)
        if not own or taken is None:
            return ""
        file = getattr(taken, "__file__", None)
        if file is not None and os.path.realpath(file) == os.path.realpath(own):
            return ""
        whose = "Python's own module" if top in sys.stdlib_module_names else "the module"
        where = "" if file is None else f" of {file}"
        return (
            f" {whose} {top}{where} is imported already, and was taken in place of {own}. Rename yours, and "
            "pass its new name."
        )

    return note


def problem_of(error: BaseException) -> str:
    """An error's type and message."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": ")


def file_of(function: Any) -> str | None:
    """The file of a function, or of a callable object's class; `None` if it is unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    for each in (function, vars(type(function)).get("__call__")):
        with contextlib.suppress(ValueError):
            if code := getattr(inspect.unwrap(each), "__code__", None):
                return code.co_filename
    return None


def place_of(error: BaseException, file: str | None = None) -> str:
    """Where the user's code has raised an error, as " at rewards.py:9"; "" where it was raised elsewhere.

    `file`: the code's file; `None` for any that is not Python's import or this one.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    mine = [each for each in frames if each.filename == file or file is None and "importlib" not in each.filename]
    return f" at {Path(mine[-1].filename).name}:{mine[-1].lineno}" if mine else ""
