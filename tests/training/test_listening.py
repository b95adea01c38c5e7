"""A run goes on where nobody reads its output any more, and a command whose output is all that it does says so."""

import os
import subprocess
import sys

import pytest

# The module alone, without the seconds that it takes to import JAX.
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("listening", sys.argv[1])
listening = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listening)
with listening.listened_or_not():
    for step in range(20_000):
        print("step", step, "café" if step else "\\udcff \\u2192", flush=step < 5)
    open(sys.argv[2], "w").write("saved")
"""


def run(tmp_path, encoding="utf-8"):
    from liger_jax.training import listening

    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", listening.__file__, tmp_path / "done"]
    environment = {"PYTHONIOENCODING": encoding}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_a_pipe_that_is_closed_after_one_line_ends_nothing(tmp_path):
    with run(tmp_path) as process:
        assert process.stdout.readline().startswith(b"step 0")
        process.stdout.close()
        assert process.wait() == 0 and process.stderr.read() == b""
    assert (tmp_path / "done").read_text() == "saved"


def test_characters_that_the_terminal_does_not_know_are_written_in_another_way(tmp_path):
    with run(tmp_path, "ascii") as process:
        printed, errors = process.communicate()
    assert process.returncode == 0 and errors == b""
    assert printed.startswith(b"step 0 \\udcff \\u2192\nstep 1 caf\\xe9\n")


NEEDED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("listening", sys.argv[1])
listening = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listening)
try:
    with listening.output_needed():
        print("step 1", flush=len(sys.argv) > 2)
        print("note", file=sys.stderr)
except listening.OutputError as error:
    print(error, error.is_unread, file=sys.stderr)
    sys.exit(3)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is full")
@pytest.mark.parametrize("when", [(), ("flush",)], ids=["at the end", "at once"])
def test_what_is_needed_and_cannot_be_written_is_an_error(tmp_path, when):
    from liger_jax.training import listening

    (tmp_path / "program.py").write_text(NEEDED)
    command = [sys.executable, tmp_path / "program.py", listening.__file__, *when]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={})
        assert done.returncode == 3
        said = "The standard output cannot be written: No space left on device. False\n"
        assert done.stderr == ("" if when else "note\n") + said
        assert subprocess.run(command, stderr=full, stdout=subprocess.DEVNULL).returncode == 0  # notes are dropped
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 0 and closed.stderr == "note\n"
