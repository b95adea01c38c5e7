"""Threads for the devices that JAX simulates on a CPU."""

import os
import re

import jax

_THREADS = 64  # those of the test suite's four devices


def threads_given() -> None:
    """Asks XLA for more threads than the cores where several devices are simulated; it reads this at its start.

    Each device needs a thread in each program under way. Programs that begin together could otherwise take all of them
    with devices that wait for each other forever.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = getattr(jax.config, "jax_num_cpu_devices", -1)
    count = max(count, *map(int, asked), 1)
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(_THREADS, 16 * count)))


threads_given()
