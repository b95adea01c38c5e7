"""The training example learns, stops, goes on where it stopped, and accounts for its memory."""

import dataclasses
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from flax import nnx

from examples import train_llama
from examples._lib import memory, report, text
from examples._lib.command import run
from examples._lib.configuration import with_loss
from liger_jax.user_errors import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """300 kB in which each word tells the next."""
    path = tmp_path_factory.mktemp("data") / "counting.txt"
    path.write_text(" ".join(f"{i % 100} then {(i + 1) % 100}\n" for i in range(25_000)))
    return path


@pytest.fixture
def train(data, tmp_path, capsys):
    """Runs the example on the tiny model; returns what it printed."""

    def train(*arguments, out="run"):
        common = ["--size=tiny", f"--data={data}", "--no-memory"]
        train_llama.main([*common, f"--out={tmp_path / out}", *arguments])
        return capsys.readouterr()

    return train


SCORES = r"held-out loss: start ([\d.]+), unigram model ([\d.]+), end ([\d.]+)"


def losses_of(folder):
    checkpoint = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    log = json.loads((checkpoint / "log" / "metadata").read_text())
    return [step["loss"] for step in log["steps"]]


def test_a_run_learns_more_than_word_frequencies_and_leaves_a_picture(train, tmp_path):
    printed = train("--steps=60")
    start, unigram, end = map(float, re.search(SCORES, printed.out).groups())
    assert end < unigram < start
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" in printed.out and "by the compiler" in printed.out
    assert "loss" in printed.err and "60/60" in printed.err  # the progress bar
    assert "warning" not in printed.err.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # the text's tokens are in there, too


def test_a_killed_run_goes_on_with_the_same_losses(train, tmp_path, monkeypatch):
    train("--steps=8", out="whole")
    batch = text.Text.batch

    def batch_and_kill(self, step, *shape):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, step, *shape)

    monkeypatch.setattr(text.Text, "batch", batch_and_kill)
    assert "stopped after step 4 of 8" in train("--steps=8").out
    monkeypatch.setattr(text.Text, "batch", batch)
    assert len(losses_of(tmp_path / "run" / "checkpoints")) == 4
    printed = train("--steps=8").out
    assert "resumed at step 4\n" in printed and "held-out loss" in printed
    np.testing.assert_array_equal(
        losses_of(tmp_path / "run" / "checkpoints"), losses_of(tmp_path / "whole" / "checkpoints")
    )


def test_a_packed_run_learns_from_whole_documents_and_is_scored_as_others_are(train, tmp_path, rng):
    for i, size in enumerate(rng.integers(4, 24, 200)):
        (tmp_path / f"letter{i:03}.txt").write_text(" ".join(f"{(i + j) % 20} then" for j in range(size)))
    data = f"--data={tmp_path / 'letter*.txt'}"
    printed = train("--pack", "--steps=90", "--micro-batches=2", data).out
    documents, rows = map(int, re.search(r"packing: (\d+) documents in (\d+) rows, [\d.]+% of them", printed).groups())
    start, unigram, end = map(float, re.search(SCORES, printed).groups())
    assert rows < documents == 190 and end < unigram < start  # ten files are held out
    with pytest.raises(UserError, match="pack=True became False"):
        train("--steps=90", "--micro-batches=2", data)
    corpus = text.load(str(tmp_path / "letter*.txt"), train_llama.SIZES["tiny"].vocab, tmp_path / "run")
    assert unigram == round(text.unigram_loss(corpus, corpus.held_out_batches(2, 64, most=512)), 3)


def test_another_setting_is_refused_and_fresh_starts_over_once_it_has_a_checkpoint(train, tmp_path):
    train("--steps=1")
    with pytest.raises(UserError, match="steps=1 became 2.*Pass --fresh"):
        train("--steps=2")
    with pytest.raises(UserError, match="The loss is .* There is no checkpoint yet"):
        train("--steps=2", "--fresh", "--learning-rate=1e30")
    assert len(losses_of(tmp_path / "run" / "checkpoints")) == 1  # the old run's


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(train, tmp_path, monkeypatch):
    monkeypatch.setattr(train_llama, "SECONDS_BETWEEN_CHECKPOINTS", -1)
    with pytest.raises(UserError, match=r"is \w+ after step 2, .* The checkpoint of step 1 stays. Try a smaller"):
        train("--learning-rate=1e30")  # the rate of the first step is 0, and the second step's loss is still good
    assert len(losses_of(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.parametrize(
    ["flags", "message"],
    [
        (["--length=1"], "--length=1 must be at least 2: a token is predicted from those before it."),
        (["--out=file/run"], "Nothing can be written to file/run: Not a directory. Pass another --out."),
        (["--data=nowhere*"], "No file matches 'nowhere\\*'. Pass --data a file or a quoted glob."),
        (["--implementation=cuda"], "implementation='cuda' .*"),
    ],
    ids=str,
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(flags, message, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["examples/train_llama.py"])
    (tmp_path / "file").write_text("")
    assert run(train_llama.main, ["--size=tiny", f"--data={data}", "--no-memory", *flags]) == 2
    assert re.fullmatch(f"train_llama: .*{message}\n", capsys.readouterr().err)


def test_programs_are_kept_unless_no_cache_is_passed():
    folders, cached = [], "jax_enable_compilation_cache"
    main = lambda arguments: folders.append((arguments, getattr(jax.config, cached)))
    assert run(main, ["--steps=1"]) == run(main, ["--no-cache", "--steps=1"]) == 0
    assert folders == [(["--steps=1"], True), (["--steps=1"], False)]


def test_a_bug_is_a_traceback(train, monkeypatch):
    def bug(*arguments):
        raise ValueError("a bug")

    monkeypatch.setattr(train_llama.Loop, "run", bug)
    with pytest.raises(ValueError, match="a bug") as error:
        run(lambda _: train("--steps=1"))
    assert not isinstance(error.value, UserError)


def test_it_starts_by_its_path_from_any_folder(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, train_llama.__file__, "--steps=0"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (2, "train_llama: --steps=0 must be at least 1.\n")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "argv", ["train_llama.py"])
    with pytest.raises(SystemExit, match="2"), warnings.catch_warnings(action="ignore"):
        runpy.run_module("examples.train_llama", run_name="__main__")
    assert re.fullmatch("train_llama: the package 'tqdm' is missing. .*pip install -e .*\n", capsys.readouterr().err)


def test_without_kernels_and_in_micro_batches_it_trains_alike(train, tmp_path):
    train("--steps=4")
    assert "fused_linear_cross_entropy=False" in train("--steps=4", "--kernels=off", "--micro-batches=2", out="off").out
    ours, others = (losses_of(tmp_path / out / "checkpoints") for out in ("run", "off"))
    np.testing.assert_allclose(ours, others, rtol=1e-4)


def small_memory(batches, monkeypatch):
    size = train_llama.SIZES["small"]
    monkeypatch.setattr(memory, "BATCHES", batches)
    with_loss_of = lambda loss: dataclasses.replace(size.training, kernels=with_loss(size.training.kernels, loss))
    make_model = lambda loss: train_llama.make_model(size.model, size.vocab, with_loss_of(loss))
    return memory.measure(make_model, train_llama.make_optimizer(size.training), size.training.length)


def assert_flat_and_growing(rows):
    fused, logits = ([row.own[loss] for row in rows] for loss in memory.LOSSES)
    assert max(fused) <= 1.2 * max(fused[0], 2**20)  # none, where the layers' backward needs more than the loss
    assert logits == sorted(logits)
    assert logits[-1] > 0.5 * (rows[-1].batch / rows[0].batch) * logits[0]


def test_the_fused_loss_takes_the_same_memory_for_every_batch(monkeypatch, platform):
    if platform != "cpu":
        pytest.skip("the figures of the example's small setting are a CPU compiler's")
    assert_flat_and_growing(small_memory((1, 8), monkeypatch))


@pytest.mark.full
def test_the_memory_table_and_picture(monkeypatch, platform, tmp_path):
    rows = small_memory((1, 2, 4, 8), monkeypatch)
    lines = memory.table(rows).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4", "8"]
    report.memory_picture(rows, "a title", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    if platform == "cpu":
        assert_flat_and_growing(rows)


def test_a_picture_without_matplotlib_does_not_stop_a_run(monkeypatch, tmp_path, capsys):
    report.curves({"loss": {"ours": ([1, 2], [2.0, 1.0])}}, "a title", tmp_path / "there.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.loss_curve([2.0, 1.0], {}, tmp_path / "loss.png")
    told = f"picture: {tmp_path / 'there.png'}\nno picture: the package 'matplotlib' is missing, which pip install"
    assert capsys.readouterr().out.startswith(told) and [path.name for path in tmp_path.iterdir()] == ["there.png"]


def test_the_hundred_million_setting_has_a_hundred_million_parameters():
    size = train_llama.SIZES["100m"]
    make_model = lambda: train_llama.make_model(size.model, size.vocab, size.training)
    params = nnx.state(nnx.eval_shape(make_model))
    assert 95e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 105e6
    assert (size.vocab, size.training.length) == (32000, 2048)


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="names the devices that a CPU simulates")
def test_a_mesh_trains_as_one_device_does_and_is_no_part_of_what_the_run_is(train, tmp_path, monkeypatch):
    train("--steps=6", out="one")
    batch = text.Text.batch

    def batch_and_kill(self, step, *shape):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, step, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(text.Text, "batch", batch_and_kill)
        assert "devices: tensor=2 of 4 × cpu; 2 are idle" in train("--steps=6", "--mesh=tensor=2").out
    assert "resumed at step 3\n" in train("--steps=6", "--mesh=data=2").out
    ours, one = (losses_of(tmp_path / out / "checkpoints") for out in ("run", "one"))
    np.testing.assert_allclose(ours, one, rtol=1e-4)
    with pytest.raises(UserError, match="fsdp=2 does not divide axis 0 of model.embed_tokens"):
        train("--steps=6", "--mesh=fsdp=2")
