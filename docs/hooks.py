"""What the site has beside docs/: files of the repository that pages link to, and the names of the reference.

A link of a page is relative to its file in the repository, so that it works where that is browsed, too. On the site,
docs/ is the root, and the files in `COPIED` are there under their own paths: programs as pages that show their text.
"""

import importlib
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[1]
COPIED = ("CONTRIBUTING.md", "CHANGELOG.md", "models/*/README.md", "benchmarks/results/*.md", "examples/**/*.py")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<path>[^"]+\.svg)" ?/?>')
PLOT = re.compile(r'<img alt="[^"]*" src="(?P<path>[^"]+\.png)" ?/?>')


def on_files(files, config):
    """Adds the copied files."""
    for path in sorted(path for pattern in COPIED for path in REPOSITORY.glob(pattern)):
        name = path.relative_to(REPOSITORY).as_posix()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = f"# {name}\n\n```` {{.python .program}}\n{text}````\n"
        files.append(File.generated(config, _on_site(name), content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links between files of the repository into links of the site, and public names into where they stand."""
    here = page.file.src_uri
    folder = posixpath.dirname(here if page.file.generated_by else f"docs/{here}")

    def on_site(link):
        target = _on_site(posixpath.normpath(posixpath.join(folder, link["path"])))
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (link["anchor"] or "")

    written, at = [], 0
    for code in FENCED.finditer(markdown):  # what looks like a link there is an index and a call
        written += [LINK.sub(on_site, markdown[at : code.start()]), code[0]]
        at = code.end()
    markdown = "".join([*written, LINK.sub(on_site, markdown[at:])])
    return NAME.sub(lambda match: "\n".join(_directive(match["name"])), markdown)


def on_page_content(html, page, config, files):
    """Writes pictures drawn as SVG into the page, whose colours they then take; a plot links to itself in full size."""
    folder = Path(page.file.abs_src_path or "").parent

    def drawn(picture):
        svg = (folder / Path(picture["path"])).read_text(encoding="utf-8")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{picture["alt"]}" ', 1)

    return PLOT.sub(r'<a href="\g<path>">\g<0></a>', PICTURE.sub(drawn, html))


def _on_site(name: str) -> str:
    """The place on the site of a file of the repository."""
    name = name.removeprefix("docs/")
    if name == "benchmarks/results":
        return "results.md"
    return f"{name.removesuffix('.py')}.md" if name.startswith("examples/") else name


def _directive(name: str) -> Iterator[str]:
    """What mkdocstrings needs for a public name: the module that defines it, where a function hides its own module."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    defined = getattr(found, "__module__", "").startswith("liger_jax") and hasattr(found, "__qualname__")
    yield f"[](){{#{name}}}\n"
    yield f"::: {found.__module__}.{found.__qualname__}" if defined else f"::: {name}"
    yield "    options:"
    yield f"      heading: {name}"
    yield f"      toc_label: {attribute}"
