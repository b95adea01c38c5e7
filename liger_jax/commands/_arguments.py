"""The command line's arguments of a run: an option for each field of its settings."""

import argparse
from collections.abc import Collection
from typing import Any

from liger_jax import _options
from liger_jax.trainers.method import Method
from liger_jax.trainers.options import Settings, options_of

ALTERNATIVES = (("steps", "epochs"),)  # a run takes one of them: the command line's takes precedence over a file's


def add_options(command: argparse.ArgumentParser, method: type[Method], only: Collection[str] | None = None) -> None:
    """Adds the options of a command that trains, or only those with the given names."""
    peaks = [f"{rate:.0e}".replace("e-0", "e-") for rate in method.peak_rates]
    for name, field in options_of(method).items():
        if only is None or name in only:
            hidden = dict(help=argparse.SUPPRESS) if method.is_alone and name == "distributed" else {}
            command.add_argument(_options.flag(field), **_options.argument(field, peaks=peaks) | hidden)


def settings_of(args: argparse.Namespace, method: type[Method]) -> Settings[Any]:
    """The settings of a run."""
    known = options_of(method)
    return Settings.of(method, **{k: v for k, v in vars(args).items() if k in known and v is not None})
