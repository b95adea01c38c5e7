"""A public name that optax, Flax or JAX has too means the same here: their parameters, their defaults, their values."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import liger_jax
from liger_jax import layers, losses, models, ops, training

OURS = (liger_jax, layers, losses, models, ops, training)
THEIRS = (optax, optax.losses, optax.schedules, nnx, jax.nn)


def public(module):
    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: value for name, value in names.items() if not isinstance(value, types.ModuleType)}


SHARED = {
    name: (ours, theirs)
    for module in OURS
    for name, ours in public(module).items()
    for other in THEIRS
    if (theirs := public(other).get(name)) is not None
}


def rows(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def loss_values(*arguments, **options):
    def of(loss):
        total = lambda *x: (jnp.sum((found := loss(*x, **options)) ** 2), found)
        return jax.jit(jax.grad(total, has_aux=True))(*arguments)

    return of


def updates(dtype, *arguments, **options):
    params = {"kernel": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3), "scale": jnp.ones(3, dtype)}
    grads = jax.tree.map(lambda x: 100 * jnp.cos(x), params)

    def two_updates(optimizer):
        made = optimizer(*arguments, **options)
        found, state = made.update(grads, made.init(params), params)
        return found, made.update(found, state, params)[0]

    return lambda optimizer: jax.jit(lambda: two_updates(optimizer))()


def layer_values(x, *arguments, **options):
    def value(layer):
        made = layer(*arguments, rngs=nnx.Rngs(3), **options)
        return (
            nnx.jit(lambda layer, x: layer(x))(made, x),
            nnx.to_pure_dict(nnx.state(made)),
            made.num_groups if hasattr(made, "num_groups") else None,
        )

    return value


def cases(rng):
    x, y, where = rows(rng, 4, 6), rows(rng, 4, 6), jnp.asarray(rng.uniform(size=(4, 6)) < 0.7).at[:, 0].set(True)
    init = dict(scale_init=nnx.initializers.normal(), dtype=jnp.bfloat16, epsilon=1e-2)
    labels = jnp.asarray([1, 0, 5, 3])
    return {
        "softmax_cross_entropy_with_integer_labels": [
            loss_values(x, labels=labels),
            loss_values(x, labels=jnp.asarray([3, 0, 1, 2, 3, 0]), axis=0),
            loss_values(x, labels=labels, where=where[:1]),
            loss_values(x, labels=labels, where=jnp.asarray([False])),
        ],
        "kl_divergence": [
            loss_values(jax.nn.log_softmax(x), jax.nn.softmax(y)),
            loss_values(x, jnp.abs(y), axis=(0, 1), where=where),
        ],
        "cosine_distance": [
            loss_values(x, y),
            loss_values(x, y, axis=0, where=where, epsilon=0.5),
            loss_values(x, y, epsilon=20.0),
        ],
        "adamw": [
            updates(jnp.float32, 0.1),
            updates(jnp.bfloat16, 0.1),
            updates(jnp.float32, optax.linear_schedule(1.0, 0.0, 9), 0.5, 0.6, 1e-3, 1e-4, jnp.bfloat16, 0.1),
            updates(jnp.float32, 0.1, mask={"kernel": True, "scale": False}, nesterov=True),
        ],
        "sgd": [updates(jnp.float32, 0.1), updates(jnp.bfloat16, 0.1, 0.9, True, jnp.float32)],
        "RMSNorm": [
            layer_values(x, 6),
            layer_values(x.astype(jnp.bfloat16), 6),
            layer_values(x, 6, **init),
            layer_values(x, 6, use_scale=False),
        ],
        "LayerNorm": [
            layer_values(x, 6),
            layer_values(x, 6, bias_init=nnx.initializers.normal(), **init),
            layer_values(x, 6, use_scale=False, use_bias=False),
        ],
        "GroupNorm": [
            layer_values(rows(rng, 2, 5, 64), 64),
            layer_values(x, 6, 3, use_bias=False, **init),
            layer_values(rows(rng, 4, 48), 48, None, 24),  # of few numbers Flax loses the variance
        ],
        "softmax": [
            loss_values(x),
            loss_values(x, axis=0),
            loss_values(x, axis=None, where=where),
            loss_values(x, where=jnp.zeros((1, 6), bool)),
        ],
    }


def signature(value):
    return inspect.signature(value.__init__ if isinstance(value, type) else value).parameters


@pytest.mark.parametrize("name", SHARED)
def test_a_name_of_theirs_has_their_parameters_and_defaults(name):
    ours, theirs = map(signature, SHARED[name])
    for position, (parameter, expected) in enumerate(theirs.items()):
        found = ours[parameter]
        assert found.kind == expected.kind
        assert found.default == expected.default or found.default is expected.default
        if expected.kind != expected.KEYWORD_ONLY:
            assert list(ours)[position] == parameter
    for parameter in ours.keys() - theirs.keys():
        assert ours[parameter].kind == inspect.Parameter.KEYWORD_ONLY
        assert ours[parameter].default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", SHARED)
def test_a_name_of_theirs_has_their_values(name, rng):
    for value in cases(rng)[name]:
        found, expected = map(value, SHARED[name])
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert getattr(a, "dtype", int) == getattr(b, "dtype", int)
            tolerance = 1e-2 if getattr(a, "dtype", None) == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(
                *(np.asarray(v, np.float32) for v in (a, b)), rtol=tolerance, atol=tolerance / 10
            )


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(reduction_axes=(0, 1)), r"RMSNorm: reduction_axes=\(0, 1\), but the op has whole rows"),
        (dict(axis_name="data"), "RMSNorm: axis_name='data', but the op has whole rows, of one device"),
    ],
)
def test_what_a_kernel_does_not_have_is_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^layers.{sentence}.*flax.nnx.RMSNorm"):
        layers.RMSNorm(4, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=r"^layers.LayerNorm: mask is given"):
        layers.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.ones((2, 4)), mask=jnp.ones((2, 4), bool))
