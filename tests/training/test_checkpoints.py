"""Checkpoints of a run: what is kept, and the errors for a folder that no run can resume from."""

import os
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.training import (
    CheckpointError,
    Checkpoints,
    DamagedError,
    DiskError,
    FolderError,
    TrainingError,
    disk,
    processes,
)

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


def test_a_state_of_other_shapes_or_dtypes_is_one_sentence(folder):
    checkpoints = Checkpoints(folder, {"steps": 3})
    said = r"/1 holds another state: \[0\] is float32\(6,\), and {} in the run\. Pass fresh=True to start over"
    for other in (jnp.zeros(7), jnp.zeros(6, jnp.bfloat16)):
        asked = f"{other.dtype}\\({other.size},\\)"
        with pytest.raises(CheckpointError, match=said.format(asked)):
            checkpoints.restore([other, STATE[1]])
    with pytest.raises(CheckpointError, match=r"/1 holds a state of 2 arrays, and the run has one of 1\."):
        checkpoints.read(1, STATE[:1])


def test_fresh_keeps_the_old_checkpoint_until_there_is_a_new_one(folder):
    fresh = Checkpoints(folder, {"steps": 4}, fresh=True)
    assert fresh.restore(STATE) is None and fresh.latest_step is None and (folder / "1").is_dir()
    fresh.save(1, STATE, LOG)
    assert Checkpoints(folder, {"steps": 4}, fresh=False).restore(STATE)[1] == LOG


def test_settings_are_those_of_the_step_that_is_read(folder):
    with pytest.raises(CheckpointError, match=r"another run: steps=3 became 4\."):
        Checkpoints(folder, {"steps": 4}).check()
    Checkpoints(folder, {"steps": 3}).check()


def test_settings_that_came_and_went_are_named(folder):
    with pytest.raises(CheckpointError, match="remat='full' is new, steps=3 is gone. Pass fresh="):
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
    "damage",
    [
        lambda f: _truncate(f / "1" / "about"),
        lambda f: _truncate(f / "1" / "state"),
        lambda f: _empty(f / "1" / "state"),
        lambda f: _truncate(f / "1" / "log"),
        lambda f: (f / "1" / "log" / "metadata").write_text("{}"),
        lambda f: _empty(f / "1"),
    ],
    ids=["about cut", "state cut", "no state", "log cut", "another log", "all files gone"],
)
def test_a_damaged_folder_is_a_sentence_that_names_fresh(folder, damage):
    damage(folder)
    message = (
        r"The checkpoint .*/checkpoints/1 cannot be read \(\w+: .*Pass fresh=True to start over, or another folder"
    )
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoints(folder, {"steps": 3}).restore(STATE)
    assert "\n" not in str(error.value)
    Checkpoints(folder, {"steps": 3}, fresh=True).save(1, STATE, LOG)
    assert Checkpoints(folder, {"steps": 3}).restore(STATE)[1] == LOG
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["1"]


def test_no_flipped_bit_is_read_as_another_number(tmp_path):
    rng = np.random.default_rng(0)
    state = {"a": jnp.asarray(rng.normal(size=(64, 256)), jnp.float32), "b": jnp.asarray(rng.normal(size=999) > 0)}
    Checkpoints(tmp_path, {}).save(1, state, LOG)
    data = max(
        (path for path in (tmp_path / "1" / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    whole, refused = data.read_bytes(), 0
    for at in rng.integers(0, len(whole), 12):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.integers(8)
        data.write_bytes(flipped)
        try:
            found, _ = Checkpoints(tmp_path, {}).restore(state) or ({}, {})
        except CheckpointError as error:
            refused += 1
            assert f"{tmp_path / '1'} cannot be read" in str(error)
        else:
            assert all(np.array_equal(found[name], state[name]) for name in state)
    assert refused


@pytest.mark.parametrize("damage", ["state", "log", "all", "no files"])
def test_the_newest_whole_checkpoint_is_named_where_a_newer_one_is_damaged(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path, {}, keep=2)
    for step in (8, 12):
        checkpoints.save(step, [STATE[0] + step], {"steps": [step]})
    if damage == "no files":
        shutil.rmtree(tmp_path / "12")
        (tmp_path / "12").mkdir()
    else:
        _truncate(tmp_path / "12" / damage if damage != "all" else tmp_path / "12")
    newest = tmp_path / "12"
    with pytest.raises(
        DamagedError, match=rf"{newest} cannot be read .* step 8 is intact: move {newest} elsewhere"
    ) as error:
        Checkpoints(tmp_path, {}).restore([STATE[0]])
    assert "fresh" not in str(error.value)
    newest.rename(tmp_path / "moved")
    state, log = Checkpoints(tmp_path, {}).restore([STATE[0]]) or ([], {})
    np.testing.assert_array_equal(state[0], STATE[0] + 8)
    assert log == {"steps": [8]}


# --- which are kept ---------------------------------------------------------------------------------------------------


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, {})
    for step, score, kept in [(1, 3.0, [1]), (2, 1.0, [2]), (3, 2.0, [2, 3]), (4, None, [2, 4]), (5, 0.5, [5])]:
        checkpoints.save(step, STATE, LOG, score)
        assert steps_in(tmp_path) == kept
    assert checkpoints.best == (5, 0.5)
    more = Checkpoints(tmp_path, {}, keep=2)
    for step in (6, 7, 8):
        more.save(step, STATE, LOG, 9.0)
    assert steps_in(tmp_path) == [5, 7, 8] and more.best == (5, 0.5)


# --- starting over ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(12))
def test_a_kill_while_a_run_starts_over_leaves_the_old_run_or_the_new_one(tmp_path, at, monkeypatch):
    """In each rename, a process dies: nothing runs after it, not even what cleans up."""
    old = Checkpoints(tmp_path, {"run": "old"}, keep=2)
    for step in (3, 6):
        old.save(step, [STATE[0]], {"steps": [step]})
    renames, names = [], ("rename", "replace")

    def dying(real):
        def rename(*args, **kwargs):
            if len(renames) >= at:
                raise Killed
            renames.append(args)
            return real(*args, **kwargs)

        return rename

    new = Checkpoints(tmp_path, {"run": "new"}, fresh=True)
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            new.save(6, [STATE[0] + 1], {"steps": ["new"]})
        except Killed:
            pass
    found = []
    for run in ("old", "new"):
        try:
            state, log = Checkpoints(tmp_path, {"run": run}).restore([STATE[0]]) or ([], {})
        except CheckpointError:
            continue
        found.append(run)
        assert log == {"steps": [6] if run == "old" else ["new"]}
        np.testing.assert_array_equal(state[0], STATE[0] + (run == "new"))
        going_on = Checkpoints(tmp_path, {"run": run})
        going_on.save(7, state, log)
        assert steps_in(tmp_path) == [7]
    assert len(found) == 1 and (found == ["old"] or renames)


def test_starting_over_removes_numbered_steps_of_runs_and_nothing_else(folder):
    (folder / "other").mkdir()
    (folder / "other" / "weights.bin").write_text("thesis")
    (folder / "7.orbax-checkpoint-tmp").mkdir()  # of a run that was killed
    (folder / "notes.txt").write_text("notes")
    Checkpoints(folder, {}, fresh=True, earlier=["model"]).save(2, STATE, LOG)
    assert {path.name for path in folder.iterdir()} == {"2", "other", "notes.txt", "earlier.json"}
    assert (folder / "other" / "weights.bin").read_text() == "thesis"
    assert Checkpoints(folder, {}).earlier == ["model"]


# --- results ----------------------------------------------------------------------------------------------------------


def test_what_is_finished_is_of_the_newest_checkpoint_alone(folder):
    checkpoints = Checkpoints(folder, {"steps": 3})
    assert checkpoints.finished == {}
    checkpoints.finish("model", {"dtype": "float32"})
    checkpoints.finish("adapters", {})
    again = Checkpoints(folder, {"steps": 3})
    assert again.finished == {"model": {"dtype": "float32"}, "adapters": {}}
    assert Checkpoints(folder, {"steps": 3}, fresh=True).finished == {}
    again.save(2, STATE, LOG)
    assert again.finished == {}


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=3 * 2**20))
    checkpoints = Checkpoints(tmp_path, {})
    state = [jax.ShapeDtypeStruct((2**18,), jnp.float32)]
    with pytest.raises(
        DiskError, match=r"has 3\.0 MiB left, and 3 more checkpoints of 1\.0 MiB .* need 3\.5 MiB\. Make"
    ):
        checkpoints.check_space(state, beside_bytes=2**19)
    checkpoints.check_space(state, beside_bytes=0)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_full_disk_is_a_sentence_and_the_checkpoint_before_it_stays(tmp_path, capfd):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk needs root")
    try:
        Checkpoints(folder, {}).save(1, STATE, LOG)
        large = [jax.random.normal(jax.random.key(i), (2**16,)) for i in range(8)]
        with pytest.raises(
            DiskError, match=r"step 2 cannot be written to .*/small: the disk is full\. It needs 2\.0 MiB"
        ):
            Checkpoints(folder, {}).save(2, large, LOG)
        assert steps_in(folder) == [1]
        assert Checkpoints(folder, {}).restore(STATE)[1] == LOG
        assert [path.name for path in folder.iterdir()] == ["1"]  # nothing half written takes the room
        assert "Traceback" not in capfd.readouterr().err
    finally:
        subprocess.run(["umount", folder], check=True)


# --- folders ----------------------------------------------------------------------------------------------------------


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


def test_a_save_that_another_process_has_torn_says_who_is_lost(folder, monkeypatch):
    checkpoints = Checkpoints(folder, {"steps": 3}, fresh=False)

    def torn(*_, **__):
        raise jax.errors.JaxRuntimeError("Connection closed by peer")

    monkeypatch.setattr(Checkpoints, "_checkpointer", types.SimpleNamespace(save=torn))
    with pytest.raises(TrainingError, match=r"step 2 cannot be written to .* \(.*Connection closed by peer"):
        checkpoints.save(2, STATE, LOG)
    monkeypatch.setattr(processes, "lost", lambda: "Process 1 of 2 has ended.")
    with pytest.raises(TrainingError, match=r"^Process 1 of 2 has ended\.$"):
        checkpoints.save(2, STATE, LOG)
