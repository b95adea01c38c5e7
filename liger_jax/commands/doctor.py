"""`liger-jax doctor`: what is here, what is broken, and which kernels run.

It prints versions, devices and their memory, where compiled programs are kept, and for every op the implementation that
it takes here, with the reason why a faster one does not run. It ends with 1 if something is broken, and says the cure.
"""

import argparse

from liger_jax.commands._exit_code import exit_code

SUMMARY = "what is here, what is broken, and which kernels run"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds no arguments: `liger-jax doctor` has none of its own."""


def run(args: argparse.Namespace) -> int:
    """Looks at this machine."""

    def work():
        from liger_jax.commands import _doctor

        return _doctor.report()

    return exit_code(args, work)
