"""Gated linear units against the speed of a copy and against their peers, on one NVIDIA GPU.

    python -m benchmarks.glu [--ops swiglu geglu] [--shapes 8192 …] [--peers Liger torch.compile]

How it is measured: `benchmarks/_bandwidth.py`. Widths are the feed-forward widths of Qwen2-0.5B, Llama-3.2-1B,
Llama-3-8B and Qwen2.5-7B.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from benchmarks._bandwidth import Case, main
from liger_jax import geglu, swiglu

WIDTHS = (4864, 8192, 14336, 18944)
ROWS = (16384, 2048)
OPS = {"swiglu": swiglu, "geglu": geglu}


def make_gates(rows, width, key):
    return tuple(jax.random.normal(each, (rows, width), jnp.bfloat16) for each in jax.random.split(key))


def liger(op):
    module, function = {"swiglu": ("swiglu", "LigerSiLUMulFunction"), "geglu": ("geglu", "LigerGELUMulFunction")}[op]
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def torch_compiled(op):
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    torch.compiler.reset()  # after 8 shapes it would run eagerly
    activation = {"swiglu": functional.silu, "geglu": functools.partial(functional.gelu, approximate="tanh")}[op]
    return torch.compile(lambda gate, up: activation(gate) * up, dynamic=False)


def cases():
    for op, function in OPS.items():
        for rows in ROWS:
            for width in WIDTHS:
                yield Case(
                    op=op,
                    shape=f"{rows} × {width}",
                    make=functools.partial(make_gates, rows, width),
                    ours={name: functools.partial(function, implementation=name) for name in ("xla", "triton")},
                    peers={
                        "Liger": functools.partial(liger, op),
                        "torch.compile": functools.partial(torch_compiled, op),
                    },
                    num_differentiated=2,
                    saved=(0, 1),
                )


if __name__ == "__main__":
    main("glu", lambda: list(cases()))
