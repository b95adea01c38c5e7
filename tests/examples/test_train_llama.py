"""The training example learns, stops, goes on where it stopped, and accounts for its memory."""

import dataclasses
import json
import os
import re
import signal

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from examples import memory, report, text, train_llama
from examples.configuration import with_loss
from examples.train_step import nnx_train_step
from liger_jax.training import make_step


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """300 kB in which each word tells the next."""
    path = tmp_path_factory.mktemp("data") / "counting.txt"
    path.write_text(" ".join(f"{i % 100} then {(i + 1) % 100}\n" for i in range(25_000)))
    return path


@pytest.fixture
def train(data, tmp_path, capsys):
    """Runs the example on the tiny model; returns what it printed."""

    def run(*arguments, out="run"):
        common = ["--size=tiny", f"--data={data}", "--no-memory"]
        train_llama.main([*common, f"--out={tmp_path / out}", *arguments])
        return capsys.readouterr()

    return run


def losses_of(folder):
    checkpoint = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return json.loads((checkpoint / "log" / "metadata").read_text())["losses"]


def test_a_run_learns_more_than_word_frequencies_and_leaves_a_picture(train, tmp_path):
    printed = train("--steps=60")
    start, unigram, end = (float(x) for x in re.search(
        r"held-out loss: start ([\d.]+), unigram model ([\d.]+), end ([\d.]+)", printed.out
    ).groups())  # fmt: skip
    assert end < unigram < start
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" in printed.out and "by the compiler" in printed.out
    assert "loss" in printed.err and "60/60" in printed.err  # the progress bar
    assert "warning" not in printed.err.lower()


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
    assert "held-out loss" in train("--steps=8").out
    np.testing.assert_array_equal(
        losses_of(tmp_path / "run" / "checkpoints"), losses_of(tmp_path / "whole" / "checkpoints")
    )


def test_another_setting_is_refused_and_fresh_starts_over(train):
    train("--steps=2")
    with pytest.raises(ValueError, match="steps=2 became 3.*Pass --fresh"):
        train("--steps=3")
    assert "held-out loss" in train("--steps=3", "--fresh").out


def test_without_kernels_and_in_micro_batches_it_trains_alike(train, tmp_path):
    train("--steps=4")
    assert "fused_linear_cross_entropy=False" in train("--steps=4", "--kernels=off", "--micro-batches=2", out="off").out
    ours, others = (losses_of(tmp_path / out / "checkpoints") for out in ("run", "off"))
    np.testing.assert_allclose(ours, others, rtol=1e-4)


def test_both_train_steps_give_the_same_numbers(rng):
    size = train_llama.SIZES["tiny"]
    make_model = lambda: train_llama.make_model(size.model, 64, size.training)
    optimizer = optax.adamw(1e-2)
    model = make_model()
    nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    graph, params = nnx.split(make_model())
    state, step = (params, optimizer.init(params)), jax.jit(make_step(graph, optimizer), donate_argnums=0)
    for _ in range(2):
        tokens = rng.integers(0, 64, (2, 16)).astype(np.int32)
        state, loss = step(state, tokens)
        np.testing.assert_allclose(nnx_train_step(model, nnx_optimizer, jax.numpy.asarray(tokens)), loss, rtol=1e-5)


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


def test_the_hundred_million_setting_has_a_hundred_million_parameters():
    size = train_llama.SIZES["100m"]
    make_model = lambda: train_llama.make_model(size.model, size.vocab, size.training)
    params = nnx.state(nnx.eval_shape(make_model))
    assert 95e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 105e6
    assert (size.vocab, size.training.length) == (32000, 2048)
