"""This copy of liger-jax: its version, and the pip command that installs what is missing beside it."""

import importlib.metadata
import json
import pathlib
import shlex
import tomllib

NAME = "liger-jax"


def version() -> str:
    """The version of this copy of liger-jax: a checkout's own, whatever is installed beside it.

    Returns:
        Such as "0.2.0".
    """
    if (project := checkout() / "pyproject.toml").is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:  # a copied folder
        return "of no known version"


def install_command(extra: str) -> str:
    """The command that installs an extra of liger-jax beside this copy of it.

    A checkout is installed from its folder. A copy that came by a URL is installed from that URL, and a copy from an
    index by its name.
    """
    folder = checkout()
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    try:
        source = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        source = None
    reference = _reference(json.loads(source)) if source else ""
    return f"pip install {shlex.quote(f'{NAME}[{extra}]{reference}')}"


def checkout() -> pathlib.Path:
    """The folder that holds the package, which has a pyproject.toml if it is a checkout."""
    return pathlib.Path(__file__).resolve().parents[1]


def _reference(source: dict) -> str:
    """What follows the name in a requirement for a `direct_url.json`: " @ git+https://…@main"."""
    url, vcs = source["url"], source.get("vcs_info")
    if vcs:
        revision = vcs.get("requested_revision")
        url = f"{vcs['vcs']}+{url}" + (f"@{revision}" if revision else "")
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f" @ {url}"
