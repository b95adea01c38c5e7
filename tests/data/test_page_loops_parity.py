"""PyTorch's loader in docs/trainers.md feeds a step. `make parity` installs PyTorch."""

import importlib.util

import numpy as np
import pytest

from liger_jax import data
from tests.data import _page_loops

HAS_TORCH = importlib.util.find_spec("torch") is not None
pytestmark = [pytest.mark.parity, pytest.mark.skipif(not HAS_TORCH, reason="torch is absent")]


@pytest.mark.filterwarnings("ignore")
def test_pytorchs_loader_shuffles_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _page_loops._tiny.checkpoint(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(_page_loops._tiny.chats(30))
    rows = data.rows(data.tokens("model", data.read("rows.jsonl"), length=64), 64)
    _, seen = _page_loops.run("torch", rows=rows)
    assert [len(batch["input_ids"]) for batch in seen][0] == 8
    together = np.concatenate([batch["input_ids"] for batch in seen])
    assert sorted(map(tuple, together)) == sorted(map(tuple, rows["input_ids"]))
