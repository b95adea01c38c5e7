"""Cases of attention, and of the rotary embedding."""

import jax.numpy as jnp
import numpy as np

from liger_jax import ops
from tests.fuzz.case import Case, Draw, options_text
from tests.ops.references import attention as reference
from tests.ops.references import plain

HEAD_WIDTHS = (1, 2, 7, 8, 13, 16, 24)
LARGE_HEAD_WIDTHS = (8, 13, 32, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256)

MOST_PRODUCTS = 4e8  # of scores, which float64 makes in seconds


def _heads(draw: Draw):
    """The shapes of queries and keys."""
    kv_heads, shared = draw.size(3, 4), draw.size(3, 8)
    width = draw.pick(*(LARGE_HEAD_WIDTHS if draw.large else HEAD_WIDTHS))
    batch, length = draw.pick(1, 1, 2, 3, 0), draw.size(40, 600)
    if batch * kv_heads * shared * length**2 * width > MOST_PRODUCTS:
        batch, shared = 1, 1
    return (batch, length, kv_heads * shared, width), (batch, length, kv_heads, width)


def segments(draw: Draw, batch: int, length: int):
    """Ids of documents after one another, and perhaps padding; now and then an id comes back after another one."""
    ids = np.cumsum(draw.rng.uniform(size=(batch, length)) < draw.pick(0.02, 0.2), axis=1)
    ids = 1 + (ids % 3 if draw.chance(0.2) else ids)
    return jnp.asarray(ids * tokens(draw, batch, length) if draw.chance(0.5) else ids, jnp.int32)


def tokens(draw: Draw, batch: int, length: int):
    """1 where rows hold a token and 0 at padding after them; some rows are empty."""
    lengths = draw.rng.integers(0, length + 1, (batch, 1)) * (draw.rng.uniform(size=(batch, 1)) < 0.8)
    return (np.arange(length)[None] < lengths).astype(np.int32)


def causal_attention(draw: Draw) -> Case:
    queries, keys = _heads(draw)
    dtype, packed, as_segments = draw.dtype(), draw.chance(0.4), draw.chance(0.3)
    length = queries[1]
    options = draw.optional(window=(1, draw.size(length), length, length + 3)) if draw.chance(0.5) else {}
    options |= draw.optional(softcap=(0.5, 20.0), scale=(1.0, 0.1, 0.0, -0.3)) if draw.chance(0.3) else {}
    refused = None
    if draw.chance(0.03):
        refused = draw.pick("window", "softcap")
        options[refused] = draw.pick(0, -1)

    def inputs(draw):
        arrays = {
            name: draw.normal(shape, dtype, draw.magnitude() if name == "v" else 1.0)
            for name, shape in dict(q=queries, k=keys, v=keys).items()
        }
        return arrays, {"segment_ids": segments(draw, *queries[:2])} if packed else {}

    def ours(q, k, v, segment_ids=None):
        ids = ops.Segments.of(segment_ids) if as_segments and segment_ids is not None else segment_ids
        return ops.causal_attention(q, k, v, ids, **options)

    truth = lambda q, k, v, segment_ids=None: reference.causal_attention(q, k, v, segment_ids, **options)
    says = options_text(options) + " as Segments" * (as_segments and packed)
    return Case("causal_attention", ours, truth, inputs, says, has_products=True, refuses=refused, depth=2)


def _rotated(draw: Draw, name: str, tables: tuple[int, ...], options, formula) -> Case:
    queries, keys = _heads(draw)
    half = draw.size(queries[3] // 2) if queries[3] > 1 else 0
    dtype, key_dtype, table_dtype = draw.dtype(), None, draw.pick(jnp.float32, jnp.float32, jnp.bfloat16)
    key_dtype = draw.like(dtype)
    table = (*tables, draw.pick(1, queries[0]), queries[1], 2 * half)
    if tables:
        first = draw.rng.integers(0, half + 1)
        second = draw.rng.integers(0, half - first + 1)
        options = {**options, "sections": (int(first), int(second), int(half - first - second))}

    def inputs(draw):
        angles = draw.rng.uniform(0, 6.3, (*table[:-1], half))
        angles = np.concatenate([angles, angles], axis=-1)
        constants = {"cos": jnp.asarray(np.cos(angles), table_dtype), "sin": jnp.asarray(np.sin(angles), table_dtype)}
        return {"q": draw.normal(queries, dtype), "k": draw.normal(keys, key_dtype, draw.magnitude())}, constants

    return Case(
        name,
        lambda q, k, cos, sin: getattr(ops, name)(q, k, cos, sin, **options),
        lambda q, k, cos, sin: formula(q, k, cos, sin, **options),
        inputs,
        options_text(options),
    )


def apply_rope(draw: Draw) -> Case:
    return _rotated(draw, "apply_rope", (), draw.optional(layout=("half", "interleaved")), plain.apply_rope)


def apply_mrope(draw: Draw) -> Case:
    return _rotated(draw, "apply_mrope", (3,), draw.optional(layout=("half", "interleaved")), plain.apply_mrope)


def gated_delta_rule(draw: Draw) -> Case:
    kv_heads, shared, width, value_width = draw.size(3), draw.size(3), draw.size(16, 128), draw.size(16, 128)
    batch, length, dtype = draw.pick(1, 1, 2, 0), draw.size(150, 1500), draw.dtype()
    heads, packed, with_state = kv_heads * shared, draw.chance(0.5), draw.chance(0.5)
    largest_gate = draw.pick(0.01, 1.0, 30.0)

    def inputs(draw):
        def unit(shape):
            x = draw.rng.standard_normal(shape)
            return jnp.asarray(x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True)), dtype)

        arrays = {name: unit((batch, length, kv_heads, width)) for name in "qk"}
        arrays["v"] = draw.normal((batch, length, heads, value_width), dtype, draw.magnitude())
        arrays["gate"] = jnp.asarray(-largest_gate * draw.rng.uniform(size=(batch, length, heads)) ** 4, jnp.float32)
        arrays["beta"] = jnp.asarray(draw.rng.uniform(size=(batch, length, heads)), jnp.float32)
        if with_state:
            arrays["state"] = draw.normal((batch, heads, width, value_width), jnp.float32, 1.0)
        return arrays, {"segment_ids": segments(draw, batch, length)} if packed else {}

    return Case("gated_delta_rule", ops.gated_delta_rule, plain.gated_delta_rule, inputs, has_products=True, depth=4)


def causal_conv1d(draw: Draw) -> Case:
    batch, length, width, taps = draw.pick(1, 2, 0), draw.size(60, 600), draw.size(20, 300), draw.size(6)
    dtype, weight_dtype, packed, extras = draw.dtype(), draw.dtype(), draw.chance(0.5), draw.chance(0.5)

    def inputs(draw):
        arrays = {
            "x": draw.normal((batch, length, width), dtype, 1.0),
            "weight": draw.normal((width, taps), weight_dtype),
        }
        if extras:
            arrays |= {
                "bias": draw.normal((width,), weight_dtype),
                "state": draw.normal((batch, taps - 1, width), dtype, 1.0),
            }
        return arrays, {"segment_ids": segments(draw, batch, length)} if packed else {}

    return Case("causal_conv1d", ops.causal_conv1d, plain.causal_conv1d, inputs)
