"""The commands that train: their arguments, their runs, and users' errors in one sentence."""

import argparse
import contextlib
import functools
import shlex
import sys
import traceback
from collections.abc import Callable

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_options, settings_of
from liger_jax.trainers.method import Method
from liger_jax.trainers.outcome import Outcome
from liger_jax.trainers.start import started
from liger_jax.training import processes, signals
from liger_jax.training.listening import listened_or_not
from liger_jax.user_errors import UserError, in_one_line


def of_method(method: type[Method], task: str) -> tuple[Callable[..., None], Callable[[argparse.Namespace], int]]:
    """The functions of a command that trains: one that adds its arguments, and one that trains for its task,
    such as "pairs.of_run", and prints a user's error as one sentence.

    The second returns the exit code: 0, 2 for an error that the user can correct, or 128 plus the number of the signal
    that stopped the run.
    """
    return functools.partial(add_options, method=method), functools.partial(_run, method, task)


def _run(method: type[Method], task: str, args: argparse.Namespace) -> int:
    name = method.command
    stopped, in_order = f"liger-jax {name}: stopped outside of training; nothing new is saved.", True
    at_once = signals.ending_now(processes.leave, stopped) if args.owns_process else contextlib.nullcontext()
    with listened_or_not(), at_once:
        try:
            code = _trained(name, args, task, method)
        except Exception:
            if not processes.are_several():
                raise
            traceback.print_exc()
            code = 1
        except KeyboardInterrupt:  # if a program has called the command
            print(stopped, file=sys.stderr)
            code, in_order = 130, False
        return processes.end(code, in_order)


def _trained(name, args, task, method) -> int:
    try:
        outcome = started(settings_of(args, method), task, length_is_given=args.length is not None)
    except UserError as error:
        print(f"liger-jax {name}:", in_one_line(error, args.options), file=sys.stderr)
        return 2
    if outcome.target is not None and processes.is_first():
        print(next_command(outcome))
    return outcome.code


def next_command(outcome: Outcome) -> str:
    """The line that says how to try a run's result.

    >>> from pathlib import Path
    >>> next_command(Outcome(0, target=Path("runs/a b/model"), chats=True))
    "next: liger-jax chat --model 'runs/a b/model'"
    """
    model = shlex.quote(str(outcome.target))
    return (
        f"next: liger-jax chat --model {model}"
        if outcome.chats
        else (f"next: liger-jax generate --model {model} --prompt 'Once upon a time'")
    )
