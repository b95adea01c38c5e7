"""Figures of README and of the site are those of the tables that they were measured for."""

import bisect
import re
from pathlib import Path

import pytest

from liger_jax.planner import plan

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results"
# | what | **tokens a second**, GiB | tokens a second, GiB
ROW = re.compile(r"^\| ([^|]+) \| \*\*([\d,]+)\*\*, ([\d.]+) \| ([\d,]+), ([\d.]+)", re.MULTILINE)
TABLES = {"LoRA": "lora.md", "DPO": "packed_alignment.md"}
ROWS = ROW.findall((CHECKOUT / "README.md").read_text(encoding="utf-8"))


def test_readme_has_a_table_of_steps():
    assert len(ROWS) >= 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_figure_of_readme_is_in_its_table(row):
    """Tokens a second as they stand, and the peak rounded to a tenth, in one line of a table."""
    what, ours, our_peak, theirs, their_peak = row
    table = next((name for word, name in TABLES.items() if word in what), "training_step.md")
    lines = (RESULTS / table).read_text(encoding="utf-8").splitlines()
    for tokens, peak in ((ours, our_peak), (theirs, their_peak)):
        (line,) = [line for line in lines if f"| {tokens} |" in line]
        assert peak in {f"{float(size):.1f}" for size in re.findall(r"\| (\d+\.\d\d?) ", line)}


# --- figures of all pages ---------------------------------------------------------------------------------------------

PAGES = [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/*.md"))]
NUMBER = re.compile(r"(?<![\w.,/#:-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w,]*\d)")
NOT_MEASURED = {
    "backends.md": {"3090", "27,648"},  # a card's name; a kernel's widest row
    "experts.md": {"1.702"},  # gpt-oss's activation
    "how-it-works.md": {"1,314"},  # a plan's bytes, which the picture is drawn from
    "long-rows.md": {"32,769", "8,193", "179,072"},  # rows from which there are tiles; the estimate, which a test has
    "lora.md": {"2023", "2024"},  # years
    "memory.md": {
        "10.03",
        "134.9",
        "139.7",
        "18.77",
        "76.14",
        "45.82",
        "139.68",
        "84.14",
    },  # sums of bytes; the planner's, below
    "policy.md": {"9999"},
}


@pytest.fixture(scope="module")
def measured() -> list[float]:
    """All numbers of all tables, sorted."""
    texts = [path.read_text(encoding="utf-8") for path in RESULTS.iterdir()]
    return sorted(
        {float(found.replace(",", "")) for text in texts for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_of_four_digits_is_in_a_table(page, measured):
    """As it stands there, or rounded; of what is neither code nor a date nor a link."""
    text = re.sub(
        r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d", " ", page.read_text(encoding="utf-8"), flags=re.S | re.M
    )
    lost = []
    for figure in NUMBER.findall(text):
        if len(figure.replace(",", "").replace(".", "").lstrip("0")) >= 4:
            value, half = float(figure.replace(",", "")), 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
            at = bisect.bisect_left(measured, value - half)
            lost += [figure] if at == len(measured) or measured[at] > value + half else []
    assert set(lost) <= NOT_MEASURED.get(page.name, set()), "write these into their tables in benchmarks/results"


STATES = re.compile(r"^\| (\S+) \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \|$", re.MULTILINE)


@pytest.mark.full
def test_the_estimates_of_the_optimizer_s_state_are_the_planner_s():
    text = (CHECKOUT / "docs" / "memory.md").read_text(encoding="utf-8").partition("float32, 8-bit state")[2]
    rows = STATES.findall(text.partition("\n\n")[0])
    assert len(rows) == 4
    for model, *figures in rows:
        for figure, options in zip(figures, ({}, {"param_dtype": "float32"}, {"param_dtype": "bfloat16"}), strict=True):
            optimizer = "adamw8bit" if options else "adamw"
            found = plan(model, batch=1, device="h100", remat="full", optimizer=optimizer, **options)
            assert f"{found.estimates['fused'].total / 2**30:.2f}" == figure, model


def test_all_tables_are_listed():
    listed = (CHECKOUT / "docs" / "results.md").read_text(encoding="utf-8")
    assert not (lost := [path.name for path in RESULTS.glob("*.md") if f"/{path.name})" not in listed]), lost


# --- minutes ----------------------------------------------------------------------------------------------------------

PROGRAM = re.compile(
    r"\[examples/(?P<name>\w+)\.py\]\([^)]*\)[^:]*?on a CPU in (?P<time>[a-z ]*?[a-z] minutes?(?: or two)?)\b"
)
NUMBERS = {"a": 1, "two": 2, "three": 3}
# A reader's own time, of steps that tests run; the network's; what is no promise.
OTHERS = (
    "small LLaMA on real text in minutes", "In two minutes you have a loss",
    "It takes about a minute for the CPU", "a loss: two minutes", "a model: ten minutes", "from nothing in minutes",
    "fine-tune a model, in ten minutes", "model on the CPU in minutes", "## In two minutes", "nothing for a minute",
    "a minute or more for unrolled layers", "on a CPU in minutes",
)  # fmt: skip


def test_what_takes_minutes_took_no_more_where_it_was_measured():
    """A program that computes all the while takes no longer than its processor seconds."""
    table = (RESULTS / "examples.md").read_text(encoding="utf-8")
    seconds = {name: float(figure) for name, figure in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE)}
    claims = 0
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        for claim in PROGRAM.finditer(text):
            most = max(NUMBERS.get(word, 0) for word in claim["time"].split())
            assert 0 < seconds[claim["name"]] <= 60 * most, claim[0]
            claims += 1
        rest = PROGRAM.sub("", text)
        for other in OTHERS:
            rest = rest.replace(other, "")
        found = [rest[max(0, at.start() - 60) : at.end()] for at in re.finditer(r"\bminutes?\b", rest)]
        assert not found, f"{page.name}: {found}"
    assert claims >= 5
