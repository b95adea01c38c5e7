"""Processes of one run end together, whichever of them dies, and however they were joined."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import pytest

from liger_jax.training import processes

PROGRAM = """
import sys, time
import jax
from liger_jax.training import processes
processes.begin(sys.argv[1])
print("joined", flush=True)
if sys.argv[2] == "same":
    for values in ({"steps": 2, "seed": 0}, {"steps": 2, "seed": jax.process_index()}):
        try:
            processes.check_same("options", values)
        except ValueError as error:
            print(error, flush=True)
            processes.leave(2)
if sys.argv[2] == "leaves" and jax.process_index() == int(sys.argv[3]):
    try:
        processes.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        processes.end(130, in_order=False)
if sys.argv[2] == "ends":
    sys.exit(processes.end(int(sys.argv[3])))
time.sleep(300)
"""


@pytest.fixture
def started():
    """A function that starts the processes of a run, and returns them once they have joined."""
    running = []

    def start(number, does=("waits",), by_environment=False):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        path = os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)
        own = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=path)
        for i in range(number):
            of_slurm = dict(SLURM_JOB_ID="1", SLURM_STEP_NODELIST="127.0.0.1", SLURM_NTASKS=str(number))
            of_slurm |= dict(SLURM_PROCID=str(i), SLURM_LOCALID=str(i), JAX_COORDINATOR_PORT=str(port))
            place = "" if by_environment else f"127.0.0.1:{port},{i}/{number}"
            command = [sys.executable, "-c", PROGRAM, place, *does]
            environment = own | (of_slurm if by_environment else {})
            pipes: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running.append(subprocess.Popen(command, env=environment, **pipes))
        for process in running:
            assert process.stdout.readline() == "joined\n", process.communicate()[1]
        return running

    yield start
    for process in running:
        process.kill()
        process.communicate()


def lost(process, victim, number):
    """How a process has lost another one, and after how many seconds it has ended."""
    begun = time.monotonic()
    _, error = process.communicate(timeout=100)
    assert process.returncode == 2, error
    assert "stack trace" not in error and "Start all of them again" in error, error
    return error.split(f"Process {victim} of {number} ")[1].split(",")[0], time.monotonic() - begun


@pytest.mark.full
@pytest.mark.parametrize("by_environment", [False, True])
def test_the_first_process_s_death_ends_the_others_at_once(by_environment, started):
    first, *others = started(3, by_environment=by_environment)
    first.send_signal(signal.SIGKILL)
    for other in others:
        how, seconds = lost(other, 0, 3)
        assert how == "has ended" and seconds < 20


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stands_still_is_lost_after_half_a_minute(victim, started):
    both = started(2)
    both[victim].send_signal(signal.SIGSTOP)
    how, seconds = lost(both[1 - victim], victim, 2)
    assert how == f"has not been heard of for {processes.SILENT_SECONDS:.0f} seconds" and 25 < seconds < 60


@pytest.mark.full
@pytest.mark.parametrize("code", [0, 143])
def test_processes_that_end_in_order_lose_nobody(code, started):
    for process in started(3, ("ends", str(code))):
        _, error = process.communicate(timeout=100)
        assert process.returncode == code and "Start all" not in error and "stack trace" not in error, error


@pytest.mark.full
def test_values_that_differ_are_named_in_all_processes(started):
    said = "Process 1 has different options than process 0: seed=1 for 0. All processes of a run need the same ones.\n"
    for process in started(2, ("same",)):
        printed, error = process.communicate(timeout=100)
        assert (process.returncode, printed) == (2, said), error


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_process_that_waits_for_the_others(victim, started):
    both = started(2, ("leaves", str(victim)))
    time.sleep(1)  # until it waits
    both[victim].send_signal(signal.SIGINT)
    assert both[victim].communicate(timeout=20)[0] == "interrupted\n" and both[victim].returncode == 130
    how, seconds = lost(both[1 - victim], victim, 2)
    assert how == "has ended" and seconds < 20


def test_a_port_at_which_another_program_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        path = os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)
        command = [sys.executable, "-c", PROGRAM, f"{place},0/2", "waits"]
        own = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=path)
        ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
    told = rf"process 0 cannot listen at port {place.partition(':')[2]}: Address already in use\. Pass another port"
    assert ended.returncode == 1 and re.search(told, ended.stderr), ended.stderr


def test_processes_are_joined_once_and_before_there_are_devices():
    jax.devices()
    with pytest.raises(ValueError, match="JAX has initialised its devices.* Call processes.begin first"):
        processes.begin("127.0.0.1:1,0/2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        with pytest.raises(ValueError, match="joined its processes already. Call processes.begin once"):
            processes.begin("127.0.0.1:1,0/2")
