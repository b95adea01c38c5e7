"""The fine-tuning example on a tiny checkpoint: it learns, goes on where it stopped, and leaves a model."""

import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from examples import finetune_qwen2
from examples._lib.command import UserError
from liger_jax.models import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

WORDS = ["one", "two", "three", "four", "five"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a checkpoint, its tokenizer and a text in which each word tells the next."""
    folder = tmp_path_factory.mktemp("source")
    config = Qwen2Config(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(folder, config_fields={"eos_token_id": 15})
    tokenizer = Tokenizer(models.WordLevel({word: i + 3 for i, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "five"}')
    (folder / "text.txt").write_text(" ".join(WORDS * 40))
    return folder


@pytest.fixture
def tune(source, tmp_path, capsys):
    def run(*arguments, out="run", data=("--data",)):
        data = [*data, str(source / "text.txt")] if data == ("--data",) else data
        sizes = ["--batch=2", "--length=16", "--learning-rate=0.03", f"--out={tmp_path / out}"]
        finetune_qwen2.main([f"--model={source}", *data, *sizes, *arguments])
        return capsys.readouterr()

    return run


def log_of(folder):
    newest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return json.loads((newest / "log" / "metadata").read_text())


def test_it_learns_and_goes_on_where_it_stopped(tune, source, tmp_path):
    printed = tune("--steps=24", out="whole")
    assert "train_mean_token_accuracy" in printed.err and "24/24" in printed.err
    first, last = map(float, re.search(r"24 steps; loss ([\d.]+) → ([\d.]+)", printed.out).groups())
    assert last < 0.5 * first
    tune("--steps=10")
    tune("--steps=24")
    logs = [log_of(tmp_path / out / "checkpoints") for out in ("run", "whole")]
    np.testing.assert_array_equal(logs[0]["loss"], logs[1]["loss"])
    accuracy = logs[0]["train_mean_token_accuracy"]
    assert accuracy[0] < 0.5 < accuracy[-1] <= 1.0
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / out / "model") for out in ("whole", "run"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(resumed), nnx.state(whole))
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 15
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model / name).read_bytes() == (source / name).read_bytes()


def test_packed_documents_are_learnt(tune, source, tmp_path):
    for i in range(12):
        (tmp_path / f"letter{i}.txt").write_text(" ".join((WORDS * 4)[i % 5 : i + 7]))
    printed = tune("--pack", "--steps=16", "--micro-batches=2", data=[f"--data={tmp_path / 'letter*.txt'}"]).out
    documents, rows = map(int, re.search(r"packing: (\d+) documents in (\d+) rows", printed).groups())
    first, last = map(float, re.search(r"16 steps; loss ([\d.]+) → ([\d.]+)", printed).groups())
    assert rows < documents == 12 and last < 0.7 * first


@pytest.mark.full
def test_a_hugging_face_dataset_is_read_by_its_column(tune, monkeypatch):
    def load_dataset(name, subset, split):
        assert (name, subset, split) == ("org/words", "small", "train")
        return {"story": [" ".join(WORDS * 8), "", " ".join(WORDS * 8)]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    data = ["--dataset=org/words", "--subset=small", "--column=story"]
    assert "1 steps" in tune("--steps=1", data=data).out


def test_a_text_shorter_than_a_sequence_is_refused(tune):
    with pytest.raises(ValueError, match="The text has 200 tokens; --length=512 of them are the least"):
        tune("--length=512")


def test_a_dataset_without_its_package_is_refused_with_the_command_that_installs_it(tune, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="--dataset needs the package datasets: pip install datasets"):
        tune(data=["--dataset=org/words"])


def test_a_file_that_is_no_text_is_named(tune, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match="picture.png is no text file"):
        tune(data=[f"--data={tmp_path / 'picture.png'}"])


def test_a_model_that_is_not_there_is_the_user_s_error():
    with pytest.raises(UserError, match="no such folder: './nowhere'"):
        finetune_qwen2.main(["--model=./nowhere", "--data=text.txt"])
