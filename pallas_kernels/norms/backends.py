"""A norm on a backend: the formulas of a norm's file, run by one of the four runners."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from liger_jax.pallas_kernels.norms import run_mosaic_gpu, run_mosaic_tpu, run_triton, run_xla

RUNNERS = {"xla": run_xla, "triton": run_triton, "mosaic_gpu": run_mosaic_gpu, "mosaic_tpu": run_mosaic_tpu}


class Backend(NamedTuple):
    """The functions of a norm, as a backend runs them."""

    unsupported: Callable[..., str | None] | None  # XLA runs every case
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def backends(norm: ModuleType, *names: str) -> dict[str, Backend]:
    """`norm.forward` and `norm.backward` by the names of the backends that run them."""
    return {
        name: Backend(
            getattr(RUNNERS[name], "unsupported", None),
            forward=functools.partial(norm.forward, run=RUNNERS[name].run),
            backward=functools.partial(norm.backward, run=RUNNERS[name].run),
        )
        for name in names
    }
