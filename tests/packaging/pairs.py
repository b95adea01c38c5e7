"""The lowest and the highest versions that pyproject.toml allows, each in its own environment: `make pairs`.

pip has to resolve them, all packages have to be imported, no version may be what `liger-jax doctor` calls broken, and a
model has to learn in a step of each optimizer. It needs an index of packages, and some minutes.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import jax, jax.numpy as jnp, optax
from flax import nnx
import liger_jax.commands, liger_jax.integrations, liger_jax.layers, liger_jax.losses, liger_jax.planner
from liger_jax import _packages
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import adamw, adamw_8bit, make_step, sgd

wrong = _packages.wrong_versions(_packages.versions(), _packages.requirements())
assert not wrong, wrong
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
for optimizer in (adamw(1e-2, seed=0), adamw_8bit(1e-2), sgd(1e-2), optax.adam(1e-2)):
    graph, params = nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
    step, state, losses = jax.jit(make_step(graph, optimizer)), (params, optimizer.init(params)), []
    for _ in range(2):
        state, loss = step(state, jnp.arange(32).reshape(2, 16))
        losses.append(float(loss))
    assert losses[1] < losses[0], losses
print("works:", _packages.packages_shown(_packages.versions()))
"""


def lowest() -> list[str]:
    """The lowest version of each dependency in this Python, as pip's constraints."""
    is_old = sys.version_info < (3, 12)
    found = []
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]:
        requirement, _, marker = text.partition(";")
        if "<" in marker and not is_old or ">=" in marker and is_old:
            continue
        if floor := re.match(r"([\w-]+)>=([\d.]+)", requirement):
            found.append(f"{floor[1]}=={floor[2]}")
    return found


def check(name: str, constraints: list[str]) -> None:
    """Makes the environment, and runs the program in it and `liger-jax doctor`."""
    print(
        f"{name} versions, Python {sys.version_info.major}.{sys.version_info.minor}: {' '.join(constraints)}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        venv.create(environment, with_pip=True)
        limits = Path(folder, "constraints.txt")
        limits.write_text("\n".join(constraints))
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        variables["JAX_PLATFORMS"] = "cpu"
        # As in tests/conftest.py: code that runs twice need not be fast.
        variables["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        # Bytecode is made of what is imported, not of every file: the environment is gone in a minute.
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile", "-c", limits]
        for command in ([*pip, "-e", ROOT], [python, "-c", PROGRAM], [python.with_name("liger-jax"), "--version"]):
            subprocess.run(command, cwd=folder, env=variables, check=True)


if __name__ == "__main__":
    check("lowest", lowest())
    check("highest", [])
