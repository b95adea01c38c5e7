"""The command line's arguments of a run: an option for each field of its settings."""

import argparse
from collections.abc import Collection
from typing import Any

from liger_jax import _options
from liger_jax.trainers.method import Method
from liger_jax.trainers.options import GROUPS, Settings, options_of

ALTERNATIVES = (("steps", "epochs"),)  # a run takes one of them: the command line's takes precedence over a file's


def add_options(command: Any, method: type[Method], only: Collection[str] | None = None) -> None:
    """Adds the options of a command that trains in groups, the method's own first; or only those with the given names,
    without groups. `command`: a `Parser`.
    """
    peaks = [f"{rate:.0e}".replace("e-0", "e-") for rate in method.peak_rates]
    options = options_of(method)
    for name, field in options.items():
        if only is None or name in only:
            command.add_argument(_options.flag(field), **_options.argument(field, peaks=peaks))
    if only is None:
        own = {method.group_of_options: f"docs/{method.command}.md#options"} if method.group_of_options else {}
        groups = {name: field.metadata["group"] for name, field in options.items()}
        command.set_groups(own | GROUPS, groups, [name for name, field in options.items() if field.metadata["first"]])


def settings_of(args: argparse.Namespace, method: type[Method]) -> Settings[Any]:
    """The settings of a run."""
    known = options_of(method)
    return Settings.of(method, **{k: v for k, v in vars(args).items() if k in known and v is not None})
