"""Saving over a checkpoint: whatever moment it is killed at, a model is there, and never a mixture of two."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax.models import AutoModelForCausalLM, LlamaForCausalLM, checkpoint, saving
from tests.models._llama import CONFIG, make_model
from tests.ops._oracle import first

# --- a process that is killed ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing that it still tries to do with a file comes to pass."""


class Killer:
    """Lets so many operations on files happen, and no more."""

    CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate")

    def __init__(self):
        self.armed, self.count, self.at, self.opened = False, 0, -1, ""

    def hook(self, event, arguments):
        """Python's audit hook."""
        if not self.armed:
            return
        if event == "open":
            self.opened = arguments[0]
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes:
                self.step()
        elif event in self.CHANGES:
            self.step()

    def step(self, torn=None):
        """One operation; when the process is killed in it, half of the file `torn` is on the disk."""
        if not self.armed:
            return
        if self.count >= self.at >= 0:
            if self.count == self.at and torn and os.path.isfile(torn):
                self.armed = False
                os.truncate(torn, os.path.getsize(torn) // 2)
                self.armed = True
            self.count = max(self.count, self.at + 1)
            raise Killed
        self.count += 1

    def run(self, at, function) -> int:
        """Calls the function and kills it at this operation, or never for -1; returns how many there were."""
        self.armed, self.count, self.at = True, 0, at
        try:
            with contextlib.suppress(Killed):
                function()
        finally:
            self.armed = False
        return self.count


KILLER = Killer()
sys.addaudithook(KILLER.hook)


@pytest.fixture
def killer(monkeypatch):
    write = saving.save_file

    def save_file(tensors, path, **options):  # written by Rust, which audits nothing
        KILLER.step()
        write(tensors, path, **options)

    def fsync(file):  # what is not synced may be lost; the real one takes milliseconds
        KILLER.step(torn=KILLER.opened)

    monkeypatch.setattr(saving, "save_file", save_file)
    monkeypatch.setattr(os, "fsync", fsync)
    return KILLER


# --- what is saved and read ------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """All that must belong together: what config.json means, the weights and the other small files."""

    theta: int
    weight: float
    generation: str | None = None
    tokenizer: str = "t"


def save(model: Model, folder, num_shards):
    tensors = {name: np.full(3, model.weight, np.float32) for name in "abc"}
    parts = [tensors] if num_shards == 1 else [{"a": tensors.pop("a")}, tensors][:num_shards]
    config = json.dumps({"theta": model.theta, "of no import": model.weight})
    files = {"config.json": config, "generation_config.json": model.generation, "tokenizer.json": model.tokenizer}
    contents = {name: None if text is None else text.encode() for name, text in files.items()}
    saving.write(folder, parts, contents, meaning)


def meaning(folder):
    return checkpoint.read_config(folder)["theta"]


def read(folder) -> Model:
    """One file counts more than an index, as in transformers."""
    theta, names = meaning(folder), ["model.safetensors"]
    if not (folder / names[0]).exists():
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert sorted(weight_map) == ["a", "b", "c"]
        names = set(weight_map.values())
    tensors = {name: x for file in names for name, x in load_file(folder / file).items()}
    assert sorted(tensors) == ["a", "b", "c"]
    (weight,) = np.unique(np.concatenate(list(tensors.values()))).tolist()
    text = lambda path: path.read_text() if path.exists() else None
    return Model(theta, weight, text(folder / "generation_config.json"), text(folder / "tokenizer.json") or "")


def read_or_mend(folder) -> Model:
    """Does what the message says, where there is one."""
    try:
        return read(folder)
    except FileNotFoundError as error:
        message = r"has no config.json, since a save into it was cut off. Save the model again, or move the files of "
        found = re.search(message + r"(\S+) to (\S+) to have the model", str(error))
        assert found, error
        for path in os.listdir(found[1]):
            shutil.move(os.path.join(found[1], path), os.path.join(found[2], path))
        return read(folder)


def assert_nothing_else_is_there(folder, num_shards):
    names = {path.name for path in folder.iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) == num_shards
    small = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert {name for name in names if not name.endswith(".safetensors")} <= small
    assert ("model.safetensors.index.json" in names) == (num_shards > 1)


OLD = Model(1, 1.0, generation="old")
TRANSITIONS = list(itertools.product((1, 2), repeat=2))
CHANGES = {
    "weights": OLD._replace(weight=2.0),
    "all": Model(2, 2.0, generation="new", tokenizer="new"),
    "config": OLD._replace(weight=2.0, theta=2),
    "small files": OLD._replace(weight=2.0, generation=None, tokenizer="new"),
}
each_transition = pytest.mark.parametrize("shards, new_shards", TRANSITIONS, ids=lambda n: f"{n}_files")


@each_transition
@pytest.mark.parametrize("change", first(2, tuple(CHANGES)))
def test_a_kill_at_any_file_operation_leaves_the_old_model_or_the_new(
    change, shards, new_shards, killer, tmp_path, rng
):
    new, third = CHANGES[change], Model(3, 3.0)
    save(OLD, tmp_path / "old", shards)
    shutil.copytree(tmp_path / "old", tmp_path / "whole")
    count = killer.run(-1, lambda: save(new, tmp_path / "whole", new_shards))
    assert count > 10 and read(tmp_path / "whole") == new
    found = []
    for at in range(count):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", folder)
        killer.run(at, lambda: save(new, folder, new_shards))
        shutil.copytree(folder, tmp_path / f"mended-{at}")
        found.append(read(folder) if change == "weights" else read_or_mend(tmp_path / f"mended-{at}"))
        # The next save is killed, too, and the one after it is not.
        killer.run(int(rng.integers(count)), lambda: save(third, folder, shards))
        shutil.copytree(folder, tmp_path / f"again-{at}")
        assert read_or_mend(tmp_path / f"again-{at}") in (found[-1], third)
        save(third, folder, new_shards)
        assert read(folder) == third
        assert_nothing_else_is_there(folder, new_shards)
    assert set(found) == {OLD, new} and found == sorted(found, key=[OLD, new].index)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_first_save_that_is_killed_leaves_no_model_or_a_whole_one(num_shards, killer, tmp_path):
    count = killer.run(-1, lambda: save(OLD, tmp_path / "whole", num_shards))
    for at in range(count):
        folder = tmp_path / str(at)
        killer.run(at, lambda: save(OLD, folder, num_shards))
        try:
            assert read_or_mend(folder) == OLD
        except (FileNotFoundError, AssertionError) as error:
            assert re.search("has no config.json(, since the first save into it was cut off. Save the|: it)", str(error))
        save(OLD, folder, num_shards)
        assert read(folder) == OLD
        assert_nothing_else_is_there(folder, num_shards)
