"""The parser of the command line, which suggests a name for one that it does not know.

A switch such as --pack has a second form, --no-pack, so that the command line can override a file of options.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from liger_jax.commands import _config
from liger_jax.trainers.other_words import (
    command_in_other_words,
    in_other_words,
    meant,
    value_in_other_words,
    value_of_another_command,
)
from liger_jax.user_errors import UserError

# Options whose values are files, folders or ids.
PATHS = ("model", "base", "teacher", "data", "files", "eval_data", "out", "file", "picture", "config")


class Parser(argparse.ArgumentParser):
    """argparse's parser, with whole names of options only, and errors that name what was meant.

    `alternatives`: names of options of which a run takes one: one on the command line overrules the other in a file.
    `sums`: names of options with those whose sum they are by default: such a sum in a file goes if one of them is on
    the command line.
    `known`: returns the names of all commands' options, which a file may have.

    With `set_groups`, `--help` shows the first options alone, and `--help-all` all of them.
    """

    def __init__(
        self,
        *args: Any,
        alternatives: Sequence[Sequence[str]] = (),
        sums: Any = None,
        known: Callable[[], Collection[str]] = frozenset,
        **options: Any,
    ):
        self._groups: dict[str, tuple[str, list[argparse.Action]]] = {}  # page and options, by title
        self._first: list[argparse.Action] = []
        super().__init__(*args, **options, allow_abbrev=False)
        self.alternatives, self.sums, self.known = alternatives, sums or {}, known

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument, as argparse does; a switch gets its second form, and is `None` if neither is given."""
        if options.get("action") == "store_true":
            options |= {"action": argparse.BooleanOptionalAction}
        return super().add_argument(*names, **options)

    def set_groups(self, pages: Mapping[str, str], groups: Mapping[str, str], first: Collection[str]) -> None:
        """Makes the help text one of groups.

        `pages`: the page of each group by its title, in their order. `groups`: the title of each option's group, by the
        option's name. `first`: names of the options that `--help` shows, where `--help-all` shows all.
        """
        own = {action.dest: action for action in self._actions}
        in_group = lambda title: [own[name] for name, group in groups.items() if group == title]
        self._groups = {title: (page, in_group(title)) for title, page in pages.items()}
        self._first = [own[name] for name in first]
        super().add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")

    def format_help(self) -> str:
        """The help text; where there are groups, that of the first options."""
        return self.help_of(self._first) if self._groups else super().format_help()

    def help_of(self, shown: Collection[argparse.Action] | None = None) -> str:
        """The help text of some options in their groups; without `shown`, of all."""
        formatter = self._get_formatter()
        visible = [action for action in self._actions if action.help != argparse.SUPPRESS]
        needed = [f"{each.option_strings[-1]} {each.metavar or each.dest.upper()}" for each in visible if each.required]
        formatter.add_text(f"usage: {' '.join([self.prog, *needed])} [options]")
        for title, (page, actions) in self._groups.items():
            if some := [each for each in actions if each in visible and (shown is None or each in shown)]:
                formatter.start_section(f"{title} ({page})")
                formatter.add_arguments(some)
                formatter.end_section()
        grouped = [each for _, actions in self._groups.values() for each in actions]
        formatter.start_section("others")
        formatter.add_arguments([each for each in visible if each not in grouped])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # argparse's has overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parses, as argparse does; `args` may name a file of options, and nothing may be left over."""
        args = list(sys.argv[1:] if args is None else args)
        self._check_names(args)
        if self._has("--config"):
            try:
                self._take_file(args)
            except UserError as error:
                self.exit(2, f"{self.prog}: {error}\n")
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}.")
        for action in self._actions:
            if action.dest in PATHS and (value := getattr(parsed, action.dest, None)) is not None:
                name = action.option_strings[0] if action.option_strings else action.dest
                each = [self._path(name, path) for path in (value if isinstance(value, list) else [value])]
                setattr(parsed, action.dest, each if isinstance(value, list) else each[0])
        return parsed, left

    def _path(self, name: str, path: str) -> str:
        """A path with the user's folder for "~", which a shell leaves alone after "=" and between quotes."""
        if not path.strip():
            self.exit(2, f"{self.prog}: {name}={path} is empty, and must name a file or a folder.\n")
        return os.path.expanduser(path)

    def _has(self, name: str) -> bool:
        return name in self._option_string_actions

    def _check_names(self, args: Iterable[str]) -> None:
        problems = []
        for arg in args:
            if arg == "--" or self._subparsers is not None and not arg.startswith("-"):
                break  # what follows is data, or belongs to the command
            if _is_option(arg) and not self._has(_name(arg)) and not self._has(arg[:2]):
                hint = in_other_words(_name(arg), self._option_string_actions)
                hint = hint or meant(_name(arg), self._option_string_actions)
                if not hint and self._subparsers is not None:
                    hint = " Options follow the command, as in: liger-jax plan --help"
                problems.append(f"{_name(arg)}.{hint}")
        if problems:
            self.error(f"unrecognized option: {' Nor is there '.join(problems)}")

    def _take_file(self, args: Sequence[str]) -> None:
        """Makes the options of the file of --config the defaults of this call."""
        places = [i for i, arg in enumerate(args) if _name(arg) == "--config"]
        if len(places) > 1:
            raise UserError("--config is given more than once. Write the options into one file.")
        if not places or args[places[0]] == "--config" and places[0] + 1 == len(args):  # argparse reports this
            return
        _, equals, path = args[places[0]].partition("=")
        path = self._path("--config", path if equals else args[places[0] + 1])
        actions = {action.dest: action for action in self._actions}
        values, lines = _config.read(path, self.prog.rpartition(" ")[2], actions, self.known())
        given = {self._option_string_actions[name].dest for name in map(_name, args) if self._has(name)}
        for names in self.alternatives:
            if given.intersection(names):
                given.update(names)
        for name, terms in self.sums.items():
            if given.intersection(terms) and values.get(name) == sum(values.get(term) or 0 for term in terms):
                given.add(name)
        values = {name: value for name, value in values.items() if name not in given}
        for action in self._actions:
            action.required = action.required and action.dest not in values
        self.set_defaults(**values, of_file=lines)

    def error(self, message: str) -> NoReturn:
        """Exits with the message as one sentence, which suggests what was meant; without a command, with the help."""
        if self._subparsers is not None and message.endswith("required: command"):
            self.exit(2, self.format_help())
        if match := re.search(r"argument ([^:]*): invalid choice: '([^']*)' \(choose from (.*)\)", message):
            values = re.findall(r"[\w.-]+", match[3])
            near = command_in_other_words(match[2]) if match[1] == "command" else value_in_other_words(match[2])
            near = near or meant(match[2], values)
            message += f".{near}" if near.startswith(" ") else near or value_of_another_command(match[1], values)
        if match := re.search(r"invalid (int|float) value: ('[^']*')", message):
            kind = "whole number" if match[1] == "int" else "number"
            message = f"{message[: match.start()]}{match[2]} must be a {kind}."
        elif "--help" not in message and not message.endswith("?"):
            message = f"{message.rstrip('.')}. What there is: {self.prog} --help"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


class _HelpAll(argparse.Action):
    """Prints the help text of all options."""

    def __call__(self, parser: Any, *args: Any) -> None:
        print(parser.help_of(), end="")
        parser.exit()


def _name(arg: str) -> str:
    return arg.partition("=")[0]


def _is_option(arg: str) -> bool:
    """Whether an argument has the form of an option, which a negative number and a text with spaces do not have."""
    return re.match(r"-[-a-zA-Z]", arg) is not None and " " not in _name(arg)
