"""The loops of docs/trainers.md that need packages which tests of every environment lack: grain, PyTorch, Equinox."""

import re
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.training import adamw, make_step
from tests import _tiny

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen2.5-0.5B"


def run(package: str, **names: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Executes the block that begins by importing a package, in a folder of the test's own.

    The page's model is a tiny one in a folder of its name. Returns the block's names, and the batches of its step.
    """
    _tiny.checkpoint(Path(MODEL))
    Path("chats.jsonl").write_text(_tiny.chats(30))
    graph, params = nnx.split(AutoModelForCausalLM.from_pretrained(MODEL))
    optimizer, seen = adamw(1e-2), []
    jitted = jax.jit(make_step(graph, optimizer))

    def step(state: Any, batch: dict[str, Any]) -> Any:
        seen.append(batch)
        return jitted(state, batch)

    found = re.findall(rf"^```\n(import {package}\b.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1 and len(found[0].splitlines()) <= 10 or package == "equinox"
    names |= dict(step=step, state=(params, optimizer.init(params)))
    exec("from liger_jax import data\n" + found[0].replace("2048", "64"), names)
    return names, seen
