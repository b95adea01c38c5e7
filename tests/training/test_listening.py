"""A run goes on where nobody reads its output any more."""

import subprocess
import sys

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
