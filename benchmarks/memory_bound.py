"""Norms and gated linear units against the speed of a copy and against their peers, on one NVIDIA GPU.

    python -m benchmarks.memory_bound [--ops rms_norm swiglu] [--shapes 4096 …] [--peers Liger QuACK] [--name norms]

How it is measured: `benchmarks/_copy_speed.py`. Widths of norms are those of models from Qwen2-0.5B to Gemma's and
DeepSeek's largest; those of gated units are the feed-forward widths of Qwen2-0.5B, Llama-3.2-1B, Llama-3-8B and
Qwen2.5-7B. "side by side" has gate and up in one array of twice the width.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._copy_speed import Case, main
from liger_jax import fused_add_rms_norm, geglu, layer_norm, rms_norm, swiglu

WIDTHS = (896, 2048, 2304, 3584, 4096, 5120, 8192, 18432)
GATED_WIDTHS = (4864, 8192, 14336, 18944)
ROWS = (16384, 2048)
EPS = 1e-6
# Parameters come behind the first rows; what has no gradient of its own stands last: x's is the residual's.
NORMS: dict[str, tuple[Callable[..., Any], int, int]] = {  # the op, how many parameters, and arrays of rows
    "rms_norm": (rms_norm, 1, 1),
    "layer_norm": (layer_norm, 2, 1),
    "fused_add_rms_norm": (
        lambda residual, scale, x, **options: fused_add_rms_norm(x, residual, scale, **options),
        1,
        2,
    ),
}
GATED = {"swiglu": swiglu, "geglu": geglu, "swiglu, side by side": swiglu}
LIGER = {
    "rms_norm": ("rms_norm", "LigerRMSNormFunction"),
    "layer_norm": ("layer_norm", "LigerLayerNormFunction"),
    "fused_add_rms_norm": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
    "swiglu": ("swiglu", "LigerSiLUMulFunction"),
    "geglu": ("geglu", "LigerGELUMulFunction"),
    "swiglu, side by side": ("swiglu", "LigerFusedGateUpSiLUMulFunction"),
}


def normal_arrays(shapes: Sequence[tuple[int, ...]], key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def torch_op(op, compiled):
    """The op as a user of torch would write it."""
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    rms = lambda x, scale: functional.rms_norm(x, scale.shape, scale, EPS)
    activation = functools.partial(functional.gelu, approximate="tanh") if op == "geglu" else functional.silu

    def fused(residual, scale, x):
        added = x + residual
        return rms(added, scale), added

    def gated(gate, up=None):
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return activation(gate) * up

    layer = lambda x, scale, bias: functional.layer_norm(x, scale.shape, scale, bias, EPS)
    function = {"rms_norm": rms, "layer_norm": layer, "fused_add_rms_norm": fused}.get(op, gated)
    if not compiled:
        return function
    torch.compiler.reset()  # after 8 shapes it would run eagerly
    return torch.compile(function, dynamic=False)


def liger(op):
    """Liger's Triton kernels; norms not in place, because the cotangents are used again."""
    module, name = LIGER[op]
    run = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
    if op == "layer_norm":
        return lambda x, scale, bias: run(x, scale, bias, EPS)
    if op == "rms_norm":
        return lambda x, scale: run(x, scale, EPS, 0.0, "llama", False)
    if op == "fused_add_rms_norm":
        return lambda residual, scale, x: run(x, residual, scale, EPS, 0.0, "llama", False)
    return run


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


def norm_case(op, rows, width):
    function, num_parameters, num_matrices = NORMS[op]
    peers = {"Liger": liger, "Liger, CuTe": liger_cute, "QuACK": quack}
    peers |= {"torch.compile": functools.partial(torch_op, compiled=True)}
    peers |= {"torch": functools.partial(torch_op, compiled=False)}
    run = functools.partial(function, eps=EPS)
    return Case(
        op=op,
        shape=f"{rows} × {width}",
        make=functools.partial(
            normal_arrays, [(rows, width), *[(width,)] * num_parameters, *[(rows, width)] * (num_matrices - 1)]
        ),
        ours={"default": run, "xla": functools.partial(run, implementation="xla")},
        peers={who: functools.partial(peer, op) for who, peer in peers.items()},
        num_differentiated=1 + num_parameters,
        saved=(0, 1),  # of a sum as many bytes as of one array
    )


def gated_case(op, rows, width):
    shapes = [(rows, 2 * width)] if "side by side" in op else [(rows, width)] * 2
    return Case(
        op=op,
        shape=f"{rows} × {width}",
        make=functools.partial(normal_arrays, shapes),
        ours={name: functools.partial(GATED[op], implementation=name) for name in ("xla", "triton")},
        peers={"Liger": functools.partial(liger, op), "torch.compile": functools.partial(torch_op, op, True)},
        num_differentiated=len(shapes),
        saved=tuple(range(len(shapes))),
    )


def cases() -> Iterator[Case]:
    for op, rows, width in itertools.product(NORMS, ROWS, WIDTHS):
        yield norm_case(op, rows, width)
    for op, rows, width in itertools.product(GATED, ROWS, GATED_WIDTHS):
        if rows == ROWS[0] or "side by side" not in op:
            yield gated_case(op, rows, width)


if __name__ == "__main__":
    main("memory_bound", lambda: list(cases()))
