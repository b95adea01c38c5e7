"""Errors that the user of a command can mend: one sentence each, which says how. A bug stays a traceback."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from liger_jax._install import install_command

_LONGEST = 2000  # characters of a message
_AXES = "data|fsdp|expert|sequence|tensor"


def in_one_line(error: Exception, options: Mapping[str, str] | None = None) -> str:
    """A message on one line for the terminal. The middle of a long one, between problem and cure, is left out."""
    text = in_options(str(error), options or {}) if getattr(error, "in_python", False) else str(error)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … ({len(text) - 2 * half:,} characters are left out) … {text[-half:]}"
    return " ".join(text.split())


def in_options(text: str, options: Mapping[str, str]) -> str:
    """A library's message in the words of the command line.

    Returns the message without the function, and with options in the place of arguments. What a file says is left
    alone: its fields may have the names of options.

    >>> in_options("policy_loss: epsilon_low=-1.0 must be in [0, 1).", {"epsilon_low": "--epsilon-low"})
    '--epsilon-low=-1.0 must be in [0, 1).'
    >>> in_options("tensor='tensor' has 4 devices, which do not divide num_heads=2.", {"mesh": "--mesh"})
    '--mesh: tensor has 4 devices, which do not divide num_heads=2.'
    """
    if " cannot be read from " in text:
        return text
    text = re.sub(r"^[a-z0-9]+(_[a-z0-9]+)+: ", "", text)
    if "mesh" in options and re.match(rf"({_AXES})(·\w+)*='?\w", text):
        text = "--mesh: " + re.sub(rf"\b({_AXES})='\1' ", r"\1 ", text)
    for name, option in options.items():
        text = re.sub(rf"(?<![\w'\"./,-]){name}(?==[^=]| is given\b)", option, text)
    return text


def in_python(text: str, arguments: Mapping[str, "Spelling"]) -> str:
    """A sentence about a run in the words of Python, where it has those of the command line.

    `arguments`: how Python spells each flag.

    >>> arguments = {"--lora": Spelling("adapters", "LoRA({})"), "--fresh": Spelling("fresh", "{}", True)}
    >>> arguments |= {"--micro-batches": Spelling("micro_batches"), "--remat": Spelling("remat", choices=("offload",))}
    >>> in_python("Pass --lora 16, --fresh, --remat offload or more --micro-batches.", arguments)
    "Pass adapters=LoRA(16), fresh=True, remat='offload' or more micro_batches."
    >>> in_python("--micro-batches=3 must divide --batch=4; the same command with --no-fresh goes on.", arguments)
    'micro_batches=3 must divide --batch=4; the same call with fresh=False goes on.'
    >>> in_python("Name it: --micro-batches 'my field'.", arguments)
    "Name it: micro_batches='my field'."
    >>> in_python("Train on both by liger-jax dpo --loss kto.", arguments)
    "Train on both by trainers.dpo with loss='kto'."
    """

    def spelled(match: re.Match[str]) -> str:
        flag, sign, value = match[1], match[2] or "", match[3] or ""
        is_off = flag not in arguments and flag.startswith("--no-")
        said = arguments.get(f"--{flag[5:]}" if is_off else flag)
        if said is None:
            return match[0]
        if sign == "=":
            return said.name if value == said.name else f"{said.name}={said.value.format(value)}"
        if said.is_switch:
            return f"{said.name}={not is_off}{sign}{value}"
        if re.fullmatch(r"[\d.e+-]*\d", value):
            return f"{said.name}={said.value.format(value)}"
        if value and value == value.upper():  # such as STEP
            return f"{said.name}={value}"
        if re.fullmatch(r"'.*'", value):
            return f"{said.name}={value}"
        if value and all(each in said.choices for each in value.split("|")):
            return f"{said.name}={'|'.join(map(repr, value.split('|')))}"
        return f"{said.name}{sign}{value}"

    text = text.replace("liger-jax data --loss sigmoid shows", "data.read with format='pairs' reads")
    text = _OTHER_CALL.sub(r"trainers.\1 with \2='\3'", text)
    text = re.sub(
        r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9]|--[a-z])(?:(=| )('[^']*'|\S*?)(?=[.,:;)]*(?:\s|$)))?", spelled, text
    )
    text = re.sub(r"\bliger-jax (finetune|dpo|grpo|distill)\b", r"trainers.\1", text)
    return re.sub(r"\b(the same|The same|[Tt]his|The run's) command\b", r"\1 call", text)


_OTHER_CALL = re.compile(r"\bliger-jax (finetune|dpo|grpo|distill) --([a-z]+) (\w+)")


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How Python spells an option of the command line."""

    name: str  # the argument's name
    value: str = "{}"  # its value, by that of the flag
    is_switch: bool = False  # whether the flag stands without a value
    choices: Sequence[str] = ()  # texts that may be its value


@contextlib.contextmanager
def python_words(arguments: Mapping[str, Spelling]) -> Iterator[None]:
    """A context in which errors and printed lines have the words of Python, as `in_python` says them."""
    _outside.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(_Spoken(sys.stdout, arguments)):
            yield
    except UserError as error:
        text = str(error) if error.in_python else in_python(str(error), arguments)
        cause = error.__cause__
        while isinstance(cause, UserError):  # its sentence is in this one, in the words of the command line
            cause = cause.__cause__
        raise UserError(text, in_python=True) from cause
    finally:
        _outside.pop()


@contextlib.contextmanager
def users_words() -> Iterator[None]:
    """A context for code of the user's within `python_words`: what it prints stays as it is."""
    with contextlib.redirect_stdout(_outside[-1]) if _outside else contextlib.nullcontext():
        yield


_outside: list[Any] = []  # the standard outputs around `python_words`


class _Spoken(io.TextIOBase):
    """A stream to which a run says the names of arguments, and not of flags."""

    def __init__(self, stream: Any, spelled: Mapping[str, Spelling]):
        self._stream, self._spelled = stream, spelled

    def write(self, text: str) -> int:
        self._stream.write(in_python(text, self._spelled))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def counted(number: int, noun: str) -> str:
    """A number and what there is so often.

    >>> counted(1, "row"), counted(2_000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_text(text: str) -> bool:
    """Whether a text that was typed is one, and no bytes that the terminal's encoding does not know.

    Returns `False` for bytes that stand there as surrogates.

    >>> is_text("café"), is_text("caf" + chr(0xDCE9))
    (True, False)
    """
    return not any("\ud800" <= each <= "\udfff" for each in text)


class UserError(ValueError):
    """An error that whoever typed the command can mend; the message says how.

    `in_python`: whether it is a library's, which names the arguments of functions.
    """

    def __init__(self, text: str, in_python: bool = False):
        super().__init__(text)
        self.in_python = in_python


@contextlib.contextmanager
def of_option(flag: str, value: str | None = None) -> Iterator[None]:
    """A context for what an option's value says, such as a model's folder."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, ImportError) as error:
        named = flag if value is None else f"{flag}={value}"
        raise UserError(f"{named}: {in_options(str(error), {})}") from error


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """A context for code that depends on flags and files: the user can mend its errors."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise UserError(str(error), in_python=True) from error


@contextlib.contextmanager
def refusals_kept(refused: dict[str, UserError] | None, where: str) -> Iterator[None]:
    """A context for a file or a line of the data, so that what is after one that is refused is read as well."""
    try:
        yield
    except UserError as error:
        if refused is None:
            raise
        refused[where] = error


@contextlib.contextmanager
def needed_packages() -> Iterator[None]:
    """A context for imports of packages that only the extra `finetune` installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "liger_jax":
            raise
        raise UserError(f"The package {package!r} is missing: {install_command('finetune')}.") from error


def need(*packages: str) -> None:
    """Looks at the start of a run for packages that are imported late."""
    for package in packages:
        with needed_packages():
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)


@contextlib.contextmanager
def quantizing(flag: str, kind: str | None, model: str) -> Iterator[None]:
    """A context for weights that become quantised, whose block size is no option."""
    try:
        yield
    except ValueError as error:
        if "block_size" not in str(error):
            raise
        raise UserError(
            f"{flag}={kind} divides a projection's input into blocks of 64, which do not divide the widths of {model}. "
            "Leave it out."
        ) from error
