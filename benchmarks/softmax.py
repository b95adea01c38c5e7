"""Softmax and sparsemax against the speed of a copy and against their peers, on one NVIDIA GPU.

    python -m benchmarks.softmax [--ops softmax sparsemax] [--shapes 4096 …] [--peers Liger torch.compile]

How it is measured: `benchmarks/_copy_speed.py`.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks._copy_speed import Case, main
from liger_jax import softmax, sparsemax

ROWS = 16384
WIDTHS = (1000, 4096, 8192, 32768)
OPS = {"softmax": softmax, "sparsemax": sparsemax}


def make_scores(rows, width, key):
    return (jax.random.normal(key, (rows, width), jnp.bfloat16),)


def liger(op):
    if op == "softmax":
        return importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply
    apply = importlib.import_module("liger_kernel.ops.sparsemax").LigerSparsemaxFunction.apply
    return lambda x: apply(x, -1)


def torch_compiled():
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 shapes it would run eagerly
    return torch.compile(lambda x: torch.nn.functional.softmax(x, dim=-1), dynamic=False)


def cases() -> Iterator[Case]:
    for op, width in itertools.product(OPS, WIDTHS):
        yield Case(
            op=op,
            shape=f"{ROWS} × {width}",
            make=functools.partial(make_scores, ROWS, width),
            ours={"xla": OPS[op]},
            peers={"Liger": functools.partial(liger, op)}
            | ({"torch.compile": torch_compiled} if op == "softmax" else {}),
            num_differentiated=1,
            saved=(0,),  # the output, of the same size
        )


if __name__ == "__main__":
    main("softmax", lambda: list(cases()))
