"""The wheel holds `liger_jax/` and nothing else, and works far from the checkout."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "liger_jax", "pallas_kernels", "models")


def run(*command, cwd: Path) -> str:
    """Runs a command that must know nothing of this checkout, and returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))} failed:\n{result.stdout}"
    return result.stdout


def public_names(package: Path) -> list[str]:
    """The names that a package re-exports as `from … import name as name`."""
    tree = ast.parse((package / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.name == alias.asname]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools leaves a `build/` folder in the tree that it works in."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (CHECKOUT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CHECKOUT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(CHECKOUT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> tuple[Path, Path]:
    """The python and the site-packages of an environment with the wheel and, from ours, the dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=environment)
    (package,) = environment.glob("lib/python*/site-packages/liger_jax")
    # A path named by a .pth file is not searched for further .pth files, so an editable install stays out.
    (package.parent / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python, package.parent


@pytest.fixture
def users_project(tmp_path) -> Path:
    """A folder like many a user's: a `models` package and a `pallas_kernels` module of their own."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("OWNER = 'user'\n")
    (tmp_path / "pallas_kernels.py").write_text("OWNER = 'user'\n")
    return tmp_path


def test_wheel_holds_only_liger_jax(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    print(*names, sep="\n")
    tops = {name.split("/")[0] for name in names}
    (dist_info,) = tops - {"liger_jax"}
    assert dist_info.startswith("liger_jax-") and dist_info.endswith(".dist-info")
    assert f"{dist_info}/licenses/LICENSE" in names
    assert "liger_jax/py.typed" in names


@pytest.mark.parametrize("folder", ["pallas_kernels", "models"])
def test_wheel_holds_every_linked_file(wheel, folder):
    in_tree = {f"liger_jax/{path.relative_to(CHECKOUT)}" for path in (CHECKOUT / folder).rglob("*.py")}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"liger_jax/{folder}/")}
    assert in_tree and in_tree <= in_wheel, f"not in the wheel: {sorted(in_tree - in_wheel)}"


def test_every_public_name_imports_beside_a_users_models_folder(installed, users_project):
    python, site = installed
    lines = ["import models, pallas_kernels", "assert models.OWNER == pallas_kernels.OWNER == 'user'"]
    for init in sorted((site / "liger_jax").rglob("__init__.py")):
        module = ".".join(init.parent.relative_to(site).parts)
        names = public_names(init.parent)
        lines.append(f"from {module} import {', '.join(names)}" if names else f"import {module}")
        lines.append(f"print('{module}:', *{names})")
    lines += [f"assert liger_jax.__file__.startswith({str(site)!r}), liger_jax.__file__"]
    lines += [f"assert {str(CHECKOUT)!r} not in sys.path, sys.path"]
    script = users_project / "train.py"
    script.write_text("\n".join(["import sys", "import liger_jax", *lines]) + "\n")

    printed = run(python, "-W", "error", script, cwd=users_project)

    for module in ("liger_jax", "liger_jax.ops", "liger_jax.losses", "liger_jax.layers", "liger_jax.models"):
        exports = [line for line in printed.splitlines() if line.startswith(f"{module}: ")]
        assert len(exports) == 1 and exports[0] != f"{module}: ", f"{module} exports nothing:\n{printed}"
