"""The packages that liger-jax stands on, imported before all else, and what is said where they do not work together.

JAX and Flax change together, and an environment may hold versions of which neither knows the other. A program then gets
an ImportError that names the versions and the cure; the command `liger-jax` says it in one line, and `liger-jax doctor`
answers with what is installed.
"""

import contextlib
import importlib
import importlib.metadata
import operator
import pathlib
import re
import sys
import tomllib
from collections.abc import Mapping

from liger_jax import _collector
from liger_jax._install import NAME, checkout, version

SHOWN = ("jax", "jaxlib", "flax", "optax", "chex", "jaxtyping", "safetensors", "tokenizers", "orbax-checkpoint")
_COMPARISONS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_LIMIT = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([\d.]+)\s*")


def versions() -> dict[str, str]:
    """The versions of all packages that are installed, by their names, and liger-jax's."""
    by_name = {}
    for each in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged one has no name
            by_name.setdefault(each.metadata["Name"].lower().replace("_", "-"), each.version)
    return by_name | {NAME: version()}


def requirements() -> dict[str, str]:
    """The versions that liger-jax and JAX say that they need in this Python, by package, such as ">=0.10.2,<0.13"."""
    if (project := checkout() / "pyproject.toml").is_file():
        texts = list(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"])
    else:
        texts = _required_by(NAME)
    needed: dict[str, list[str]] = {}
    for text in [*texts, *_required_by("jax")]:
        requirement, _, marker = text.partition(";")
        parts = re.fullmatch(r"([\w.-]+)\s*\(?([^()\[\]]*)\)?", requirement.strip())
        if parts and _is_for_this_python(marker):
            needed.setdefault(parts[1].lower().replace("_", "-"), []).append(parts[2].replace(" ", ""))
    return {name: ",".join(filter(None, limits)) for name, limits in needed.items()}


def wrong_versions(installed: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Sentences about packages that are missing, or of a version that is not the one needed, each with its cure."""
    wrong = []
    for name, limits in needed.items():
        if (has := installed.get(name)) is None:
            wrong.append(f"{name} is not installed: pip install '{name}{limits}'.")
        elif not all(_is_within(has, limit) for limit in limits.split(",")):
            wrong.append(f"{name} is {has}, and {limits} is needed: pip install '{name}{limits}'.")
    return wrong


def packages_shown(installed: Mapping[str, str]) -> str:
    """The line of `liger-jax doctor` about packages."""
    return "packages: " + ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)


def _required_by(package):
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _is_for_this_python(marker):
    """Whether a marker lets a requirement count: none does, and one about Python's version alone."""
    match = re.fullmatch(r"\s*python_version\s*(\S+?)\s*['\"]([\d.]+)['\"]\s*", marker)
    if not marker.strip() or match is None:  # extras and platforms are others' concern
        return not marker.strip()
    return _COMPARISONS[match[1]](sys.version_info[:2], _numbers(match[2]))


def _is_within(has, limit):
    match = _LIMIT.fullmatch(limit)
    return match is None or _COMPARISONS[match[1]](*_of_one_length(_numbers(has), _numbers(match[2])))


def _numbers(text):
    """The leading numbers of a version: (0, 12, 0) of "0.12.0rc1"."""
    return tuple(map(int, re.findall(r"(?:^|(?<=\.))\d+", text)))


def _of_one_length(a, b):
    size = max(len(a), len(b))
    return a + (0,) * (size - len(a)), b + (0,) * (size - len(b))


def _import_them():
    try:
        with _collector.paused():
            for package in ("jax", "flax.nnx", "optax", "chex", "jaxtyping"):
                importlib.import_module(package)
    except Exception as error:
        _say(error)


def _say(error: Exception):
    """Ends the command, or the import, with what does not work together and the cure."""
    installed = versions()
    pair = " and ".join(f"{name} {installed[name]}" for name in ("jax", "flax", "optax") if name in installed)
    wrong = wrong_versions(installed, requirements())
    cures = wrong or ["Take the newest: pip install --upgrade jax flax optax."]
    why = " ".join(f"{type(error).__name__}: {error}".split())
    if pathlib.Path(sys.argv[0]).stem != NAME:
        raise ImportError(f"liger_jax: {pair} cannot be imported together ({why}). {' '.join(cures)}") from error
    if sys.argv[1:2] == ["doctor"]:
        broken = [f"broken: {sentence}" for sentence in [f"{pair} cannot be imported together: {why}", *cures]]
        print(f"{NAME} {installed[NAME]}", packages_shown(installed), *broken, sep="\n")
        raise SystemExit(1)
    print(f"{NAME}: {pair} cannot be imported together. {' '.join(cures)}", file=sys.stderr)
    raise SystemExit(2)


_import_them()
