"""The feed-forward of experts with adapters or quantised weights, beside `moe_mlp` with the weights that these mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.ops import moe_mlp
from liger_jax.ops.block_quantized import block_quantized
from liger_jax.ops.experts import adapted_moe_mlp as module
from liger_jax.ops.experts.adapted_moe_mlp import ExpertAdapter, adapted_moe_mlp, experts_at_once

N, K, E, D, F, RANK = 11, 2, 4, 16, 8, 3


def inputs(rng, *, chosen=None):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(N)]) if chosen is None else chosen
    weights = jnp.asarray(rng.random((N, K)), jnp.float32)
    return normal(N, D), weights, jnp.asarray(experts, jnp.int32), normal(E, D, 2 * F), normal(E, F, D)


def adapters(rng):
    normal = lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32)
    return (normal(E, D, RANK), normal(E, RANK, 2 * F)), (normal(E, F, RANK), normal(E, RANK, D))


def pulled_back(function, dy, *arrays):
    """The value, and the gradients by all arrays."""

    @jax.jit
    def run(dy, *arrays):
        with jax.default_matmul_precision("highest"):
            y, pullback = jax.vjp(function, *arrays)
            return y, pullback(dy)

    return run(dy, *arrays)


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y, np.float64)
        assert np.abs(np.asarray(x) - y).max() <= 3e-5 * np.abs(y).max()


@pytest.mark.parametrize("which", ["both", pytest.param("down", marks=pytest.mark.full)])
def test_adapters_are_what_their_products_add_to_the_weights(rng, which):
    x, weights, experts, gate_up, down = inputs(rng)
    of_gate_up, of_down = adapters(rng)
    biases = dict(
        gate_up_bias=jnp.asarray(rng.standard_normal((E, 2 * F)), jnp.float32),
        down_bias=jnp.asarray(rng.standard_normal((E, D)), jnp.float32),
    )
    options = dict(activation="clamped_swiglu", **biases)
    with_gate_up = which == "both"

    def ours(x, weights, of_gate_up, of_down):
        first = ExpertAdapter(*of_gate_up) if with_gate_up else None
        own = dict(gate_up_adapter=first, down_adapter=ExpertAdapter(*of_down))
        return adapted_moe_mlp(x, weights, experts, gate_up, down, **own, **options)

    def merged(x, weights, of_gate_up, of_down):
        sums = gate_up + float(with_gate_up) * of_gate_up[0] @ of_gate_up[1], down + of_down[0] @ of_down[1]
        return moe_mlp(x, weights, experts, *sums, **options)

    arrays = jnp.asarray(rng.standard_normal((N, D)), jnp.float32), x, weights, of_gate_up, of_down
    found, expected = pulled_back(ours, *arrays), pulled_back(merged, *arrays)
    if with_gate_up:
        return assert_close(found, expected)
    (y, (dx, dweights, unused, ddown)), (right, expected) = found, expected
    assert not any(np.any(part) for part in unused)
    assert_close((y, dx, dweights, ddown), (right, *expected[:2], expected[3]))


def test_a_token_without_an_expert_reaches_no_parameter(rng):
    """Its own result and gradients are NaN, as `moe_mlp` has them, and so may its cotangent be."""
    x, weights, experts, gate_up, down = inputs(rng)
    experts = experts.at[3].set(-1)
    dy = jnp.asarray(rng.standard_normal((N, D)), jnp.float32).at[3].set(jnp.nan)
    biases = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((E, 2 * F), (E, D))]

    def of(function):
        def value(gate_up, down, gate_up_bias, down_bias, **adapters):
            options = dict(gate_up_bias=gate_up_bias, down_bias=down_bias, activation="silu")
            return function(x, weights, experts, gate_up, down, **options, **adapters)

        return value

    _, expected = pulled_back(of(moe_mlp), dy, gate_up, down, *biases)
    _, found = pulled_back(of(adapted_moe_mlp), dy, gate_up, down, *biases)
    assert_close(found, expected)
    of_adapters = lambda a, b, c, d: of(adapted_moe_mlp)(
        gate_up, down, *biases, gate_up_adapter=ExpertAdapter(a, b), down_adapter=ExpertAdapter(c, d)
    )
    pairs = adapters(rng)
    _, found = pulled_back(of_adapters, dy, *pairs[0], *pairs[1])
    assert all(np.isfinite(g).all() and np.asarray(g).any() for g in found)


def shapes_made(jaxpr):
    """The shapes of all arrays that a program computes, inner programs included. Guards hand arrays on."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "add", "dot_general", "mul", "convert_element_type", "gather"):
            yield from (variable.aval.shape for variable in equation.outvars)
        for value in equation.params.values():
            inner = value if isinstance(value, (tuple, list)) else [value]
            for one in inner:
                one = getattr(one, "jaxpr", one)
                if hasattr(one, "eqns"):
                    yield from shapes_made(one)


def test_frozen_experts_have_no_gradient_and_no_sum_with_their_adapters(rng):
    x, weights, experts, gate_up, down = inputs(rng)

    def loss(adapted, gate_up, down):
        own = dict(gate_up_adapter=ExpertAdapter(*adapted[0]), down_adapter=ExpertAdapter(*adapted[1]))
        return adapted_moe_mlp(x, weights, experts, gate_up, down, **own, activation="silu").sum()

    made = set(shapes_made(jax.make_jaxpr(jax.grad(loss))(adapters(rng), gate_up, down).jaxpr))
    assert not made & {gate_up.shape, down.shape}
    by_weights = set(shapes_made(jax.make_jaxpr(jax.grad(loss, 1))(adapters(rng), gate_up, down).jaxpr))
    assert gate_up.shape in by_weights


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.full)])
def test_quantised_experts_are_multiplied_a_few_at_a_time(rng, kind, monkeypatch):
    uneven = np.stack([np.full(N, 2), np.where(np.arange(N) < 8, 1, 3)], axis=1)  # none goes to the first expert
    uneven[4, 0] = E  # a token with an expert that does not exist
    x, weights, experts, gate_up, down = inputs(rng, chosen=uneven)
    quantised = [block_quantized(w, kind, block_size=8) for w in (gate_up, down)]
    monkeypatch.setattr(module, "DENSE_BYTES", 4 * D * 2 * F)
    assert experts_at_once(gate_up.shape, jnp.float32) == 1 and experts_at_once(down.shape, jnp.float32) == 2
    ours = lambda x, weights: adapted_moe_mlp(x, weights, experts, *quantised, activation="silu")
    dense = [jnp.asarray(w) for w in quantised]
    theirs = lambda x, weights: moe_mlp(x, weights, experts, *dense, activation="silu")
    arrays = jnp.asarray(rng.standard_normal((N, D)), jnp.float32), x, weights
    found, expected = pulled_back(ours, *arrays), pulled_back(theirs, *arrays)
    others = np.arange(N) != 4
    for one in jax.tree.leaves(found):
        assert np.isnan(one[4]).all()
    assert_close(*(jax.tree.map(lambda leaf: leaf[others], one) for one in (found, expected)))


@pytest.mark.full
def test_the_dense_part_of_quantised_experts_is_bounded(rng, monkeypatch):
    """No array of all experts is made, forward or backward."""
    x, weights, experts, gate_up, down = inputs(rng)
    quantised = [block_quantized(w, "nf4", block_size=8) for w in (gate_up, down)]
    monkeypatch.setattr(module, "DENSE_BYTES", 4 * D * 2 * F)
    loss = lambda x: adapted_moe_mlp(x, weights, experts, *quantised, activation="silu").sum()
    floats = set(shapes_made(jax.make_jaxpr(jax.grad(loss))(x).jaxpr))
    assert gate_up.shape not in floats and (1, D, 2 * F) in floats
