"""A checkpoint's folder is read once, whatever asks for it."""

import collections
import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.planner.architectures import architecture_of
from tests.commands import _tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def reads(monkeypatch):
    """How often each file is read, by its name."""
    counts = collections.Counter()
    for name in ("read_bytes", "read_text"):
        original = getattr(pathlib.Path, name)

        def counted(self, *args, original=original, **options):
            counts[self.name] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(pathlib.Path, name, counted)
    return counts


def test_all_that_a_run_asks_for_reads_a_file_once(folder, reads):
    source = find(folder)
    assert not reads and find(source) is source
    model = AutoModelForCausalLM.from_pretrained(source)
    assert architecture_of(source).config == model.config
    assert source.stops == model.kept.stops != () and source.dtype == "float32" and not source.multimodal
    assert source.tokenizer["tokenizer.json"] and source.tokenizer["vocab.json"] is None
    assert source.weight_bytes > 0 and source.tokenizer is source.tokenizer
    assert reads["config.json"] == reads["tokenizer.json"] == max(reads.values()) == 1


def test_a_model_is_saved_with_the_tokenizer_that_was_read(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    source = Source(copy)
    model, before = AutoModelForCausalLM.from_pretrained(source), source.tokenizer["tokenizer.json"]
    (copy / "tokenizer.json").write_text(json.dumps({"another": "one"}))  # meanwhile
    model.save_pretrained(tmp_path / "result", tokenizer_from=source)
    assert (tmp_path / "result" / "tokenizer.json").read_bytes() == before
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(again))
