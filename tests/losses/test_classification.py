"""softmax_cross_entropy_with_integer_labels stands in for optax's: same signature, shapes, dtypes and values."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from liger_jax.losses import softmax_cross_entropy_with_integer_labels as ours

theirs = optax.losses.softmax_cross_entropy_with_integer_labels


def example(rng, shape, axes):
    batch = [size for axis, size in enumerate(shape) if axis not in axes]
    classes = int(np.prod([shape[axis] for axis in axes]))
    return jnp.asarray(3 * rng.standard_normal(shape), jnp.float32), jnp.asarray(rng.integers(0, classes, batch))


def assert_same(logits, labels, where=None, **options):
    def value_and_gradient(function):
        def weighted(logits, labels, where):
            loss = function(logits, labels, where=where, **options)
            weights = jnp.cos(jnp.arange(loss.size, dtype=jnp.float32)).reshape(loss.shape)
            return jnp.sum(weights * loss), loss

        gradient, loss = jax.jit(jax.grad(weighted, has_aux=True))(logits, labels, where)
        return loss, gradient

    (found, gradient), (expected, expected_gradient) = map(value_and_gradient, (ours, theirs))
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-4, atol=2e-6)


def test_signature_is_optax_s():
    names = lambda f: [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
    assert names(ours) == names(theirs)


@pytest.mark.parametrize(
    "shape, axis",
    [
        ((7, 11), -1),
        ((2, 3, 5), (2, 0)),
        ((6,), -1),
        pytest.param((7, 11), 0, marks=pytest.mark.full),
        pytest.param((2, 3, 5), 1, marks=pytest.mark.full),
        pytest.param((2, 3, 5), (1, 2), marks=pytest.mark.full),
        pytest.param((3, 4, 129), 2, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients_are_optax_s_along_every_axis(shape, axis, rng):
    axes = [a % len(shape) for a in ((axis,) if isinstance(axis, int) else axis)]
    assert_same(*example(rng, shape, axes), axis=axis)


def test_masked_examples_and_masked_classes_are_optax_s(rng):
    logits, labels = example(rng, (4, 5, 6), [2])
    assert_same(logits, labels, where=jnp.asarray(rng.uniform(size=(4, 5)) < 0.6))
    classes = jnp.asarray(rng.uniform(size=(4, 5, 6)) < 0.6).at[0, 0].set(False)
    assert_same(logits, labels, where=classes)
    logits, labels = example(rng, (4, 5, 6), [0])
    assert_same(logits, labels, axis=0, where=jnp.asarray(rng.uniform(size=(5, 6)) < 0.6))


def test_one_example_axis_as_long_as_the_classes_is_a_mask_of_examples(rng):
    """A mask of the labels' shape counts examples, even where it could be taken for classes."""
    logits, labels = example(rng, (5, 5), [1])
    assert_same(logits, labels, where=jnp.arange(5) < 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32_and_returned_in_its_dtype(dtype, rng):
    logits, labels = example(rng, (64, 1000), [1])
    logits = logits.astype(dtype)
    found = ours(logits, labels)
    exact = theirs(logits.astype(jnp.float32), labels)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, exact.astype(dtype))


@pytest.mark.parametrize("label", [-1, 6, -100])
def test_labels_that_are_no_class_give_nan_under_jit_and_outside(label, rng):
    """optax scores −1 as the last class; that is the one difference."""
    logits, labels = example(rng, (3, 6), [1])
    labels = labels.at[1].set(label)
    for f in (ours, jax.jit(ours)):
        assert np.isnan(f(logits, labels)).tolist() == [False, True, False]
    grad = np.isnan(jax.jit(jax.grad(lambda *arrays: jnp.sum(ours(*arrays))))(logits, labels))
    assert grad.all(axis=1).tolist() == grad.any(axis=1).tolist() == [False, True, False]


def test_a_training_loss_swaps_by_one_name(rng):
    logits, labels = example(rng, (2, 8, 50), [2])
    loss = lambda f: jax.jit(jax.value_and_grad(lambda *arrays: f(*arrays).mean()))(logits, labels)
    for a, b in zip(jax.tree.leaves(loss(ours)), jax.tree.leaves(loss(theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused(unchecked_types, rng):
    logits, labels = example(rng, (4, 6), [1])
    with pytest.raises(TypeError, match="logits has dtype int32, but must be floating point"):
        ours(logits.astype(jnp.int32), labels)
    with pytest.raises(ValueError, match=r"labels has shape \(3,\), but must have shape \(4,\)"):
        ours(logits, labels[:3])
    with pytest.raises(ValueError, match="axis=2 must name different axes"):
        ours(logits, labels, axis=2)
    with pytest.raises(ValueError, match=r"axis=\(1, -1\) must name different axes"):
        ours(logits, labels, axis=(1, -1))
    with pytest.raises(TypeError, match="axis='last' must be an int or a tuple of ints"):
        ours(logits, labels, axis="last")
    with pytest.raises(ValueError, match=r"where has shape \(2,\)"):
        ours(logits, labels, where=jnp.ones(2, bool))
