"""The documentation site: built strictly, with every public name in its reference, and nothing from the network."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
ROOMS = ("ops", "losses", "layers", "models", "planner", "training", "trainers", "data")
MODULES = tuple(f"liger_jax.{name}" for name in ROOMS)
ANCHOR = re.compile(r'id="(liger_jax\.[a-z]+\.\w+)"')
SECTIONS = {"Args:": "Parameters:", "Returns:": "Returns:", "Raises:": "Raises:", "Example:": "Examples:"}


def reexports(module: str) -> list[str]:
    """The names that a package imports as `from … import name as name`."""
    source = inspect.getsource(importlib.import_module(module))
    return [name for name, alias in re.findall(r"(\w+) as (\w+)", source) if name == alias]


def public_names() -> list[str]:
    """Every public name by the path that users import it from."""
    return [f"{module}.{name}" for module in MODULES for name in reexports(module)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. A link or a name that is not found is a warning, which fails the build.

    In `BUILT_SITE` it has been built already, by `make docs` of the same tree.
    """
    if built := os.environ.get("BUILT_SITE"):
        return CHECKOUT / built
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)}
    built = subprocess.run(
        command, cwd=CHECKOUT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="module")
def reference(site) -> dict[str, str]:
    """The HTML of each name in the reference."""
    entries = {}
    for page in sorted((site / "reference").glob("*.html")):
        name, *parts = ANCHOR.split(page.read_text(encoding="utf-8"))
        for name, html in zip(parts[::2], parts[1::2], strict=True):
            entries[name] = entries.get(name, "") + html
    return entries


def test_every_public_name_has_a_line_in_the_reference():
    """By the pages' text, so that it is known before the site is built."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (CHECKOUT / "docs" / "reference").glob("*.md"))
    missing = sorted(set(public_names()) - set(re.findall(r"^::: (\S+)", pages, re.MULTILINE)))
    assert not missing, f"add a line `::: {missing[0]}` to a page of docs/reference, and so on for {missing}"


def test_the_package_itself_has_the_names_of_ops():
    package, ops = importlib.import_module("liger_jax"), importlib.import_module("liger_jax.ops")
    assert set(reexports("liger_jax")) == {*reexports("liger_jax.ops"), "losses"}
    assert all(getattr(package, name) is getattr(ops, name) for name in reexports("liger_jax.ops"))


@pytest.mark.parametrize("name", public_names())
def test_an_entry_shows_what_the_docstring_says(reference, name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    html = reference[name]
    if inspect.isfunction(found):
        assert "doc-signature" in html, "no signature"
    if inspect.isfunction(found) or inspect.isclass(found):
        doc = inspect.cleandoc(found.__doc__ or "")
        sections = [shown for section, shown in SECTIONS.items() if re.search(rf"^{section}$", doc, re.MULTILINE)]
        lost = [shown for shown in sections if shown not in html]
        assert not lost, f"the entry of {name} lacks {lost}"
        assert "Example:" not in doc or "&gt;&gt;&gt;" in html or 'class="gp"' in html, "the example is not code"


def test_pages_ask_for_nothing_from_the_network(site):
    loads = re.compile(
        r'<(?:script|img|iframe|source)[^>]*\ssrc="?https?://|<link[^>]*\bhref="?https?://|class="mermaid"'
    )
    for page in site.rglob("*.html"):
        assert not (found := loads.search(page.read_text(encoding="utf-8"))), f"{page.name}: {found}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?https?://", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_pictures_of_how_it_works_are_drawn_in_the_pages_own_colours(site):
    assert (site / "how-it-works.html").read_text(encoding="utf-8").count('<svg role="img"') == 2


def test_the_search_works_from_the_folder(site):
    """A browser loads neither JSON nor a worker from a file: the index is a script, and a frame is the worker."""
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    for page in ("index.html", "reference/losses.html"):
        (loaded,) = re.findall(r'<script src="([^"]*iframe-worker.js)">', (site / page).read_text(encoding="utf-8"))
        assert (site / page).parent.joinpath(loaded).resolve().is_file()


def test_a_plot_opens_in_its_full_size(site):
    html = (site / "performance.html").read_text(encoding="utf-8")
    plots = re.findall(r'<img alt="[^"]*" src="(\w+\.png)"', html)
    assert len(plots) >= 2 and all(f'<a href="{plot}"><img ' in html for plot in plots)


def described_arguments(name: str, known: frozenset[str] = frozenset()) -> set[str]:
    """The arguments that a docstring lists, and those that the functions list whose arguments it shares."""
    module, _, attribute = name.rpartition(".")
    doc = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
    listed = re.search(r"^Args:\n((?: .*\n|\n)*)", doc + "\n", re.MULTILINE)
    described = set(re.findall(r"^    \**(\w+):", listed[1], re.MULTILINE)) if listed else set()
    says_so = re.compile("argument|option|those of", re.IGNORECASE)
    sentences = " ".join(filter(says_so.search, re.split(r"(?<=[.;:])\s", doc)))
    shared = [each for each in public_names() if f"`{each.rpartition('.')[2]}`" in sentences and each not in known]
    return described.union(*(described_arguments(each, known | {name}) for each in shared)) | described


@pytest.mark.parametrize("name", public_names())
def test_every_argument_is_described_where_the_docstring_says(name):
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    if inspect.isfunction(function):
        arguments = [re.sub("^(student|teacher)_", "", each) for each in inspect.signature(function).parameters]
        described = {re.sub("^(student|teacher)_", "", each) for each in described_arguments(name)}
        assert not set(arguments) - described, f"{name}: no docstring that it names describes these"
