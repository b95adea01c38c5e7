"""Experts on the devices of a mesh axis, beside all experts on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.ops import moe_mlp
from liger_jax.ops.experts import expert_exchange
from liger_jax.ops.experts.adapted_moe_mlp import adapted_moe_mlp

K, D, F = 2, 8, 4


def problem(rng, tokens, count, chosen):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)
    if chosen == "one device":  # all rows go to the first device's experts
        experts = np.stack([rng.permutation(K)[:K] for _ in range(tokens)])
    else:
        experts = np.stack([rng.permutation(count)[:K] for _ in range(tokens)])
    if chosen == "a wrong one":
        experts[3, 1] = -1
    weights = jnp.asarray(rng.random((tokens, K)), jnp.float32)
    return (normal(tokens, D), weights, normal(count, D, 2 * F), normal(count, F, D)), jnp.asarray(experts, jnp.int32)


@pytest.mark.parametrize(
    ["number", "chosen"],
    [
        (2, "a wrong one"),
        pytest.param(4, "any", marks=pytest.mark.full),
        pytest.param(4, "one device", marks=pytest.mark.full),
    ],
)
def test_experts_on_several_devices_have_the_results_and_gradients_of_one(number, chosen, rng, devices):
    tokens, count = 3 * number, 2 * number
    arrays, experts = problem(rng, tokens, count, chosen)
    dy = jnp.asarray(rng.standard_normal((tokens, D)), jnp.float32)
    mesh = jax.make_mesh((number,), ("x",), devices=devices[:number], axis_types=(AxisType.Auto,))

    def local(x, weights, gate_up, down, experts):
        return adapted_moe_mlp(x, weights, experts, gate_up, down, activation="silu", axis="x")

    shared = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    alone = lambda x, weights, gate_up, down, experts: moe_mlp(x, weights, experts, gate_up, down, activation="silu")

    def results(function):
        @jax.jit
        def run(dy, *arrays):
            y, pullback = jax.vjp(lambda *arrays: function(*arrays, experts), *arrays)
            return y, *pullback(dy)

        return [np.asarray(x) for x in run(dy, *arrays)]

    for found, expected in zip(results(shared), results(alone), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.nanmax(np.abs(expected)))


@pytest.mark.full
def test_rows_come_to_their_experts_and_back(rng, devices):
    number, own, room, m = 4, 3, 5, 12
    mesh = jax.make_mesh((number,), ("x",), devices=devices[:number], axis_types=(AxisType.Auto,))
    counts = rng.integers(0, 3, (number, number * own))
    counts[2, :own] = (2, 0, 3)  # all the room
    counts = np.where(
        counts.reshape(number, number, own).sum(-1, keepdims=True) > room, 1, counts.reshape(number, number, own)
    )
    counts[:, 3] = 0  # nobody has rows for the last device
    rows = np.zeros((number, m, 2), np.float32)
    for source in range(number):
        rows[source, :, 0], rows[source, :, 1] = source, np.arange(m)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def run(rows, sizes) -> Any:
        exchange = expert_exchange.plan(sizes[0], room, "x")
        buffer: Any = expert_exchange.sent(rows[0], exchange, "x")
        back: Any = expert_exchange.returned(buffer, exchange, "x", m)
        return buffer[None], exchange.experts[None], back[None]

    sizes = jnp.asarray(counts.reshape(number, -1), jnp.int32)
    buffer, experts, back = map(np.asarray, jax.jit(run)(jnp.asarray(rows), sizes))
    buffer = buffer.reshape(number, number, room, 2)
    for to in range(number):
        for source in range(number):
            of_pair = counts[source, to]
            first, total = counts[source, :to].sum(), of_pair.sum()
            np.testing.assert_array_equal(buffer[to, source, :total, 0], np.full(total, source))
            np.testing.assert_array_equal(buffer[to, source, :total, 1], first + np.arange(total))
            assert not buffer[to, source, total:].any()
            expected = np.concatenate([np.repeat(np.arange(own), of_pair), np.full(room - total, own)])
            np.testing.assert_array_equal(experts[to, source], expected)
    for source in range(number):
        total = counts[source].sum()
        np.testing.assert_array_equal(back[source, :total], rows[source, :total])
        assert not back[source, total:].any()
