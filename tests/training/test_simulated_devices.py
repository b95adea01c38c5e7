"""Programs on the devices that a CPU simulates do not wait for each other."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax
{count}
import liger_jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
x = jax.device_put(np.ones((512, 8), np.float32), split)
gathered = lambda x: jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, whole) * 2, split)
program = jax.jit(lambda x: gathered(jax.numpy.sin(gathered(x)))).lower(x).compile()

def rounds():
    for _ in range(40):
        jax.block_until_ready([program(x) for _ in range(20)])

threads = [threading.Thread(target=rounds) for _ in range(2)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


@pytest.mark.parametrize(
    ["flag", "count"],
    [("--xla_force_host_platform_device_count=2", ""), ("", "jax.config.update('jax_num_cpu_devices', 2)")],
    ids=["flag", "setting"],
)
def test_programs_of_two_threads_on_two_cores_end(flag, count):
    environment = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC")}
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"{flag} --xla_cpu_collective_call_terminate_timeout_seconds=20"
    command = [sys.executable, "-c", PROGRAM.format(count=count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
