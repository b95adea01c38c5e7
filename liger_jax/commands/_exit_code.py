"""The exit code of a command, and a user's error as one sentence."""

import argparse
import sys
from collections.abc import Callable

from liger_jax.user_errors import UserError, in_one_line


def exit_code(args: argparse.Namespace, work: Callable[[], int]) -> int:
    """Runs a command, and prints an error that the user can correct as one sentence.

    Returns that code; 2 for an error, and 130 for Ctrl-C.
    """
    try:
        return work()
    except UserError as error:
        print(f"liger-jax {args.command}:", in_one_line(error, args.options), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
