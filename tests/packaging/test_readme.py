"""Every Python example in README.md runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()
FENCES = list(re.finditer(r"^```python\n(?P<code>.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))


def lines_above(fence: re.Match) -> int:
    return TEXT.count("\n", 0, fence.start("code"))


def test_readme_has_three_examples_or_more():
    assert len(FENCES) >= 3


@pytest.mark.parametrize("fence", FENCES, ids=lambda fence: f"line{lines_above(fence) + 1}")
def test_readme_example_runs(fence):
    padding = "\n" * lines_above(fence)  # so that a traceback names README.md's own line
    exec(compile(padding + fence["code"], README, "exec"), {"__name__": "readme"})
