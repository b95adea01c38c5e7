"""The command that installs an extra is one that works for how liger-jax was installed."""

import importlib.metadata
import json
import pathlib
import re
import tomllib
from types import SimpleNamespace

import pytest

from liger_jax import _install

ROOT = pathlib.Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_checkout_is_installed_from_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    (folder / "liger_jax").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(_install, "__file__", str(folder / "liger_jax" / "_install.py"))
    assert _install.install_command("planner") == f"pip install -e '{folder}[planner]'"


@pytest.mark.parametrize(
    "source, requirement",
    [
        (None, "liger-jax[planner]"),
        (
            {"url": "https://host/me/liger-jax.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            "liger-jax[planner] @ git+https://host/me/liger-jax.git",
        ),
        (
            {
                "url": "ssh://git@host/me/all.git",
                "vcs_info": {"vcs": "git", "commit_id": COMMIT, "requested_revision": "v1"},
                "subdirectory": "jax",
            },
            "liger-jax[planner] @ git+ssh://git@host/me/all.git@v1#subdirectory=jax",
        ),
        ({"url": "file:///tmp/liger-jax", "dir_info": {}}, "liger-jax[planner] @ file:///tmp/liger-jax"),
        ({"url": "file:///tmp/l.whl", "archive_info": {}}, "liger-jax[planner] @ file:///tmp/l.whl"),
    ],
    ids=["index", "git", "branch of a folder in git", "folder", "wheel"],
)
def test_an_installed_package_is_installed_from_where_it_came(source, requirement, tmp_path, monkeypatch):
    monkeypatch.setattr(_install, "__file__", str(tmp_path / "site-packages" / "liger_jax" / "_install.py"))
    record = SimpleNamespace(read_text=lambda name: source and json.dumps(source))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: record)
    assert _install.install_command("planner") == f"pip install '{requirement}'"


def test_hints_name_extras_that_exist_and_none_asks_an_index_for_liger_jax():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]["optional-dependencies"]
    folders = ("liger_jax", "models", "pallas_kernels", "examples", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "_install.py"]
    texts = {path: path.read_text(encoding="utf8") for path in files}
    hinted = {name for text in texts.values() for name in re.findall(r"install_command\(['\"](\w+)['\"]\)", text)}
    assert {"planner", "cuda"} <= hinted <= set(extras)
    assert not [path for path, text in texts.items() if re.search(r"pip install ['\"]?liger-jax", text)]
