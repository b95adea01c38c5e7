"""The rotary embedding against the speed of a copy and against its peers, on one NVIDIA GPU.

    python -m benchmarks.rope [--shapes 32/8 …] [--peers Liger torch.compile]

How it is measured: `benchmarks/_copy_speed.py`. A shape is query heads / key heads × width, at 8 sequences of 2,048:
14/2 × 64 is Qwen2-0.5B's, 32/8 × 64 Llama-3.2-1B's, 32/8 × 128 Llama-3-8B's, 64/8 × 128 Llama-3-70B's. All sequences
share one table. The last two rows are GLM's pairs, and Qwen2-VL's three tables for each sequence.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks._copy_speed import Case, main
from liger_jax import apply_mrope, apply_rope, rope_table

BATCH, LENGTH = 8, 2048
HEADS = ((14, 2), (32, 8), (64, 8))
WIDTHS = (64, 128)
IMPLEMENTATIONS = ("xla", "triton")


def make_arrays(q_heads, k_heads, width, tables, key):
    """q, k, cos and sin; tables: one, or three for each sequence."""
    keys = jax.random.split(key)
    q = jax.random.normal(keys[0], (BATCH, LENGTH, q_heads, width), jnp.bfloat16)
    k = jax.random.normal(keys[1], (BATCH, LENGTH, k_heads, width), jnp.bfloat16)
    shape = (1, LENGTH) if tables == 1 else (3, BATCH, LENGTH)
    return q, k, *rope_table(jnp.broadcast_to(jnp.arange(LENGTH), shape), width, theta=500000.0)


def liger(module, function, *options):
    """Liger's op takes and returns (B, heads, T, H); it recognises such views of our layout."""
    apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply

    def rope(q, k, cos, sin):
        q, k = apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, *options)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rope


def torch_compiled():
    """Hugging Face's expression in our layout, with the products in the tables' float32."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 shapes it would run eagerly

    def rotated(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    def rope(q, k, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    return torch.compile(rope, dynamic=False)


def cases() -> Iterator[Case]:
    for (q_heads, k_heads), width in itertools.product(HEADS, WIDTHS):
        yield Case(
            op="apply_rope",
            shape=f"{q_heads}/{k_heads} × {width}",
            make=functools.partial(make_arrays, q_heads, k_heads, width, 1),
            ours={name: functools.partial(apply_rope, implementation=name) for name in IMPLEMENTATIONS},
            peers={"Liger": functools.partial(liger, "rope", "LigerRopeFunction"), "torch.compile": torch_compiled},
            num_differentiated=2,
            saved=(2, 3),
        )
    yield Case(
        op="apply_rope, interleaved",
        shape="32/8 × 128",
        make=functools.partial(make_arrays, 32, 8, 128, 1),
        ours={"xla": functools.partial(apply_rope, layout="interleaved", implementation="xla")},
        peers={},
        num_differentiated=2,
        saved=(2, 3),
    )
    sections = (16, 24, 24)
    yield Case(
        op="apply_mrope",
        shape="28/4 × 128",
        make=functools.partial(make_arrays, 28, 4, 128, 3),
        ours={name: functools.partial(apply_mrope, sections=sections, implementation=name) for name in IMPLEMENTATIONS},
        peers={"Liger": functools.partial(liger, "qwen2vl_mrope", "LigerQwen2VLMRopeFunction", sections)},
        num_differentiated=2,
        saved=(2, 3),
        unread_bytes=2 * 2 * BATCH * LENGTH * 128 * 4,  # two of three tables, of float32 cosines and sines
    )


if __name__ == "__main__":
    main("rope", lambda: list(cases()))
