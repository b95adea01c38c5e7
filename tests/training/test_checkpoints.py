"""Checkpoints of a run: what is kept, and the errors for a folder that no run can resume from."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.training import CheckpointError, Checkpoints, FolderError, TrainingError

STATE, LOG = [jnp.arange(6.0), jnp.ones((), jnp.int32)], {"losses": [3.0]}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints"
    Checkpoints(folder, {"steps": 3}, fresh=False).save(1, STATE, LOG)
    return folder


def test_a_checkpoint_is_read_back_with_its_step(folder):
    checkpoints = Checkpoints(folder, {"steps": 3}, fresh=False)
    state, log = checkpoints.restore(STATE) or ([], {})
    np.testing.assert_array_equal(state[0], STATE[0])
    assert log == LOG and checkpoints.latest_step == 1


def test_fresh_keeps_the_old_checkpoint_until_there_is_a_new_one(folder):
    fresh = Checkpoints(folder, {"steps": 4}, fresh=True)
    assert fresh.restore(STATE) is None and fresh.latest_step is None and (folder / "1").is_dir()
    fresh.save(1, STATE, LOG)
    assert Checkpoints(folder, {"steps": 4}, fresh=False).restore(STATE)[1] == LOG


def test_settings_are_written_with_the_first_checkpoint(tmp_path):
    first = Checkpoints(tmp_path / "new", {"steps": 3}, fresh=False)
    assert first.restore(STATE) is None and not any((tmp_path / "new").iterdir())
    (tmp_path / "new" / "settings.json").write_text("{")  # left by a run that was killed while it wrote the checkpoint
    other = Checkpoints(tmp_path / "new", {"steps": 4}, fresh=False)
    assert other.restore(STATE) is None
    other.save(1, STATE, LOG)
    assert json.loads((tmp_path / "new" / "settings.json").read_text()) == {"steps": 4}


def test_settings_that_came_and_went_are_named(folder):
    with pytest.raises(CheckpointError, match="remat=None became 'full', steps=3 became None. Pass fresh="):
        Checkpoints(folder, {"remat": "full"}, fresh=False).restore(STATE)


def _truncate(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.unlink()


@pytest.mark.parametrize(
    ["damage", "message"],
    [
        (lambda f: (f / "settings.json").write_text('{"steps":'), "settings.json, which .* cannot be read"),
        (lambda f: (f / "settings.json").write_text("[3]"), "settings.json, which .* cannot be read"),
        (lambda f: (f / "settings.json").unlink(), "settings.json, which .* cannot be read"),
        (lambda f: _truncate(f / "1" / "state"), r"The checkpoint .*/checkpoints/1 cannot be read \(\w+: "),
        (lambda f: _empty(f / "1" / "state"), r"The checkpoint .*/checkpoints/1 cannot be read \(\w+: "),
        (lambda f: _truncate(f / "1" / "log"), r"The checkpoint .*/checkpoints/1 cannot be read \(\w+: "),
        (lambda f: _empty(f / "1"), r"The checkpoint .*/checkpoints/1 cannot be read \(\w+: "),
    ],
    ids=["settings cut", "settings no object", "no settings", "state cut", "no state", "log cut", "all files gone"],
)
def test_a_damaged_folder_is_a_sentence_that_names_fresh(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message + ".*Pass fresh=True to start over, or another folder") as error:
        Checkpoints(folder, {"steps": 3}, fresh=False).restore(STATE)
    assert "\n" not in str(error.value)
    Checkpoints(folder, {"steps": 3}, fresh=True).save(1, STATE, LOG)
    assert Checkpoints(folder, {"steps": 3}, fresh=False).restore(STATE)[1] == LOG


def test_a_folder_that_cannot_be_made_is_named_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="^Nothing can be written to file/checkpoints: Not a directory. Pass another"):
        Checkpoints(type(tmp_path)("file/checkpoints"), {}, fresh=False)


def test_an_error_has_its_problem_and_its_cure_apart(folder):
    with pytest.raises(TrainingError) as error:
        Checkpoints(folder, {"steps": 4}, fresh=False).restore(STATE)
    assert error.value.problem.endswith("holds another run: steps=3 became 4.")
    assert str(error.value) == f"{error.value.problem} {error.value.cure}"
