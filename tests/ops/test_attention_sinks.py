"""Attention's sinks against a float64 softmax with one more column, whichever kernel runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from liger_jax.models.core.cache import cached_attention
from liger_jax.ops import causal_attention, layout
from liger_jax.pallas_kernels.attention import cudnn, splash
from tests.ops._oracle import (
    ROUNDED,
    TOLERANCE,
    WORSE_THAN_PLAIN,
    largest_error,
    normal,
    random_cotangents,
    rms_error,
    truth,
    value_and_gradients,
)
from tests.ops.references import attention as reference

OPTIONS = {
    "plain": {},
    "all": dict(window=70, softcap=3.0, scale=0.3),
    "window": dict(window=9),
}


def inputs(rng, length, dtype, heads=(4, 2), width=64):
    query_heads, kv_heads = heads
    q, k, v, sinks = normal(rng, *((2, length, h, width) for h in (query_heads, kv_heads, kv_heads)), (query_heads,))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), 2 * sinks


def packed_ids(rng, length):
    return jnp.asarray(1 + np.cumsum(rng.random((2, length)) < 0.02, axis=1), jnp.int32)


def with_sinks(attend, **options):
    """Attention as a function of q, k, v and sinks."""
    return lambda q, k, v, sinks: attend(q, k, v, sinks=sinks, **options)


@pytest.mark.parametrize("name", [*OPTIONS])
def test_sinks_have_the_values_and_gradients_of_one_more_column(name, rng):
    options = OPTIONS[name] | dict(segment_ids=packed_ids(rng, 301))
    arrays = inputs(rng, 301, jnp.float32, width=16)
    attend = with_sinks(causal_attention, **options, implementation="xla")
    with jax.default_matmul_precision("highest"):
        cotangents = random_cotangents(attend, arrays, rng)
        expected = truth(with_sinks(reference.causal_attention, **options), arrays, cotangents)
        found = jax.jit(functools.partial(value_and_gradients, attend))(arrays, cotangents)
    assert len(found) == 5
    for x, t in zip(found, expected, strict=True):
        assert largest_error(x, t) <= TOLERANCE


@pytest.fixture(params=["mosaic_gpu", "triton"])
def kernel(request, platform):
    if request.param == "mosaic_gpu":
        return request.getfixturevalue("hopper")
    return "triton" if platform == "gpu" else "triton:interpret"


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.full) for name in ("plain", "window"))])
def test_kernels_with_sinks_round_no_more_than_chunks(kernel, name, rng):
    options = OPTIONS[name] | dict(segment_ids=packed_ids(rng, 137))
    arrays = inputs(rng, 137, jnp.bfloat16, heads=(2, 1))
    cotangents = random_cotangents(with_sinks(causal_attention, implementation="xla"), arrays, rng)
    expected = truth(with_sinks(reference.causal_attention, **options), arrays, cotangents)
    plain, found = (
        jax.jit(functools.partial(value_and_gradients, with_sinks(causal_attention, **options, implementation=which)))(
            arrays, cotangents
        )
        for which in ("xla", kernel)
    )
    for x, p, t in zip(found[:-1], plain, expected, strict=False):
        assert rms_error(x, t) <= WORSE_THAN_PLAIN * rms_error(p, t) + ROUNDED
    # A sink's gradient is one sum over all queries. The result in it is rounded twice, by 2⁻⁹ of itself at most.
    with jax.enable_x64(True):
        q, k, v, sinks = (jnp.asarray(x, jnp.float64) for x in arrays)
        run = jax.jit(lambda *arrays: reference.causal_attention(*arrays[:3], sinks=arrays[3], **options))
        seen = run(q, k, jnp.ones_like(v), sinks)[..., 0]
    sizes = np.sum(np.abs(np.asarray(cotangents, np.float64) * expected[0]), axis=-1)
    most = 2**-8 * np.sum((1 - np.asarray(seen)) * sizes, axis=(0, 1))
    assert np.all(np.abs(found[-1] - expected[-1]) <= most)


def test_far_sinks_change_nothing_and_near_ones_take_all(rng):
    q, k, v, _ = inputs(rng, 20, jnp.float32, width=16)
    attend = functools.partial(causal_attention, q, k, v, implementation="xla")
    np.testing.assert_allclose(attend(sinks=jnp.full(4, -1e4)), attend(), atol=1e-6)
    gone = attend(sinks=jnp.full(4, 1e4))
    assert jnp.all(gone == 0)


def test_sinks_of_16_bits_have_gradients_of_16_bits(rng):
    q, k, v, sinks = inputs(rng, 20, jnp.bfloat16, width=16)
    loss = lambda sinks: causal_attention(q, k, v, sinks=sinks, implementation="xla").astype(jnp.float32).sum()
    assert jax.grad(loss)(sinks.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rows_that_devices_share_have_the_sinks_gradients_of_one_device(devices, rng):
    mesh, c = jax.sharding.Mesh(devices, ("sequence",)), len(devices)
    q, k, v, sinks = inputs(rng, 6 * c, jnp.float32, width=8)
    (do,) = normal(rng, q.shape)

    def shared(q, k, v, sinks):
        def part(q, k, v, sinks):
            return causal_attention(q, k, v, sinks=sinks, sequence_axis="sequence", implementation="xla")

        split = PartitionSpec(None, "sequence")
        run = jax.shard_map(part, mesh=mesh, in_specs=(split, split, split, PartitionSpec()), out_specs=split)
        q, k, v = (layout.in_chunks(x, 1, c) for x in (q, k, v))
        return layout.from_chunks(run(q, k, v, sinks), 1, c)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(functools.partial(value_and_gradients, shared))((q, k, v, sinks), do)
        expected = truth(with_sinks(reference.causal_attention), (q, k, v, sinks), do)
    for x, t in zip(found, expected, strict=True):
        assert largest_error(x, t) <= TOLERANCE


def test_explicit_axes_split_heads_and_their_sinks(devices, rng):
    mesh = jax.make_mesh((2,), ("heads",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    q, k, v, sinks = inputs(rng, 12, jnp.float32, width=8)
    expected = causal_attention(q, k, v, sinks=sinks, implementation="xla")
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*spec)))
    split = [place(x, None, None, "heads") for x in (q, k, v)]
    with jax.set_mesh(mesh):
        found = causal_attention(*split, sinks=place(sinks, "heads"), implementation="xla")
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_cache_has_the_sinks_of_the_row(rng):
    q, k, v, sinks = inputs(rng, 10, jnp.float32, width=16)
    positions = jnp.broadcast_to(jnp.arange(10), (2, 10))
    found = cached_attention(q, k, v, positions, positions, window=4, sinks=sinks)
    np.testing.assert_allclose(found, reference.causal_attention(q, k, v, window=4, sinks=sinks), atol=1e-5)


@pytest.mark.usefixtures("unchecked_types")
def test_what_has_no_sinks_says_so():
    q = jnp.zeros((1, 8, 4, 16))
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\), but must have shape \(4,\): one for each head of q"):
        causal_attention(q, q, q, sinks=jnp.zeros(3))
    with pytest.raises(TypeError, match="sinks has dtype int32, but must be floating point"):
        causal_attention(q, q, q, sinks=jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="gradients do not support sinks; use 'xla'"):
        causal_attention(q, q, q, sinks=jnp.zeros(4), implementation="splash:interpret")
    refused = cudnn.unsupported(q, q, q, None, window=None, softcap=None, has_sinks=True, capability=(9, 0))
    assert "does not support sinks" in str(refused)
    assert splash.unsupported(q, q, q, None) is None
