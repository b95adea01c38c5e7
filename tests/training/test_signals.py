"""The first signal ends a run after its step, the second one at once."""

import signal
import subprocess
import sys
import time

import pytest

from liger_jax.training import signals

# The module alone, without the seconds that it takes to import JAX. The work is one long call in C, as a step is.
PROGRAM = """
import contextlib, hashlib, importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("signals", sys.argv[1])
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)

def work():
    print("begun", flush=True)
    if sys.argv[3] == "in C":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    while True:
        time.sleep(0.01)

with signals.ending_now(os._exit, "stopped") if sys.argv[2] == "process" else contextlib.nullcontext():
    if sys.argv[4] == "outside":
        work()
    with signals.listed():
        work()
"""


@pytest.fixture
def started():
    running = []

    def start(*arguments):
        command = [sys.executable, "-c", PROGRAM, signals.__file__, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "begun\n", process.communicate()[1]
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("at", ["in C", "in Python"])
def test_a_second_signal_ends_a_command_whatever_it_is_at(started, at):
    process = started("process", at, "within")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline() == "SIGINT: ends after this step; again to end now\n"
    process.send_signal(signal.SIGTERM)  # so soon it is the same one, which a launcher sends on
    time.sleep(signals.SAME_SECONDS + 0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[1] == "" and process.returncode == 128 + signal.SIGTERM


def test_a_signal_outside_of_the_steps_ends_a_command(started):
    process = started("process", "in C", "outside")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "stopped\n" and process.returncode == 130


def test_a_second_signal_interrupts_a_program(started):
    process = started("program", "in Python", "within")
    process.send_signal(signal.SIGINT)
    time.sleep(signals.SAME_SECONDS + 0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1].endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT
