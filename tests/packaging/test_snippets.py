"""Every Python example in README.md, the site's pages and the models' pages runs as it stands.

An example of README.md or of a model's page stands alone. Those of a page in docs/ follow one another, so that a later
one uses the names of an earlier. Where a `text` block follows an example, it is what the example prints.
"""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

CHECKOUT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n(?P<cpu>On a CPU it prints:\n\n)?```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
ALONE = [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("models/*/README.md"))]
IGNORED = (CHECKOUT / ".gitignore").read_text(encoding="utf-8").splitlines()
PAGES = [page for page in sorted(CHECKOUT.glob("docs/*.md")) if FENCE.search(page.read_text(encoding="utf-8"))]


def run(page: Path, fence: re.Match, names: dict) -> None:
    """Executes an example and compares what it prints."""
    padding = "\n" * fence.string.count("\n", 0, fence.start("code"))  # so that a traceback names the page's own line
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(padding + fence["code"], page, "exec"), names)
    if fence["printed"] is not None and (fence["cpu"] is None or jax.default_backend() == "cpu"):
        assert printed.getvalue() == fence["printed"], f"{page}, the example {fence['code']}"


def named(page: Path, fence: re.Match):
    """A case, named by the example's place."""
    line = fence.string.count("\n", 0, fence.start("code")) + 1
    return pytest.param(page, fence, id=f"{page.relative_to(CHECKOUT)}:{line}")


def test_readme_has_two_examples_or_more():
    assert len(FENCE.findall(ALONE[0].read_text(encoding="utf-8"))) >= 2


@pytest.mark.parametrize(
    "page, fence", [named(page, fence) for page in ALONE for fence in FENCE.finditer(page.read_text(encoding="utf-8"))]
)
def test_example_runs_alone(page, fence):
    run(page, fence, {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    names, text = {"__name__": "example"}, page.read_text(encoding="utf-8")
    if "export.symbolic_shape" in text:  # the checker of annotations takes no symbolic size for an int
        request.getfixturevalue("unchecked_types")
    for fence in FENCE.finditer(text):
        run(page, fence, names)
    if page.name == "getting-started.md":
        made = {path.name for path in tmp_path.iterdir()}
        assert made and made <= {line.strip("/") for line in IGNORED}, "to be ignored by git in a checkout"


def test_git_ignores_the_folders_of_getting_started():
    page = (CHECKOUT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    assert "python3 -m venv .env" in page and ".env/" in IGNORED and "runs/" in IGNORED
