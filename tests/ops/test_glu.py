"""What swiglu and geglu promise."""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import geglu, swiglu
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import glu as reference

KERNELS = ("xla", "triton")
# Ragged in every tile, one row, width 1, one axis, three axes, full tiles in both packings.
SHAPES = [(37, 1030), (1, 3000), (1300, 1), (70,), (3, 5, 129), (2, 16, 192)]
OPS = {"silu": swiglu, "gelu_tanh": geglu, "gelu": functools.partial(geglu, approximate=False)}

packings = pytest.mark.parametrize("packed", _oracle.first(1, [False, True]), ids=["two arrays", "side by side"])
both_packings = pytest.mark.parametrize("packed", [False, True], ids=["two arrays", "side by side"])
activations = pytest.mark.parametrize("activation", OPS)


def make(activation, implementation):
    """The op and its reference; the exact GELU has no Triton kernel."""
    if activation == "gelu" and implementation.startswith("triton"):
        pytest.skip("no Triton kernel; test_exact_gelu_is_refused_by_triton")
    op = functools.partial(OPS[activation], implementation=implementation)
    return op, functools.partial(reference.gated, activation=activation)


def gates(rng, *shape, packed=False, dtype=jnp.float32):
    """Gate and up, or one array of both side by side."""
    return normal(rng, (*shape[:-1], 2 * shape[-1]), dtype=dtype) if packed else normal(rng, shape, shape, dtype=dtype)


def plain(gate, up=None, *, activation):
    """The plain expression that a model would use: the activation in float32, rounded before the product."""
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    function = {
        "silu": jax.nn.silu,
        "gelu_tanh": jax.nn.gelu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
    }[activation]
    return function(gate.astype(jnp.float32)).astype(up.dtype) * up


@both_packings
@activations
@pytest.mark.parametrize("shape", _oracle.first(2, SHAPES), ids=str)
def test_every_shape_matches_float64(shape, activation, packed, implementation, rng):
    _oracle.check_float32(*make(activation, implementation), gates(rng, *shape, packed=packed), rng)


@activations
def test_large_gates_match_float64(activation, implementation, rng):
    gate, up = gates(rng, 20, 70)
    _oracle.check_float32(*make(activation, implementation), [30.0 * gate, up], rng)


@activations
def test_zeros_give_zeros_and_gradients_of_the_formula(activation, implementation, rng):
    gate, up = gates(rng, 5, 70)
    arrays = [gate.at[2].set(0.0), up.at[3].set(0.0)]
    _oracle.check_float32(*make(activation, implementation), arrays, rng)
    y, *_ = _oracle.value_and_gradients(make(activation, implementation)[0], arrays, jnp.ones((5, 70)))
    assert not y[2:4].any()


@activations
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16", "float32"]))
def test_gates_up_to_the_limit_of_the_dtype_have_finite_gradients(dtype, activation, implementation):
    """A cube, a square or an exponential of them overflows; activation and slope do not."""
    largest = float(jnp.finfo(dtype).max)
    gate = jnp.asarray([sign * largest**power for power in (1.0, 0.9, 0.6, 0.4) for sign in (1, -1)], dtype)
    op, _ = make(activation, implementation)
    arrays = [gate, jnp.full((8,), 0.25, dtype)]
    results = _oracle.value_and_gradients(op, arrays, jnp.full((8,), 0.5))
    expected = _oracle.truth(lambda gate, up: jnp.maximum(gate, 0.0) * up, arrays, jnp.full((8,), 0.5))
    assert all(jnp.isfinite(x.astype(jnp.float32)).all() for x in results)
    for x, y in zip(results, expected, strict=True):
        assert _oracle.largest_error(x, y) <= 2.0**-7


@packings
@activations
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, activation, packed, implementation, rng):
    op, oracle = make(activation, implementation)
    arrays = gates(rng, 150, 130, packed=packed, dtype=dtype)
    _oracle.check_half(op, functools.partial(plain, activation=activation), oracle, arrays, rng)


@activations
def test_value_is_rounded_where_the_plain_expression_rounds(activation, implementation, rng):
    op, _ = make(activation, implementation)
    arrays = normal(rng, (150, 130), (150, 130), dtype=jnp.bfloat16)
    ours, theirs = jax.jit(op)(*arrays), jax.jit(functools.partial(plain, activation=activation))(*arrays)
    # The float32 activations may differ in their last bit, and so here and there in bfloat16's.
    assert jnp.mean(ours == theirs) > 0.99


def test_mixed_dtypes_give_the_dtype_of_up_and_gradients_those_of_their_primals(implementation, rng):
    op, oracle = make("silu", implementation)
    (half,), (single,) = normal(rng, (150, 130), dtype=jnp.bfloat16), normal(rng, (150, 130))
    for gate, up in ((half, single), (single, half)):
        _oracle.check_half(op, functools.partial(plain, activation="silu"), oracle, [gate, up], rng)
        y, dgate, dup = _oracle.value_and_gradients(op, [gate, up], jnp.ones((150, 130)))
        assert (y.dtype, dgate.dtype, dup.dtype) == (up.dtype, gate.dtype, up.dtype)


@packings
@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_nothing_gives_nothing(shape, packed, implementation, rng):
    op, _ = make("silu", implementation)
    arrays = gates(rng, *shape, packed=packed)
    results = _oracle.value_and_gradients(op, arrays, jnp.zeros(shape))
    assert [x.shape for x in results] == [shape, *(x.shape for x in arrays)]


@activations
def test_side_by_side_gives_the_same_values_and_gradients(activation, implementation, rng):
    op, _ = make(activation, implementation)
    arrays, cotangents = gates(rng, 7, 70, dtype=jnp.bfloat16), normal(rng, (7, 70))[0]
    y, *gradients = _oracle.value_and_gradients(op, arrays, cotangents)
    packed = _oracle.value_and_gradients(op, [jnp.concatenate(arrays, axis=-1)], cotangents)
    assert jnp.array_equal(packed[0], y)
    assert jnp.array_equal(packed[1], jnp.concatenate(gradients, axis=-1))


@packings
def test_only_the_inputs_are_kept_for_the_backward(packed, implementation, rng):
    arrays = gates(rng, 37, 70, packed=packed)
    _oracle.check_residuals(make("silu", implementation)[0], arrays, kept=arrays)


@pytest.mark.parametrize("shared", [(), (1,)], ids=["all mapped", "up shared"])
def test_vmap(shared, implementation, rng):
    _oracle.check_vmap(make("silu", implementation)[0], normal(rng, (5, 70), (5, 70)), rng, shared=shared)


def test_vmap_side_by_side(implementation, rng):
    _oracle.check_vmap(make("silu", implementation)[0], gates(rng, 5, 70, packed=True), rng)


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make("gelu_tanh", implementation)[0], normal(rng, (37, 70), (37, 70)), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make("silu", implementation)[0], normal(rng, (37, 70), (37, 70)), rng)


@packings
@activations
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, activation, packed, implementation, rng):
    op, _ = make(activation, implementation)
    arrays = gates(rng, 8, 5, 70, packed=packed)
    _oracle.check_shard_map(op, arrays, rng, implementation, check_vma, split=range(len(arrays)))


@packings
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_xla_is_partitioned_without_communication(axis_type, packed, rng):
    arrays = gates(rng, 8, 5, 70, packed=packed)
    _oracle.check_partitioned(swiglu, arrays, rng, axis_type, split=range(len(arrays)))


def test_exact_gelu_is_refused_by_triton():
    with pytest.raises(ValueError, match=r"no error function.*use 'xla', or approximate=True\."):
        geglu(jnp.ones((2, 3)), jnp.ones((2, 3)), approximate=False, implementation="triton:interpret")


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((jnp.ones((2, 3), int), jnp.ones((2, 3))), TypeError, r"gate has dtype int32, but must be floating point; "),
        ((jnp.ones((2, 3)), jnp.ones((2, 3), int)), TypeError, r"up has dtype int32, but must be floating point; "),
        (
            (jnp.ones((2, 3)),),
            ValueError,
            r"gate has shape \(2, 3\), but without `up` it must hold gate and up side by",
        ),
        ((jnp.ones(()),), ValueError, r"gate has shape \(\), but without `up`"),
        ((jnp.ones((2, 3)), jnp.ones((1, 3))), ValueError, r"up has shape \(1, 3\), but must have shape \(2, 3\)"),
    ],
)
def test_wrong_arguments_say_what_to_do(op, arguments, error, message, unchecked_types):
    with pytest.raises(error, match=f"^{op.__name__}: {message}"):
        op(*arguments)


def test_approximate_must_be_a_python_bool(unchecked_types):
    with pytest.raises(TypeError, match="^geglu: approximate is a ArrayImpl, but must be a Python bool.*pass True or"):
        geglu(jnp.ones(3), jnp.ones(3), approximate=jnp.array(True))
