"""The notebooks run from top to bottom on a CPU, and their figures are what their words say."""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.models.hugging_face.source import Source
from tests import _tiny

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def cells(notebook):
    """The code of a notebook's cells."""
    book = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def ran(notebook, model: str | None = None) -> tuple[dict[str, Any], Any]:
    """The names of a notebook after its cells have run, and what the last cell shows.

    `model`: what the one line that is to be changed names, in place of the tiny model.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = None
    for code in cells(notebook):
        code = code if model is None else code.replace('MODEL = "tiny"', f"MODEL = {model!r}")
        tree = ast.parse(code)
        last = tree.body[-1]
        tree.body = tree.body[:-1] if isinstance(last, ast.Expr) else tree.body
        exec(compile(tree, notebook.name, "exec"), names)
        shown = (
            eval(compile(ast.Expression(last.value), notebook.name, "eval"), names)
            if isinstance(last, ast.Expr)
            else None
        )
    return names, shown


def test_notebooks_hold_no_outputs_and_name_their_model_in_one_line():
    assert [notebook.stem for notebook in NOTEBOOKS] == ["finetune", "preferences", "rewards"]
    for notebook in NOTEBOOKS:
        book = json.loads(notebook.read_text(encoding="utf-8"))
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book["cells"])
        assert cells(notebook)[0].startswith('MODEL = "tiny"  # on a GPU')


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        names, shown = ran(notebook)
    if notebook.stem == "finetune":
        assert shown == "four" and names["answers"][-1][1] == "four"
    elif notebook.stem == "preferences":
        margins = names["result"].metrics["rewards/margins"]
        assert abs(margins[0]) < 1e-3 and margins[-5:].mean() > 0.5
        assert shown[1] < shown[0]
    else:
        rewards = names["result"].metrics["reward"]
        assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5])


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_with_a_checkpoint_that_its_line_names(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = _tiny.checkpoint(tmp_path / "tokenizer")
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "llama", tokenizer_from=Source(folder))
    with contextlib.redirect_stdout(io.StringIO()):
        names, _ = ran(notebook, str(tmp_path / "llama"))
    assert not (tmp_path / "tiny").exists() and names["options"]["adapters"].rank == 16
    assert all(np.isfinite(names["result"].metrics["loss"]))
    assert "lora_a" in str(nnx.state(names["result"].model, nnx.LoRAParam))
