"""The command line's arguments of a run: an option for each field of its settings."""

import argparse
from collections.abc import Collection

from liger_jax import _options
from liger_jax.trainers.options import Settings

ALTERNATIVES = (("steps", "epochs"),)  # a run takes one: that of the command line overrules the other in a file


def add_options(
    command: argparse.ArgumentParser, settings_type: type[Settings], only: Collection[str] | None = None
) -> None:
    """Adds the options of a command that trains, or of them only those of some names."""
    for field in settings_type.options():
        if only is None or field.name in only:
            command.add_argument(_options.flag(field), **settings_type.argument(field))


def settings_of(args: argparse.Namespace, settings_type: type[Settings] = Settings) -> Settings:
    """The settings of a run."""
    fields = {field.name for field in settings_type.options()}
    return settings_type(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
