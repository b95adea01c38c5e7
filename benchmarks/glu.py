"""Gated linear units against the speed of a copy and against their peers, on one NVIDIA GPU.

    python -m benchmarks.glu [--ops swiglu geglu] [--shapes 8192 …] [--peers Liger torch.compile]

How it is measured: `benchmarks/_copy_speed.py`. Widths are the feed-forward widths of Qwen2-0.5B, Llama-3.2-1B,
Llama-3-8B and Qwen2.5-7B; "side by side" has gate and up in one array of twice the width.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks._copy_speed import Case, main
from liger_jax import geglu, swiglu

WIDTHS = (4864, 8192, 14336, 18944)
ROWS = (16384, 2048)
OPS = {"swiglu": swiglu, "geglu": geglu}
LIGER = {
    "swiglu": ("swiglu", "LigerSiLUMulFunction"),
    "geglu": ("geglu", "LigerGELUMulFunction"),
    "swiglu, side by side": ("swiglu", "LigerFusedGateUpSiLUMulFunction"),
}


def make_gates(shapes, key):
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def liger(op):
    module, function = LIGER[op]
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def torch_compiled(op):
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    torch.compiler.reset()  # after 8 shapes it would run eagerly
    activation = functools.partial(functional.gelu, approximate="tanh") if op == "geglu" else functional.silu

    def gated(gate, up=None):
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        return activation(gate) * up

    return torch.compile(gated, dynamic=False)


def case(op, function, rows, width, shapes):
    return Case(
        op=op,
        shape=f"{rows} × {width}",
        make=functools.partial(make_gates, shapes),
        ours={name: functools.partial(function, implementation=name) for name in ("xla", "triton")},
        peers={"Liger": functools.partial(liger, op), "torch.compile": functools.partial(torch_compiled, op)},
        num_differentiated=len(shapes),
        saved=tuple(range(len(shapes))),
    )


def cases() -> Iterator[Case]:
    for op, rows, width in itertools.product(OPS, ROWS, WIDTHS):
        yield case(op, OPS[op], rows, width, [(rows, width)] * 2)
    for width in WIDTHS:
        yield case("swiglu, side by side", swiglu, ROWS[0], width, [(ROWS[0], 2 * width)])


if __name__ == "__main__":
    main("glu", lambda: list(cases()))
