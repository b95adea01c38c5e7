"""README's figures are those of the tables that they were measured for."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results"
# | what | **tokens a second**, GiB | tokens a second, GiB
ROW = re.compile(r"^\| ([^|]+) \| \*\*([\d,]+)\*\*, ([\d.]+) \| ([\d,]+), ([\d.]+)", re.MULTILINE)
ROWS = ROW.findall((CHECKOUT / "README.md").read_text(encoding="utf-8"))


def test_readme_has_a_table_of_steps():
    assert len(ROWS) >= 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_figure_of_readme_is_in_its_table(row):
    """Tokens a second as they stand, and the peak rounded to a tenth, in one line of a table."""
    what, ours, our_peak, theirs, their_peak = row
    lines = (RESULTS / ("lora.md" if "LoRA" in what else "training_step.md")).read_text(encoding="utf-8").splitlines()
    for tokens, peak in ((ours, our_peak), (theirs, their_peak)):
        (line,) = [line for line in lines if f"| {tokens} |" in line]
        assert peak in {f"{float(size):.1f}" for size in re.findall(r"\| (\d+\.\d\d) ", line)}
