"""What softmax and sparsemax promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import softmax, sparsemax
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)
# Ragged in every tile, one row, width 1, one axis, three axes.
SHAPES = [(37, 1030), (1, 3000), (1300, 1), (70,), (3, 5, 129)]
OPS = {"softmax": softmax, "sparsemax": sparsemax}
ORACLES = {"softmax": reference.softmax, "sparsemax": reference.sparsemax}

kinds = pytest.mark.parametrize("kind", OPS)


def make(kind, implementation, **options):
    """The op and its reference."""
    op = functools.partial(OPS[kind], implementation=implementation, **options)
    return op, functools.partial(ORACLES[kind], **options)


def plain(x, *, kind):
    """The plain expression that a model would use. In float32 it would keep float32 probabilities."""
    if kind == "softmax":
        return jax.nn.softmax(x)
    return reference.sparsemax(x.astype(jnp.float32)).astype(x.dtype)


@kinds
@pytest.mark.parametrize("shape", _oracle.first(2, SHAPES), ids=str)
def test_every_shape_matches_float64(shape, kind, implementation, rng):
    _oracle.check_float32(*make(kind, implementation), normal(rng, shape), rng)


@kinds
@pytest.mark.parametrize("scale", _oracle.first(2, [0.1, 30.0, 0.0, 1e-3]))
def test_flat_and_peaked_rows_match_float64(scale, kind, implementation, rng):
    """The support has all columns, many, two or one. Of rows with one alone, the gradients are next to nothing."""
    (x,) = normal(rng, (9, 700))
    _oracle.check_float32(*make(kind, implementation), [scale * x.at[::2, :2].set(4.0)], rng)


@kinds
@pytest.mark.parametrize("axis", _oracle.first(1, [1, 0, -2]))
def test_any_axis_may_be_summed_over(axis, kind, implementation, rng):
    _oracle.check_float32(*make(kind, implementation, axis=axis), normal(rng, (6, 40, 7)), rng)


@kinds
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, kind, implementation, rng):
    op, oracle = make(kind, implementation)
    arrays = normal(rng, (150, 130), dtype=dtype)
    _oracle.check_half(op, functools.partial(plain, kind=kind), oracle, arrays, rng)


@kinds
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_value_is_rounded_once(dtype, kind, implementation, rng):
    (x,) = normal(rng, (150, 130), dtype=dtype)
    once = plain(x.astype(jnp.float32), kind=kind).astype(dtype)
    # The float32 values may differ in their last bit, and so here and there in the rounded ones.
    assert jnp.mean(make(kind, implementation)[0](x) == once) > 0.99


@kinds
def test_a_constant_cotangent_has_no_gradient(kind, implementation, rng):
    """The sum is 1 whatever x is, and although rounded probabilities do not quite add up to it."""
    arrays = normal(rng, (50, 130), dtype=jnp.bfloat16)
    y, dx = _oracle.value_and_gradients(make(kind, implementation)[0], arrays, jnp.full((50, 130), 100.0))
    assert jnp.max(jnp.abs(dx.astype(jnp.float32))) < 1e-4


@kinds
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16", "float32"]))
def test_scores_at_the_limits_of_the_dtype_have_finite_gradients(dtype, kind, implementation):
    limits = jnp.finfo(dtype)
    x = jnp.array([[1, 1, -1, -1], [1, 0.5, 0, -1], [-1, -1, -1, -1], [0, 0, 0, 0]], dtype) * limits.max
    y, dx = _oracle.value_and_gradients(make(kind, implementation)[0], [x], x / limits.max)
    expected = [[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4, [0.25] * 4]
    assert jnp.array_equal(y, jnp.array(expected, dtype))
    assert jnp.array_equal(dx, jnp.zeros_like(dx))


@kinds
def test_masked_scores_get_nothing(kind, implementation, rng):
    op, _ = make(kind, implementation)
    (x,), (dy,) = normal(rng, (5, 70)), normal(rng, (5, 70))
    masked = x.at[:, ::3].set(-jnp.inf)
    y, dx = _oracle.value_and_gradients(op, [masked], dy)
    kept = jnp.asarray(np.arange(70) % 3 != 0)
    y_kept, dx_kept = _oracle.value_and_gradients(op, [x[:, kept]], dy[:, kept])
    for whole, part in ((y, y_kept), (dx, dx_kept)):
        assert _oracle.largest_error(whole[:, kept], part) < 1e-6
        assert not whole[:, ~kept].any()


def test_sparsemax_is_the_nearest_distribution(implementation, rng):
    """The projection onto the simplex: from no other distribution is x at an acute angle."""
    (x,) = normal(rng, (50, 12))
    y = np.asarray(sparsemax(x, implementation=implementation), np.float64)
    assert np.abs(y.sum(axis=1) - 1).max() < 1e-6 and y.min() == 0.0
    others = rng.dirichlet(np.ones(12), (50, 200))
    assert np.einsum("nf,nof->no", x - y, others - y[:, None]).max() < 1e-5


def test_sparsemax_of_many_equal_scores_is_flat(implementation):
    y, dx = _oracle.value_and_gradients(make("sparsemax", implementation)[0], [jnp.full((3, 7), 2.0)], jnp.ones((3, 7)))
    np.testing.assert_allclose(y, 1 / 7, rtol=1e-6)
    np.testing.assert_allclose(dx, 0, atol=1e-6)


@pytest.mark.parametrize("width", _oracle.first(1, [32768, 2000]))
def test_sparsemax_of_wide_rows_is_exact(width, implementation, rng):
    """Random rows, and rows of slowly changing scores, among which the threshold is hard to find."""
    (x,) = normal(rng, (2, width))
    rows = [
        x[0],
        -0.01 * jnp.sqrt(jnp.arange(width, dtype=jnp.float32)),
        -1.0 / jnp.arange(1.0, 1.0 + width),
        x[1] / 50,
    ]
    _oracle.check_float32(*make("sparsemax", implementation), [jnp.stack(rows)], rng)


@kinds
@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_nothing_gives_nothing(shape, kind, implementation):
    results = _oracle.value_and_gradients(make(kind, implementation)[0], [jnp.zeros(shape)], jnp.zeros(shape))
    assert [x.shape for x in results] == [shape] * 2


@kinds
@pytest.mark.parametrize("axis", _oracle.first(1, [-1, 0]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_more_than_the_input_is_kept_for_the_backward(dtype, axis, kind, implementation, rng):
    arrays = normal(rng, (37, 70), dtype=dtype)
    _oracle.check_residuals(make(kind, implementation, axis=axis)[0], arrays, kept=arrays)


@kinds
def test_vmap(kind, implementation, rng):
    _oracle.check_vmap(make(kind, implementation)[0], normal(rng, (5, 70)), rng)


@kinds
def test_checkpoint(kind, implementation, rng):
    _oracle.check_checkpoint(make(kind, implementation)[0], normal(rng, (37, 70)), rng, implementation)


@kinds
def test_scan(kind, implementation, rng):
    _oracle.check_scan(make(kind, implementation)[0], normal(rng, (37, 70)), rng)


@kinds
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, kind, implementation, rng):
    arrays = normal(rng, (8, 5, 70))
    _oracle.check_shard_map(make(kind, implementation)[0], arrays, rng, implementation, check_vma)


@kinds
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_xla_is_partitioned_without_communication(axis_type, kind, rng):
    _oracle.check_partitioned(OPS[kind], normal(rng, (8, 5, 70)), rng, axis_type)


@kinds
@pytest.mark.parametrize(
    "x, axis, error, message",
    [
        (jnp.ones((2, 3), int), -1, TypeError, "x has dtype int32, but must be floating point; cast it"),
        (
            jnp.ones((2, 3)),
            2,
            ValueError,
            r"axis=2 is not an axis of x, which has shape \(2, 3\); pass one in \[-2, 2\)\.",
        ),
        (jnp.ones(()), -1, ValueError, r"axis=-1 is not an axis of x, which has shape \(\); reshape x to \(1,\)\."),
        (jnp.ones((2, 3)), 1.0, TypeError, r"axis=1.0 must be a Python int"),
        (jnp.ones((2, 3)), True, TypeError, r"axis=True must be a Python int"),
    ],
)
def test_wrong_arguments_say_what_to_do(x, axis, error, message, kind, unchecked_types):
    with pytest.raises(error, match=f"^{kind}: {message}"):
        OPS[kind](x, axis=axis)


def test_softmax_takes_axes_as_jax_does_and_names_what_it_cannot_take(unchecked_types):
    x = jnp.arange(6.0).reshape(2, 3)
    for axis in (np.int64(0), [0, 1]):
        np.testing.assert_allclose(softmax(x, axis=axis), jax.nn.softmax(x, axis=axis), rtol=1e-6)
    with pytest.raises(ValueError, match=r"softmax: axis=\(0, -2\) names an axis of x twice"):
        softmax(x, axis=(0, -2))
    with pytest.raises(ValueError, match=r"softmax: where has shape \(2,\), which does not broadcast to \(2, 3\)"):
        softmax(x, where=jnp.ones(2, bool))
