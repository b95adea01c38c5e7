"""What CONTRIBUTING.md tells to touch is there."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
ADDING = [section for section in SECTIONS if section.startswith("Add a")]
FOLDERS = (
    "", "liger_jax", "liger_jax/trainers", "tests/losses", "pallas_kernels/norms", "pallas_kernels/gated_mlp",
    "pallas_kernels/fused_linear_cross_entropy",
)  # fmt: skip
PLACES = [CHECKOUT / folder for folder in FOLDERS]


@pytest.mark.parametrize("section", ADDING, ids=lambda section: section.splitlines()[0])
def test_files_and_names_that_are_to_be_touched_are_there(section):
    spans = re.findall(r"`([^`]+)`", section)
    paths = [span for span in spans if re.fullmatch(r"[\w/.-]+\.(py|md|yml)|[\w/]+/", span)]
    missing = [path for path in paths if not any((place / path).exists() for place in PLACES)]
    assert len(paths) > 3 and not missing
    text = "".join(path.read_text() for place in PLACES for each in paths if (path := place / each).is_file())
    names = [span for span in spans if re.fullmatch(r"_?[A-Z]{2,}[A-Z_]*|[A-Z][a-z]+[A-Z]\w+", span)]
    assert not [name for name in names if name not in text]
