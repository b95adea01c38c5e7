"""Digests of arrays: what changes them, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from liger_jax.training import digests, scoring

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


def sharded(value):
    """An array over all devices, large enough that a sum of it takes a while."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    return jax.device_put(jnp.full((8, 4096, 16), value, jnp.float32), NamedSharding(mesh, PartitionSpec("x")))


def one_at_a_time(function):
    """The function, which fails if an earlier result is not there yet.

    Programs that add over devices, and are started together, can wait for each other forever on a CPU of few cores.
    """
    started = []

    def watched(*arguments):
        assert all(each.is_ready() for each in started)
        started.append(function(*arguments))
        return started[-1]

    return watched


def test_one_digest_is_computed_at_a_time(monkeypatch):
    monkeypatch.setattr(digests, "_sums", one_at_a_time(digests._sums))
    assert len(digests.of_leaves([sharded(i) for i in range(6)])) == 6


def test_one_part_of_what_is_held_out_is_scored_at_a_time():
    sums = jax.jit(lambda params, frozen, x: jnp.stack([jnp.sin(x).sum(), 1.0, 1.0]))
    score = scoring(one_at_a_time(sums), None, lambda totals: {"count": totals[1]})
    assert score(None, [sharded(i) for i in range(6)]) == {"count": 6.0}


def test_digests_of_json_and_bytes_follow_from_what_they_hold():
    assert digests.of_json({"a": [1.0], "b": None}) == digests.of_json({"b": None, "a": [1.0]})
    assert digests.of_json({"a": [1.0]}) != digests.of_json({"a": [1.5]})
    assert digests.of_bytes(b"{", b"}")[:12] == "44136fa355b3"
    assert digests.of_leaves({"a": jnp.ones(3)}) == {"['a']": "float32(3,) 0d450a2a19390caf"}
