"""Forward mode: XLA's fast loss has it, and what has gradients only says so in a sentence of ours."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import ops
from liger_jax.losses import causal_lm_loss
from tests.ops.references import cross_entropy as reference

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
N, D, V = 12, 8, 19


@pytest.fixture
def arrays(rng):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    labels = jnp.asarray(rng.integers(0, V, N)).at[2].set(-100)
    return (draw(N, D), draw(V, D), draw(V)), (draw(N, D), draw(V, D), draw(V)), labels


def plain(labels):
    return lambda h, w, b: ops.cross_entropy(h @ w.T + b[None], labels)


def fused(labels, **options):
    options = dict(implementation="xla", mode="fast", chunk_size=5) | options
    return lambda h, w, b: ops.fused_linear_cross_entropy(h, w, labels, bias=b, **options)


def test_the_tangent_is_the_gradients_product_with_the_direction(arrays):
    primals, directions, labels = arrays
    value, tangent = jax.jit(lambda *both: jax.jvp(fused(labels), *both))(primals, directions)
    expected, grads = jax.jit(jax.value_and_grad(plain(labels), argnums=(0, 1, 2)))(*primals)
    close(value, expected)
    close(tangent, sum(jnp.vdot(grad, x) for grad, x in zip(grads, directions, strict=True)))


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_linearize_and_jacfwd_agree_with_reverse_mode(transform, arrays):
    (hidden, weight, bias), (direction, *_), labels = arrays
    loss = transform(lambda h: fused(labels, token_weights=jnp.tanh(h[:, 0]))(h, weight, bias))
    grad = jax.grad(loss)(hidden)
    close(jax.linearize(loss, hidden)[1](direction), jnp.vdot(grad, direction))
    close(jax.jacfwd(loss)(hidden), grad)


def test_a_model_of_ones_own_has_forward_mode_through_its_loss(arrays):
    (hidden, weight, _), (direction, *_), labels = arrays
    loss = lambda h: causal_lm_loss(jnp.tanh(h), weight, labels, implementation="xla", mode="fast")
    close(jax.jvp(loss, (hidden,), (direction,))[1], jnp.vdot(jax.grad(loss)(hidden), direction))


LEAN = {"mode": "lean", "chunk_size": None}


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "name, loss",
    [
        ("fused_linear_cross_entropy", lambda labels: fused(labels, **LEAN)),
        ("fused_linear_log_probs", lambda y: lambda h, w, b: ops.fused_linear_log_probs(h, w, y, bias=b).log_probs),
    ],
)
def test_what_has_gradients_only_says_so(name, loss, transform, arrays):
    primals, directions, labels = arrays
    function = transform(loss(labels))
    with pytest.raises(
        TypeError, match=rf"^{name} supports gradients \(jax\.grad, jax\.vjp\), but here not forward mode"
    ):
        jax.jvp(function, primals, directions)
    jax.grad(lambda *primals: jnp.sum(function(*primals)), argnums=(0, 1, 2))(*primals)
    with pytest.raises(TypeError, match=f"^{name} supports gradients"):
        jax.linearize(function, *primals)[1](*directions)


def test_fused_distillation_says_so_too(arrays):
    (hidden, weight, _), (direction, *_), _ = arrays
    loss = lambda h: ops.fused_linear_distillation(h, weight, hidden, 2 * weight)
    jax.grad(loss)(hidden)
    with pytest.raises(TypeError, match=r"^fused_linear_distillation supports gradients .* not forward mode"):
        jax.jvp(loss, (hidden,), (direction,))


@pytest.mark.parametrize("kernel", ["xla", "triton:interpret"])
def test_a_loss_of_logits_has_forward_mode_and_second_derivatives_beside_its_kernels(kernel, rng):
    """Of rows that count and one that does not, which holds NaN; the truth is the formula in plain JAX."""
    logits, direction = (jnp.asarray(rng.standard_normal((5, 11)), jnp.float32) for _ in range(2))
    logits, direction = (x.at[3].set(jnp.nan) for x in (logits, direction))
    labels, t, c = jnp.asarray([0, 4, 10, -100, 7]), jnp.asarray([1.0, 2.0, 0.5, 0.0, 1.0]), jnp.linspace(0.5, 2.0, 11)
    options: dict[str, Any] = dict(label_smoothing=0.1, z_loss=0.1, logit_scale=1.5, logit_softcap=3.0)
    ours = lambda x: ops.cross_entropy(x, labels, token_weights=t, class_weights=c, implementation=kernel, **options)
    truth = lambda x: reference.cross_entropy(x, labels, t, c, **options)

    @jax.jit
    def found(x):
        twice = lambda f: (jax.hessian(f)(x), jax.jacrev(jax.grad(f))(x))
        return [(jax.jvp(f, (x,), (direction,)), *twice(f)) for f in (ours, truth)]

    ours_found, expected = found(logits)
    for a, b in zip(jax.tree.leaves(ours_found), jax.tree.leaves(expected), strict=True):
        close(a, b)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_split_classes_have_forward_mode(transform, devices, rng):
    mesh = jax.sharding.Mesh(devices, ("shard",))
    logits, direction = (jnp.asarray(rng.standard_normal((5, 3 * mesh.size)), jnp.float32) for _ in range(2))
    labels = jnp.asarray([0, 1, 2, -100, 2])
    local = lambda z: ops.cross_entropy(z, labels, z_loss=0.1, vocab_axis="shard")
    split = jax.shard_map(local, mesh=mesh, in_specs=jax.P(None, "shard"), out_specs=jax.P())
    whole = lambda z: ops.cross_entropy(z, labels, z_loss=0.1)
    for a, b in zip(
        *(transform(lambda *x, f=f: jax.jvp(f, *x))((logits,), (direction,)) for f in (split, whole)), strict=True
    ):
        close(a, b)
