"""How to install what is missing: the pip command for the way in which this copy of liger-jax was installed."""

import importlib.metadata
import json
import pathlib
import shlex

NAME = "liger-jax"


def install_command(extra: str) -> str:
    """The command that installs an extra of liger-jax beside this copy of it.

    A checkout is installed from its folder. A copy that came by a URL is installed from that URL, and a copy from an
    index by its name.

    Args:
        extra: one of pyproject.toml's optional dependencies, such as "planner".

    Returns:
        The command, quoted for a shell.
    """
    folder = pathlib.Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    try:
        source = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        source = None
    reference = _reference(json.loads(source)) if source else ""
    return f"pip install {shlex.quote(f'{NAME}[{extra}]{reference}')}"


def _reference(source: dict) -> str:
    """What follows the name in a requirement for a `direct_url.json`: " @ git+https://…@main"."""
    url, vcs = source["url"], source.get("vcs_info")
    if vcs:
        revision = vcs.get("requested_revision")
        url = f"{vcs['vcs']}+{url}" + (f"@{revision}" if revision else "")
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f" @ {url}"
