"""Every command line of README.md and of the site is one that its own parser takes."""

import argparse
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from liger_jax import _options, commands
from liger_jax.commands import _parser
from liger_jax.commands._arguments import settings_of
from liger_jax.losses import dpo_loss
from liger_jax.losses._policy_formulas import LOSS_TYPES as POLICY_TYPES
from liger_jax.losses.preference import DPO_TYPES
from liger_jax.losses.unpaired import KTO_TYPES
from liger_jax.trainers import options
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.preference_losses import FREE
from liger_jax.user_errors import UserError

CHECKOUT = Path(__file__).parents[2]
PAGES = [*CHECKOUT.glob("*.md"), *sorted(CHECKOUT.glob("docs/*.md")), *sorted(CHECKOUT.glob("models/*/README.md"))]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
TEXTS = {str(page.relative_to(CHECKOUT)): page.read_text(encoding="utf-8") for page in PAGES}
METHODS = {"finetune": FinetuneOptions, "dpo": PairOptions, "grpo": GrpoOptions, "distill": DistillOptions}
FENCE = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")
OURS = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*liger-jax (?P<rest>[a-z]+(?: .*)?)$")
PROGRAM = re.compile(r"^python3? -m (?P<module>(?:benchmarks|examples|docs|tests)[\w.]*)(?P<rest>[^#]*)")
REFUSED = "finetune --gradient-accumulation-steps 4"  # a page shows what is said to it


def lines(text: str) -> list[tuple[str, bool]]:
    """The lines of a page that may be commands, and whether they stand in prose, where a part of one may be named."""
    whole = [line for fence in FENCE.findall(text) for line in fence.replace("\\\n", " ").splitlines()]
    named = INLINE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return [(line, False) for line in whole] + [(" ".join(line.split()), True) for line in named]


def found(pattern: re.Pattern) -> list[tuple[str, re.Match, bool]]:
    """The page, the match and the place of all commands of one kind."""
    all_lines = ((page, *line) for page, text in TEXTS.items() for line in lines(text))
    return [(page, match, named) for page, line, named in all_lines if (match := pattern.match(line))]


COMMANDS = [(page, match["rest"], named) for page, match, named in found(OURS)]
PROGRAMS = sorted({(match["module"], match["rest"].strip()) for _, match, _ in found(PROGRAM)})


@pytest.fixture(scope="module")
def parsers() -> dict[str, _parser.Parser]:
    """The parser of each command."""
    return dict(zip(commands._COMMANDS, commands._parsers()[1], strict=True))


def test_commands_and_programs_are_found():
    assert len(COMMANDS) > 70 and len(PROGRAMS) > 25
    assert {line.split()[0] for _, line, _ in COMMANDS} == set(commands._COMMANDS)


def words(line: str, named: bool, parser: argparse.ArgumentParser) -> list[str]:
    """The arguments of a line, with others in the place of what a page leaves to its reader."""
    name, *arguments = shlex.split(line.replace("…", "16"), comments=True)
    given = {argument.partition("=")[0] for argument in arguments}
    if "--config" in given:
        at = arguments.index("--config")
        del arguments[at : at + 2]
    if named or "--config" in given:  # in prose a command has only what matters there; the rest may be in the file
        needed = [action.option_strings[:1] for action in parser._actions if action.required]
        needed += [["--reward"]] if name == "grpo" else []
        for option in needed:
            arguments += [*option, "x:y"] if not given.intersection(option) else []
    return arguments


@pytest.mark.parametrize("page", sorted({page for page, _, _ in COMMANDS}))
def test_a_command_of_a_page_is_taken_by_its_parser(page, parsers, capsys):
    """A training command's values must also go together, as far as neither files nor a device are needed to know."""
    for _, line, named in [command for command in COMMANDS if command[0] == page]:
        name = line.split()[0]
        capsys.readouterr()  # what was said of the line before
        try:
            args = parsers[name].parse_args(words(line, named, parsers[name]))
            if name in METHODS and "--config" not in line:  # what goes together may be in the file
                settings_of(args, METHODS[name])
        except (SystemExit, UserError) as error:
            assert line == REFUSED or str(error) == "0", f"{page}: liger-jax {line}: {error} {capsys.readouterr().err}"
        else:
            assert line != REFUSED


@pytest.mark.full
@pytest.mark.parametrize(
    "line", sorted({line for _, line, named in COMMANDS if line.startswith("plan ") and not named})
)
def test_a_plan_of_a_page_is_made(line, parsers, capsys):
    """By estimates, whatever the page asks; of models and devices that the package knows."""
    arguments = words(line, False, parsers["plan"])
    if "--search" in arguments or "--config" in line or arguments[1].endswith(".json"):
        pytest.skip("it compiles, or reads the reader's own file")
    assert commands.main(["plan", *arguments, "--level", "estimate"]) in (0, 1), capsys.readouterr().err


@pytest.mark.parametrize("module, rest", PROGRAMS)
def test_a_program_of_a_page_is_there_and_takes_its_arguments(module, rest, monkeypatch, capsys):
    assert find_spec(module) is not None
    rest = shlex.split(rest)
    if not any(argument.startswith("--") for argument in rest):
        return
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise KeyboardInterrupt  # it has taken them, and is not to begin

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [module, *rest])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it, which runpy warns of
    with pytest.raises(KeyboardInterrupt):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


# --- tables of options ------------------------------------------------------------------------------------------------

CELL = re.compile(r"^\| (`--(?:\\\||[^|])*) \|", re.MULTILINE)


def explained(page: str) -> set[str]:
    """The options in the first column of a page's table."""
    table = TEXTS[f"docs/{page}.md"].partition("\n## Options")[2] or TEXTS[f"docs/{page}.md"]
    return {option for cell in CELL.findall(table) for option in re.findall(r"--[a-z-]+[a-z]", cell)}


@pytest.mark.parametrize("name", ["finetune", "dpo", "grpo", "distill", "generate"])
def test_the_tables_of_options_are_whole_and_have_no_others(name, parsers):
    ours = {option for action in parsers[name]._actions for option in action.option_strings if option[:2] == "--"}
    ours -= {option for option in ours if f"--{option.removeprefix('--no-')}" in ours - {option}}
    table = f"the table under ## Options of docs/{name}.md"
    assert not (others := explained(name) - ours - {"--no-cache"}), (
        f"{table} has {sorted(others)}, which are no options"
    )
    told = set(re.findall(r"--[a-z-]+[a-z]", TEXTS[f"docs/{name}.md"])) | {
        "--help",
        "--help-all",
        "--config",
        "--cache",
    }
    lost = ours - told - (explained("finetune") if name in METHODS else set())
    assert not lost, f"{table} lacks {sorted(lost)}"


def test_every_option_is_on_a_page(parsers):
    """Those of commands without a table of options, too."""
    text = "\n".join(TEXTS.values())
    actions = [
        (name, action) for name, parser in parsers.items() for action in parser._actions if action.option_strings
    ]
    is_there = lambda action: any(re.search(rf"{re.escape(o)}(?![\w-])", text) for o in action.option_strings)
    assert not [(name, action.option_strings) for name, action in actions if not is_there(action)]


def test_every_type_of_a_loss_is_explained():
    """In the table of its function's docstring, or in its option's row in the page of its command."""
    row = lambda page, option: re.search(rf"^\| `{option}` \|.*", TEXTS[page], re.MULTILINE)[0]
    names_in = {
        "the table in the docstring of dpo_loss": (
            DPO_TYPES,
            "".join(re.findall(r'\| "\w+" \|', dpo_loss.__doc__ or "")),
        ),
        "the row of --loss in docs/dpo.md": ((*FREE, *KTO_TYPES), row("docs/dpo.md", "--loss")),
        "the row of --loss-type in docs/grpo.md": (POLICY_TYPES, row("docs/grpo.md", "--loss-type")),
    }
    for place, (names, text) in names_in.items():
        missing = [name for name in names if not re.search(rf'["`]{name}["`]', text)]
        assert not missing, f"{place} lacks {missing}"


@pytest.mark.parametrize("name", METHODS)
def test_the_tables_of_options_have_their_defaults(name):
    own = TEXTS[f"docs/{name}.md"].partition("\n## Options")[2] or TEXTS[f"docs/{name}.md"]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in own.splitlines() if line.startswith("| `--")]
    told = {option: cells[-1] for cells in rows for option in re.findall(r"--[a-z-]+[a-z]", cells[0])}
    for field in options.options_of(METHODS[name]).values():
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        if default and not isinstance(default, bool) and isinstance(default, str | int | float):
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            cell = told.get(_options.flag(field), shown).replace(",", "")
            is_told = re.search(rf"(?<![\w.]){re.escape(shown)}(?!\w)", cell) or cell == "half an hour"
            assert is_told, f"{field.name}: {shown}, and not {cell}"


def runs_of(some: list[str]) -> dict[str, set[str]]:
    """The commands among some lines that train, by the folder that each writes to."""
    folders: dict[str, set[str]] = {}
    for match in filter(None, map(OURS.match, some)):
        name, *arguments = shlex.split(match["rest"], comments=True)
        if name in METHODS and "--distributed" not in arguments:
            out = arguments[arguments.index("--out") + 1] if "--out" in arguments else f"runs/{name}"
            folders.setdefault(out, set()).add(match["rest"])
    return folders


@pytest.mark.parametrize("places", ["pages", *METHODS])
def test_no_two_runs_of_the_pages_or_of_a_help_text_share_a_folder(places):
    """The second one would be refused."""
    if places == "pages":
        some = [line for text in TEXTS.values() for line, named in lines(text) if not named]
    else:
        some = (commands._COMMANDS[places].__doc__ or "").splitlines()
    folders = runs_of(some)
    assert not [given for given in folders.values() if len(given) > 1]
    assert len(folders) >= (20 if places == "pages" else 3)
