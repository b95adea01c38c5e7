"""Trainings that a table of held-out losses compares: the same weights, the same text, and nothing else alike."""

import dataclasses
import re

import numpy as np
import pytest

from benchmarks import _held_out
from examples._lib import text
from examples.train_llama import SIZES


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.setattr(_held_out, "SIZE", SIZES["tiny"])
    monkeypatch.setattr(_held_out, "HELD_OUT_TOKENS", 256)
    tokens = np.arange(2048, dtype=np.int32) % 32
    return text.Text(tokens, np.array([2048]), tokens[:512], 32, "tokens that count")


def losses(found):
    """The figures of a table's rows, by seed."""
    rows = [line.strip("|").split("|") for line in found.splitlines()[2:] if "mean" not in line]
    return {int(seed): [float(re.sub("[ %]", "", cell)) for cell in cells] for seed, *cells in rows}


def test_trainings_of_a_seed_begin_alike_and_learn(corpus):
    training = _held_out.training_of(4, 2, dtype="float32")
    kinds = dict(fast=training, slow=dataclasses.replace(training, learning_rate=1e-3))
    trainings = {name: _held_out.Trainings(corpus, kind) for name, kind in kinds.items()}
    found = losses(_held_out.compared(trainings, (0, 1)))
    for fast, slow, chance, share, by_chance in found.values():
        assert fast < slow - 0.1 < np.log(32) and share == pytest.approx(100 * (slow / fast - 1), abs=0.02)
        assert chance == pytest.approx(fast, rel=1e-2) and by_chance == pytest.approx(0, abs=1)
    assert found[0][0] != found[1][0]


@pytest.mark.full
def test_a_mesh_trains_as_one_device_does(corpus, devices):
    training = _held_out.training_of(3, 2, dtype="float32", optimizer="adamw8bit")
    one, several = (_held_out.Trainings(corpus, training, mesh).held_out_loss(0) for mesh in (None, "fsdp=2"))
    assert several == pytest.approx(one, rel=1e-4)
