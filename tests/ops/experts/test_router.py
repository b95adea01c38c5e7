"""What routers and their losses promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import ops
from tests.ops._oracle import TOLERANCE, largest_error, normal

N, E, K = 13, 6, 2


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def route(kind, logits):
    if kind == "over the chosen":
        return ops.top_k_softmax(logits, K)
    return ops.softmax_top_k(logits, K, normalized=kind == "normalized")


def expected(kind, logits):
    """Weights and experts in NumPy, float64."""
    logits = np.asarray(logits, np.float64)
    experts = np.argsort(-logits, axis=-1, kind="stable")[..., :K]
    if kind == "over the chosen":
        return softmax(np.take_along_axis(logits, experts, -1)), experts
    weights = np.take_along_axis(softmax(logits), experts, -1)
    return weights / weights.sum(axis=-1, keepdims=True) if kind == "normalized" else weights, experts


kinds = pytest.mark.parametrize("kind", ["normalized", "of all", "over the chosen"])


@kinds
def test_weights_and_experts_match_float64(kind, rng):
    (logits,) = normal(rng, (2, N, E))
    routing = route(kind, logits)
    weights, experts = expected(kind, logits)
    assert largest_error(routing.weights, weights) <= TOLERANCE
    np.testing.assert_array_equal(routing.experts, experts)


@kinds
def test_weights_have_the_gradients_of_differences(kind, rng):
    logits, factors = normal(rng, (N, E), (N, K))
    found = jax.jit(jax.grad(lambda logits: (route(kind, logits).weights * factors).sum()))(logits)
    h, direction = 1e-6, rng.standard_normal((N, E))
    ahead, behind = (
        (expected(kind, np.asarray(logits, np.float64) + h * s * direction)[0] * np.asarray(factors)).sum()
        for s in (1, -1)
    )
    assert abs(np.sum(found * direction) - (ahead - behind) / (2 * h)) < 1e-4


@kinds
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_nan_for_that_token_alone(kind, wrong, rng):
    (logits,) = normal(rng, (N, E))
    routing, right = route(kind, logits.at[3, 2].set(wrong)), route(kind, logits)
    assert jnp.isnan(routing.weights[3]).all() and (routing.experts[3] == -1).all()
    others = np.delete(np.arange(N), 3)
    np.testing.assert_array_equal(routing.weights[others], right.weights[others])
    np.testing.assert_array_equal(routing.experts[others], right.experts[others])


def test_weights_are_computed_in_float32_and_have_the_dtype_of_logits(rng):
    (logits,) = normal(rng, (N, E), dtype=jnp.bfloat16)
    routing = ops.softmax_top_k(logits, K, normalized=True)
    assert routing.weights.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        routing.weights, ops.softmax_top_k(logits.astype(jnp.float32), K, normalized=True).weights.astype(jnp.bfloat16)
    )


def layers(rng, num_layers, n=N):
    logits = rng.standard_normal((num_layers, n, E))
    return logits, np.argsort(-logits, axis=-1)[..., :K]


def concatenated_loss(logits, experts, where):
    """All layers' tokens in one row, as transformers takes them."""
    logits, experts = (x.reshape(-1, x.shape[-1]) for x in (logits, experts))
    where = np.tile(where, logits.shape[0] // where.shape[0])
    chosen = np.stack([(experts == e).sum(axis=1) for e in range(E)], axis=1)
    f, p = (np.average(x, axis=0, weights=where) for x in (chosen, softmax(logits)))
    return E * (f * p).sum()


@pytest.mark.parametrize("some", [False, True], ids=["all tokens", "some tokens"])
def test_balancing_loss_takes_all_layers_together_or_each_by_itself(some, rng):
    logits, experts = layers(rng, 3)
    where = rng.random(N) < 0.6 if some else np.ones(N, bool)
    where[0] = True
    sums = [jax.jit(ops.router_sums)(jnp.asarray(x, jnp.float32), jnp.asarray(y), jnp.asarray(where))
            for x, y in zip(logits, experts, strict=True)]  # fmt: skip
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *sums)
    added = jax.tree.map(lambda *xs: sum(xs), *sums)
    together = concatenated_loss(logits, experts, where)
    alone = np.mean([concatenated_loss(x, y, where) for x, y in zip(logits, experts, strict=True)])
    assert abs(together - alone) > 1e-4  # another loss
    assert ops.balancing_loss(stacked) == pytest.approx(together, rel=1e-5)
    assert ops.balancing_loss(added) == pytest.approx(together, rel=1e-5)
    assert ops.balancing_loss(stacked, per_layer=True) == pytest.approx(alone, rel=1e-5)
    log_z = np.log(np.exp(logits).sum(axis=-1))[:, where]
    assert ops.router_z_loss(stacked) == pytest.approx((log_z**2).mean(), rel=1e-5)
    load = ops.expert_load(stacked)
    assert load.shape == (3, E)
    np.testing.assert_allclose(load[1], np.bincount(experts[1][where].reshape(-1), minlength=E) / (K * where.sum()))


def test_parts_of_a_batch_add_up_to_the_whole(rng):
    logits, experts = layers(rng, 1, 12)
    of = lambda rows: jax.jit(ops.router_sums)(jnp.asarray(logits[0, rows], jnp.float32), jnp.asarray(experts[0, rows]))
    parts = jax.tree.map(jnp.add, of(slice(0, 5)), of(slice(5, 12)))
    for part, whole in zip(jax.tree.leaves(parts), jax.tree.leaves(of(slice(0, 12))), strict=True):
        np.testing.assert_allclose(part, whole, rtol=1e-6)


def test_losses_reach_the_logits(rng):
    logits, experts = layers(rng, 1)
    loss = lambda logits: ops.balancing_loss(ops.router_sums(logits, jnp.asarray(experts[0])))
    logits = jnp.asarray(logits[0], jnp.float32)
    found = jax.jit(jax.grad(loss))(logits)
    f = np.bincount(experts[0].reshape(-1), minlength=E) / N
    p = softmax(np.asarray(logits, np.float64))
    assert largest_error(found, E / N * p * (f - (p * f).sum(axis=1, keepdims=True))) <= TOLERANCE


def test_tokens_that_do_not_count_may_hold_anything(rng):
    logits, experts = layers(rng, 1)
    where = jnp.arange(N) != 2
    loss = lambda logits: (lambda sums: ops.balancing_loss(sums) + ops.router_z_loss(sums))(
        ops.router_sums(logits, jnp.asarray(experts[0]), where)
    )
    wrong = jnp.asarray(logits[0], jnp.float32).at[2].set(jnp.nan)
    value, gradient = jax.jit(jax.value_and_grad(loss))(wrong)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and not gradient[2].any()
    nothing = ops.router_sums(wrong, jnp.asarray(experts[0]), jnp.zeros(N, bool))
    assert ops.balancing_loss(nothing) == ops.router_z_loss(nothing) == 0


def test_an_expert_that_is_not_there_is_nan_where_its_token_counts(rng):
    logits, experts = layers(rng, 1)
    sums = lambda *where: ops.router_sums(logits[0], jnp.asarray(experts[0]).at[2, 0].set(E), *where)
    assert np.isnan(ops.balancing_loss(sums())) and np.isfinite(ops.balancing_loss(sums(jnp.arange(N) != 2)))


def test_wrong_arguments_say_what_to_do(unchecked_types):
    with pytest.raises(ValueError, match="softmax_top_k: k=7 and logits .*pass a smaller k"):
        ops.softmax_top_k(jnp.ones((N, E)), 7, normalized=True)
    with pytest.raises(TypeError, match="top_k_softmax: logits has dtype int32"):
        ops.top_k_softmax(jnp.ones((N, E), int), 1)
    with pytest.raises(ValueError, match=r"router_sums: experts has shape \(2, 1\)"):
        ops.router_sums(jnp.ones((N, E)), jnp.ones((2, 1), int))
    with pytest.raises(ValueError, match=r"router_sums: where has shape \(2,\)"):
        ops.router_sums(jnp.ones((N, E)), jnp.ones((N, 1), int), jnp.ones(2))
