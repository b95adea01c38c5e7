"""A folder is one process's at a time."""

import os
import subprocess
import sys

import pytest

from liger_jax.training import FolderError, LockedError, lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")

# A process that holds the file as `lock.held` does, without the seconds that it takes to import JAX.
HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, f"process {os.getpid()} on here".encode())
print("held", flush=True)
sys.stdin.read()
"""


def test_the_other_process_is_named_and_its_death_frees_the_folder(tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(LockedError, match=rf"writes to {tmp_path}: process {other.pid} on here\. Wait for it"),
            lock.held(tmp_path),
        ):
            pass
        other.kill()
        other.wait()
        with lock.held(tmp_path):
            assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()


def test_a_folder_is_held_until_the_context_ends(tmp_path):
    with lock.held(tmp_path), pytest.raises(LockedError, match=f"process {os.getpid()} on"), lock.held(tmp_path):
        pass
    with lock.held(tmp_path):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "thesis").write_text("words")
    (tmp_path / ".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(FolderError, match=r"\.lock cannot be opened: "), lock.held(tmp_path):
        pass
    assert (tmp_path / "thesis").read_text() == "words"
