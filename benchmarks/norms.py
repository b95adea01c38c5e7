"""Normalisations against the speed of a copy and against their peers, on one NVIDIA GPU.

    python -m benchmarks.norms [--ops rms_norm layer_norm] [--shapes 4096 …] [--peers Liger QuACK]

How it is measured: `benchmarks/_copy_speed.py`. Widths are those of models from Qwen2-0.5B to Gemma's and DeepSeek's
largest.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._copy_speed import Case, main
from liger_jax import fused_add_rms_norm, layer_norm, rms_norm

WIDTHS = (896, 2048, 2304, 3584, 4096, 5120, 8192, 18432)
ROWS = (16384, 2048)
EPS = 1e-6
# Parameters come behind the first rows; what has no gradient of its own stands last: x's is the residual's.
OPS: dict[str, tuple[Callable[..., Any], int, int]] = {  # by name: the op, how many parameters, and arrays of rows
    "rms_norm": (rms_norm, 1, 1),
    "layer_norm": (layer_norm, 2, 1),
    "fused_add_rms_norm": (
        lambda residual, scale, x, **options: fused_add_rms_norm(x, residual, scale, **options),
        1,
        2,
    ),
}


def make_arrays(rows, width, num_parameters, num_matrices, key):
    shapes = [(rows, width), *[(width,)] * num_parameters, *[(rows, width)] * (num_matrices - 1)]
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def torch_op(op, compiled):
    """The op as a user of torch would write it."""
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    rms = lambda x, scale: functional.rms_norm(x, scale.shape, scale, EPS)

    def fused(residual, scale, x):
        added = x + residual
        return rms(added, scale), added

    layer = lambda x, scale, bias: functional.layer_norm(x, scale.shape, scale, bias, EPS)
    function = {"rms_norm": rms, "layer_norm": layer, "fused_add_rms_norm": fused}[op]
    if not compiled:
        return function
    torch.compiler.reset()  # after 8 shapes it would run eagerly
    return torch.compile(function, dynamic=False)


def liger(op):
    """Liger's Triton kernels, not in place, because the cotangents are used again."""
    function = lambda name: getattr(importlib.import_module(f"liger_kernel.ops.{op}"), name).apply
    if op == "layer_norm":
        run = function("LigerLayerNormFunction")
        return lambda x, scale, bias: run(x, scale, bias, EPS)
    if op == "rms_norm":
        run = function("LigerRMSNormFunction")
        return lambda x, scale: run(x, scale, EPS, 0.0, "llama", False)
    run = function("LigerFusedAddRMSNormFunction")
    return lambda residual, scale, x: run(x, residual, scale, EPS, 0.0, "llama", False)


def liger_cute(op):
    """Liger's kernels in CUTLASS's language."""
    run = getattr(importlib.import_module(f"liger_kernel.ops.backends._cutedsl.{op}"), f"{op}_cutedsl")
    if op == "fused_add_rms_norm":
        return lambda residual, scale, x: run(x, residual, scale, EPS)
    return lambda *arrays: run(*arrays, EPS)


def quack(op):
    rmsnorm = importlib.import_module("quack").rmsnorm
    if op == "rms_norm":
        return lambda x, scale: rmsnorm(x, scale, eps=EPS)
    if op == "fused_add_rms_norm":
        return lambda residual, scale, x: rmsnorm(x, scale, residual=residual, eps=EPS, prenorm=True)
    raise NotImplementedError(f"QuACK has no {op} with these parameters and their gradients")


def case(op, rows, width):
    function, num_parameters, num_matrices = OPS[op]
    peers = {
        "Liger": functools.partial(liger, op),
        "Liger, CuTe": functools.partial(liger_cute, op),
        "QuACK": functools.partial(quack, op),
        "torch.compile": functools.partial(torch_op, op, True),
        "torch": functools.partial(torch_op, op, False),
    }
    return Case(
        op=op,
        shape=f"{rows} × {width}",
        make=functools.partial(make_arrays, rows, width, num_parameters, num_matrices),
        ours={
            "default": functools.partial(function, eps=EPS),
            "xla": functools.partial(function, eps=EPS, implementation="xla"),
        },
        peers=peers,
        num_differentiated=1 + num_parameters,
        saved=(0, 1),  # of a sum as many bytes as of one array
    )


def cases() -> Iterator[Case]:
    for op, rows, width in itertools.product(OPS, ROWS, WIDTHS):
        yield case(op, rows, width)


if __name__ == "__main__":
    main("norms", lambda: list(cases()))
