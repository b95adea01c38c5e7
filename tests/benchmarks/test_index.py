"""The benchmarks' index, and the commands that their result files tell."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import fused_linear_cross_entropy

FOLDER = Path(fused_linear_cross_entropy.__file__).parent
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
MODULES = [path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")]
COMMAND = re.compile(r"`python -m benchmarks\.fused_linear_cross_entropy ([^`]+)`")


@pytest.mark.parametrize("module", MODULES)
def test_the_index_lists_every_module(module):
    assert f"| `{module}` |" in INDEX


def test_the_index_links_every_table_and_no_other():
    linked = set(re.findall(r"\(results/([^)]+)\)", INDEX))
    assert linked == {path.name for path in (FOLDER / "results").glob("*.md")}


def test_the_fused_loss_s_tables_tell_commands_that_can_be_typed():
    texts = [path.read_text(encoding="utf-8") for path in (FOLDER / "results").glob("*.md")]
    commands = {command for text in texts for command in COMMAND.findall(text)}
    assert len(commands) >= 5
    for command in commands:
        assert fused_linear_cross_entropy.parse_options(shlex.split(command)).shapes
