"""The small files, folders and sizes of a run."""

import contextlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.training import FolderError, disk, errors, files, loop, meshes, packing, processes, rows, steps, waiting


def test_sizes_and_figures_are_told_in_words():
    assert [disk.size(n) for n in (700, 3 * 2**20, 5 * 2**31)] == ["700 bytes", "3.0 MiB", "10.0 GiB"]
    assert disk.num_bytes([jnp.ones(3), jnp.ones((), "int8")]) == 13
    figures = [loop.figure(value) for value in (12.0, 0.25, 0.00041234, -5.2e-8, 0.0)]
    assert figures == ["12.000", "0.250", "0.000412", "-5.2e-08", "0.000"]
    assert loop.memory_in_use() >= 0


def test_a_full_disk_is_known_whichever_library_says_so(tmp_path):
    full = [OSError(28, "No space left on device"), RuntimeError("write failed: OS Error 28"), OSError(122, "")]
    assert all(map(disk.is_full, full)) and not disk.is_full(ValueError("no such file"))
    assert "cannot be written to" in str(disk.full("The result", tmp_path, 3 * 2**30))


def test_a_small_file_is_what_was_written_or_empty(tmp_path):
    path = tmp_path / "a.json"
    assert files.read_json(path) == {}
    files.write_json(path, {"step": 3})
    assert files.read_json(path) == {"step": 3} and [each.name for each in tmp_path.iterdir()] == ["a.json"]
    path.write_text("[1]")
    assert files.read_json(path) == {}
    files.check_writable(tmp_path / "new" / "run")
    with pytest.raises(FolderError, match="Nothing can be written"):
        files.check_writable(path / "run")


def test_folders_of_steps_have_their_number_as_a_name(tmp_path):
    names = {"12": 12, "12.earlier": 12, "012": None, "step": None}
    assert {name: steps.number_of(Path(name)) for name in names} == names
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in steps.all_of(tmp_path)] == ["12", "12.earlier"] and not steps.holds_a_run(tmp_path)
    (tmp_path / "12" / steps.STATE).mkdir()
    (tmp_path / "13").mkdir()
    (tmp_path / "13" / "other").touch()
    assert steps.holds_a_run(tmp_path) and not steps.is_checkpoint(tmp_path / "13")
    assert steps.all_of(tmp_path / "nowhere") == []


def test_one_process_has_nothing_to_wait_for(capsys, tmp_path):
    assert processes.is_first() and not processes.are_several() and processes.lost() == ""
    assert processes.most(3) == 3 and processes.agreed([15]) == [15] and processes.end(0) == 0
    processes.check_same("options", {"steps": 3})
    processes.check_shared(tmp_path)
    processes.by_first(lambda: print("one"))
    with processes.first_before_others(), processes.only_first_speaks():
        print("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_what_takes_seconds_is_told_and_done_beside(capsys):
    with contextlib.suppress(KeyError), waiting.telling("counting"):
        raise KeyError
    assert capsys.readouterr().out == "counting …\n"
    assert waiting.beside(sum, [1, 2]).result() == 3


def test_memory_errors_leaves_other_errors_alone():
    with pytest.raises(KeyError), errors.memory_errors("in step 1."):
        raise KeyError


def test_rows_and_tokens_are_counted():
    assert rows.num_rows({"input_ids": np.ones((3, 8), np.int32)}) == 3
    assert rows.num_tokens({"input_ids": np.ones((1, 4)), "labels": np.array([[-100, 5, 6, -100]])}) == 3
    assert rows.num_mixed([(10, 2.0), (5, 0.5)]) == 22
    place = packing.FirstFit(4)
    assert [place(size) for size in (3, 2, 1)] == [(0, 0), (1, 0), (0, 3)]


def test_a_mesh_is_read_from_its_text():
    sizes = meshes.parse_mesh("fsdp=2,tensor=4")
    assert sizes == {"data": 1, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 4}
    assert meshes.layout_of(sizes).tensor == "tensor"
    assert meshes.shards_of_batch(meshes.parse_mesh("data=2,expert=4,tensor=8")) == 8
