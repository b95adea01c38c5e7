"""Attention to a key-value cache against its formula in float64, row by row and head by head, whichever kernel runs it.

Slots that are not written hold NaN, and so do the other layers, so that a result without NaN has read neither.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.models.core.cache import cached_attention
from liger_jax.ops.decode_attention import decode_attention
from liger_jax.pallas_kernels.attention import triton_decode
from liger_jax.pallas_kernels.attention.config import TRITON_DECODE
from tests.ops._oracle import TOLERANCE, WORSE_THAN_PLAIN, first, largest_error, normal, rms_error

KERNELS = ("xla", "triton")
SHAPES = {  # rows, key heads, query heads for each, width, slots, of which are written
    "groups of 4": (2, 2, 4, 64, 300, 201),
    "one slot": (2, 1, 1, 64, 1, 1),
    "one written": (3, 2, 1, 16, 140, 1),
    "all written": (1, 1, 8, 128, 257, 257),
    "odd width": (2, 1, 3, 80, 130, 65),
    "two blocks": (1, 2, 16, 32, 256, 129),
    "widest": (1, 1, 2, 256, 90, 70),
}
OPTIONS = {
    "all": dict(window=70, softcap=3.0, scale=0.3),
    "plain": {},
    "window": dict(window=9),
    "negative scale": dict(scale=-0.2),
}


def inputs(rng, shape, dtype, has_sinks=False):
    """The arguments of a call whose rows have padding between tokens; the last slot written holds a token."""
    batch, kv_heads, group, width, slots, filled = shape
    of_cache = 2, batch, slots, kv_heads, width
    q, keys, values, sinks = normal(rng, (batch, kv_heads * group, width), of_cache, of_cache, (kv_heads * group,))
    is_token = rng.random((batch, slots)) < 0.8
    is_token[0, : max(0, filled - 2)] = False  # a row of one token or two
    is_token[:, filled - 1] = True
    positions = np.where(is_token, np.cumsum(is_token, axis=1) - 1, -1)
    positions[:, filled:] = -1
    keys, values = (x.at[:, :, filled:].set(jnp.nan).at[0].set(jnp.nan).astype(dtype) for x in (keys, values))
    cache = keys, values, jnp.asarray(positions, jnp.int32), jnp.int32(1), jnp.int32(filled)
    return (q.astype(dtype), *cache), sinks.astype(dtype) if has_sinks else None


def by_formula(q, keys, values, positions, layer, filled, *, window=None, softcap=None, scale=None, sinks=None):
    q, keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, keys[layer], values[layer]))
    positions, out = np.asarray(positions), np.zeros(q.shape)
    for row, head in np.ndindex(*q.shape[:2]):
        own, kv_head = positions[row, filled - 1], head // (q.shape[1] // keys.shape[2])
        is_seen = (positions[row] >= 0) & (positions[row] <= own) & (positions[row] > own - (window or np.inf))
        k, v = keys[row, is_seen, kv_head], values[row, is_seen, kv_head]
        scores = k @ q[row, head] * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        sink = [] if sinks is None else [float(sinks[head])]
        weights = np.exp(scores - max(scores.max(), *sink, -np.inf))
        total = weights.sum() + np.sum(np.exp(np.asarray(sink) - max(scores.max(), *sink, -np.inf)))
        out[row, head] = weights / total @ v
    return out


def run(arrays, **options):
    return jax.jit(functools.partial(decode_attention, **options))(*arrays)


@pytest.mark.parametrize("shape", first(2, list(SHAPES)))
@pytest.mark.parametrize("name", first(1, list(OPTIONS)))
@pytest.mark.parametrize("has_sinks", [False, True])
def test_float32_in_xla_is_the_formula(shape, name, has_sinks, rng):
    arrays, sinks = inputs(rng, SHAPES[shape], jnp.float32, has_sinks)
    with jax.default_matmul_precision("highest"):
        found = run(arrays, **OPTIONS[name], sinks=sinks, implementation="xla")
    assert largest_error(found, by_formula(*arrays, **OPTIONS[name], sinks=sinks)) <= TOLERANCE


def test_float64_in_xla_is_the_formula(rng):
    arrays, sinks = inputs(rng, SHAPES["groups of 4"], jnp.float32, has_sinks=True)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays[:3]]
        found = run((*wide, *arrays[3:]), **OPTIONS["all"], sinks=sinks.astype(jnp.float64), implementation="xla")
    assert found.dtype == jnp.float64
    assert largest_error(found, by_formula(*arrays, **OPTIONS["all"], sinks=sinks)) <= 1e-13


@pytest.mark.parametrize("dtype", first(1, [jnp.bfloat16, jnp.float16]))
@pytest.mark.parametrize("shape", first(2, list(SHAPES)))
@pytest.mark.parametrize("name", first(1, list(OPTIONS)))
def test_half_precision_is_as_near_to_the_formula_as_a_plain_softmax(dtype, shape, name, implementation, rng):
    """With so few rows, several programs share the slots, the last of which may have none."""
    has_sinks = name == "all"
    arrays, sinks = inputs(rng, SHAPES[shape], dtype, has_sinks)
    expected = by_formula(*arrays, **OPTIONS[name], sinks=sinks)
    found = run(arrays, **OPTIONS[name], sinks=sinks, implementation=implementation)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain = plain_softmax(*arrays, **OPTIONS[name], sinks=sinks)
    assert found.dtype == dtype
    by_chance = (
        float(jnp.finfo(dtype).eps) / 2 * rms_error(expected, 0.0)
    )  # of a weight, where one or two keys are seen
    assert rms_error(found, expected) <= max(WORSE_THAN_PLAIN * rms_error(plain, expected), by_chance)


@pytest.mark.parametrize("shape", first(1, list(SHAPES)))
def test_a_program_that_has_all_slots_finds_what_several_find(shape, monkeypatch, platform, rng):
    arrays, sinks = inputs(rng, SHAPES[shape], jnp.float16, has_sinks=True)
    attend = functools.partial(triton_decode.attend, softcap=3.0, scale=None, interpret=platform != "gpu")
    several = attend(*arrays, None, sinks)
    monkeypatch.setattr(triton_decode, "_PROGRAMS", 1)
    assert largest_error(attend(*arrays, None, sinks), several) <= 2**-10


def plain_softmax(q, keys, values, positions, layer, filled, **options):
    """All slots that are written at once."""
    keys, values, positions = keys[1, :, : int(filled)], values[1, :, : int(filled)], positions[:, : int(filled)]
    return cached_attention(q[:, None], keys, values, positions[:, -1:], positions, **options)[:, 0]


@pytest.mark.parametrize("window", first(1, [9, None]))
def test_a_token_that_is_padding_gets_finite_numbers_and_others_do_not_notice(window, implementation, rng):
    (q, *cache, layer, filled), _ = inputs(rng, SHAPES["groups of 4"], jnp.bfloat16)
    keys, values, positions = cache
    padded = positions.at[0, int(filled) - 1].set(-1)
    arrays = (q, keys, values, positions, layer, filled), (q, keys, values, padded, layer, filled)
    expected, found = (run(x, window=window, implementation=implementation) for x in arrays)
    assert jnp.isfinite(found).all()
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("filled", first(1, [290, 258]))
def test_slots_beyond_the_cache_are_not_read(filled, implementation, rng):
    """Where a cache is too short under jit, its model makes the result NaN; nothing is read outside of the cache."""
    (*arrays, _), _ = inputs(rng, SHAPES["all written"], jnp.bfloat16)
    found = run((*arrays, jnp.int32(filled)), implementation=implementation)
    np.testing.assert_array_equal(found, run((*arrays, jnp.int32(257)), implementation=implementation))


@pytest.mark.parametrize(
    "filled, window, blocks",
    [(1, None, (0, 1)), (128, None, (0, 1)), (129, None, (0, 2)), (2000, None, (0, 8)), (2000, 9, (7, 8))],
)
def test_xla_walks_over_the_blocks_that_are_seen(filled, window, blocks, monkeypatch, rng):
    """A block is an eighth of the cache, and at least 128 slots."""
    (q, keys, values, _, layer, _), _ = inputs(rng, (2, 1, 1, 16, 2000 if filled > 129 else 1000, 900), jnp.float32)
    positions, walked = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), keys.shape[1:3]), []
    monkeypatch.setattr(
        jax.lax, "fori_loop", lambda start, end, *rest: walked.append((int(start), int(end))) or rest[1]
    )
    with jax.disable_jit():
        decode_attention(q, keys, values, positions, layer, jnp.int32(filled), window=window, implementation="xla")
    assert walked == [blocks]


@pytest.mark.parametrize(
    "rows, slots, width, expected", [(512, 1023, 128, 1), (64, 1023, 64, 8), (8, 1023, 64, 8), (8, 8192, 128, 64)]
)
def test_few_rows_share_their_slots(rows, slots, width, expected):
    assert triton_decode.number_of_splits(rows, slots, TRITON_DECODE[width]) == expected


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(q="float32", cache="float32"), "supports bfloat16 and float16, and the queries are float32"),
        (dict(cache="float32"), "caches of the queries' dtype bfloat16, and the keys are float32"),
        (dict(width=320), "head widths up to 256, and the width is 320"),
        (dict(group=128), "up to 64 query heads for a key head, and there are 128"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_xla(change, reason):
    sizes = dict(q="bfloat16", cache="bfloat16", width=64, group=4) | change
    q = jax.ShapeDtypeStruct((2, 2 * sizes["group"], sizes["width"]), sizes["q"])
    cache = jax.ShapeDtypeStruct((1, 2, 9, 2, sizes["width"]), sizes["cache"])
    assert reason in triton_decode.unsupported(q, cache, cache)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 9), (), ())]
    assert jax.eval_shape(decode_attention, q, cache, cache, *numbers).shape == q.shape
    with pytest.raises(ValueError, match=reason):
        run_as = functools.partial(decode_attention, implementation="triton:interpret")
        jax.eval_shape(run_as, q, cache, cache, *numbers)
