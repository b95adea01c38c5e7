"""Digests of arrays: what changes them, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from liger_jax.training import digests

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8, "uint16": np.uint16, "float8_e4m3fn": np.uint8}


def of(x):
    (digest,) = digests.of_leaves([x]).values()
    return digest


@pytest.mark.parametrize("dtype", BITS)
def test_every_flipped_bit_changes_the_digest(dtype):
    rng = np.random.default_rng(0)
    values = np.asarray(jnp.asarray(rng.normal(size=(3, 17)) * 20).astype(dtype))
    before = of(jnp.asarray(values))
    for _ in range(20):
        flipped = values.copy()
        at, bit = rng.integers(values.size), rng.integers(8 * values.itemsize)
        flipped.reshape(-1).view(BITS[dtype])[at] ^= BITS[dtype](1 << bit)
        assert of(jnp.asarray(flipped)) != before
    assert of(jnp.asarray(values)) == before


def test_order_shape_and_dtype_change_the_digest():
    x = jnp.asarray([[1.0, 2.0, 4.0], [1.0, 0.0, -0.0]])
    others = [x[::-1], x[:, ::-1], x.reshape(3, 2), x.astype(jnp.bfloat16), jnp.zeros_like(x), jnp.abs(x)]
    assert len({of(each) for each in [x, *others]}) == len(others) + 1


def test_flags_keys_complex_and_narrow_numbers_have_digests():
    pairs = [
        (jnp.array([True, False]), jnp.array([False, True])),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.array([1 + 2j], jnp.complex64), jnp.array([2 + 1j], jnp.complex64)),
        (jnp.array([1, -2], jnp.int4), jnp.array([1, -3], jnp.int4)),
        (jnp.ones(()), jnp.zeros(())),
    ]
    for one, other in pairs:
        assert of(one) != of(other) and of(one) == of(one)
    assert of(jnp.zeros((0, 3))) != of(jnp.zeros((0, 2)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_digest_does_not_depend_on_the_layout(kind):
    if len(jax.devices()) < 4:
        pytest.skip("one device has one layout")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    assert of(spread) == of(x)
