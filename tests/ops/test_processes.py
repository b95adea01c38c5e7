"""Several processes of one program plan one loss, whatever memory each of them has."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src import distributed

from liger_jax import fused_linear_cross_entropy
from liger_jax.ops import place

MIB = 2**20
# The modes are "lean" and "fast".
LITTLE, MUCH = 40 * MIB, 8192 * MIB
PROGRAM = """
import sys
import jax
from liger_jax.ops import place
from tests.ops import test_processes
address, process, *memory = sys.argv[1:]
jax.distributed.initialize(address, len(memory), int(process))
place._memory_here = lambda kind: int(memory[int(process)])
sys.stdout.write(test_processes.program())
"""


def program(**options):
    """The text of a loss with both gradients, which says its mode and its chunk."""
    types = ((2048, 64), jnp.float32), ((8192, 64), jnp.float32), ((2048,), jnp.int32)
    loss = lambda *arrays: fused_linear_cross_entropy(*arrays, precision="highest", **options)
    return jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*each) for each in types)).as_text()


def alone(monkeypatch, memory, **options):
    monkeypatch.setattr(place, "_memory_here", lambda kind: memory)
    return program(**options)


@pytest.fixture
def told(monkeypatch):
    """What another process than this one, the first of two, has told; and what this one did."""
    told = {}
    jax.devices()  # the backend is there before its client is replaced

    def get(key, milliseconds):
        if key not in told:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return told[key]

    client = SimpleNamespace(
        key_value_set=lambda key, value, overwrites: told.update({key: value}), blocking_key_value_get=get
    )
    monkeypatch.setattr(distributed.global_state, "client", client)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    place._least_memory.cache_clear()
    yield told
    place._least_memory.cache_clear()


def test_a_loss_is_planned_by_the_least_memory_of_all_processes(monkeypatch, told):
    kind = jax.devices()[0].device_kind
    other = f"liger_jax/bytes_limit/{kind}/1"
    with monkeypatch.context() as one_process:
        one_process.setattr(jax, "process_count", lambda: 1)
        little, much = (alone(monkeypatch, memory) for memory in (LITTLE, MUCH))
    assert little != much and not told
    told[other] = str(LITTLE)
    assert alone(monkeypatch, MUCH) == little
    place._least_memory.cache_clear()
    told[other] = str(MUCH)
    assert alone(monkeypatch, LITTLE) == little
    assert told[f"liger_jax/bytes_limit/{kind}/0"] == str(LITTLE)


def test_a_process_that_tells_nothing_is_named_and_a_budget_asks_for_nothing(monkeypatch, told):
    with pytest.raises(
        ValueError, match="all 2 processes, and process 1 has not reported its own in 300 seconds. Trace"
    ):
        alone(monkeypatch, MUCH)
    told.clear()
    for options in (dict(mode="lean"), dict(memory_budget_bytes=64 * MIB)):
        alone(monkeypatch, MUCH, **options)
    assert not told


@pytest.mark.full
def test_two_processes_with_different_limits_lower_the_same_program(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = lambda process: [sys.executable, "-c", PROGRAM, address, str(process), str(MUCH), str(LITTLE)]
    running = [subprocess.Popen(command(process), stdout=subprocess.PIPE, text=True) for process in range(2)]
    one, other = (process.communicate(timeout=120)[0] for process in running)
    assert one == other == alone(monkeypatch, LITTLE) != alone(monkeypatch, MUCH)
