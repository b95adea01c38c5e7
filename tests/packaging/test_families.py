"""Each family of models is in all tables of tests and pages that name families."""

import re
from pathlib import Path

import pytest

from liger_jax.models.auto import FAMILIES
from liger_jax.planner.architectures import MODELS
from tests.fuzz import models as fuzz
from tests.models import _convergence, _hugging_face
from tests.models.parallel import _mesh
from tests.planner.test_architectures import PUBLISHED

CHECKOUT = Path(__file__).parents[2]
CLASSES = {model.__name__: model for model in FAMILIES.values()}


def classes_of(cases) -> set[str]:
    """The names of the classes that the cases of a table begin with."""
    return {case[0].__name__ for case in cases.values()}


def is_dense(model) -> bool:
    """Whether no layer has experts, a recurrent state or a convolution."""
    config = model.config_type()
    return config.experts is None and config.recurrent_sizes is None


@pytest.mark.parametrize("name", CLASSES)
def test_a_family_is_in_every_table_of_families(name):
    model = CLASSES[name]
    cases = _hugging_face.CASES
    kept = [cases[case][0] for case in (*_hugging_face.COMMITTED, *_hugging_face.EXPERTS)]
    folder = Path(*model.__module__.removeprefix("liger_jax.").split(".")[:-1])  # models/<family>
    nav, page = ((CHECKOUT / file).read_text(encoding="utf-8") for file in ("mkdocs.yml", "docs/models.md"))
    present = {
        "CASES of tests/models/_hugging_face.py": any(name == f"{case}ForCausalLM" for case, _ in cases.values()),
        "COMMITTED or EXPERTS of tests/models/_hugging_face.py": name in [f"{case}ForCausalLM" for case in kept],
        "FAMILIES of tests/fuzz/models.py": name in classes_of(fuzz.FAMILIES),
        "FAMILIES of tests/models/_convergence.py": name in classes_of(_convergence.FAMILIES) or not is_dense(model),
        "FAMILIES of tests/models/parallel/_mesh.py": name in classes_of(_mesh.FAMILIES) or not is_dense(model),
        f"a page {folder}/README.md": (CHECKOUT / folder / "README.md").exists(),
        "the nav of mkdocs.yml": f"{folder}/README.md" in nav,
        "the table of docs/models.md": bool(re.search(rf"^\| .*\[`{name}`\].*{folder}/README.md", page, re.MULTILINE)),
    }
    assert not (missing := [place for place, is_in in present.items() if not is_in]), f"{name} is not in {missing}"


@pytest.mark.parametrize("case", [*_hugging_face.COMMITTED, *_hugging_face.EXPERTS])
def test_a_committed_checkpoint_is_there(case):
    folder = _hugging_face.GOLDEN / case
    assert (folder / _hugging_face.EXPECTED).exists(), (
        f"write {folder} with python -m tests.models._hugging_face {case}"
    )


def test_every_model_of_the_planner_has_its_published_number():
    assert not (without := MODELS.keys() - PUBLISHED), (
        f"add to PUBLISHED of tests/planner/test_architectures.py: {without}"
    )
    assert not (unknown := PUBLISHED.keys() - MODELS), f"PUBLISHED, and not in MODELS: {unknown}"
