"""What swiglu and geglu promise."""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import geglu, swiglu
from liger_jax.pallas_kernels.glu import reference
from tests.ops import _oracle
from tests.ops._oracle import normal

KERNELS = ("xla", "triton")
# Ragged in every tile, one row, width 1, one axis, three axes.
SHAPES = [(37, 1030), (1, 3000), (1300, 1), (70,), (3, 5, 129)]
OPS = {"silu": swiglu, "gelu_tanh": geglu, "gelu": functools.partial(geglu, approximate=False)}

activations = pytest.mark.parametrize("activation", OPS)


def make(activation, implementation):
    """The op and its reference; the exact GELU has no Triton kernel."""
    if activation == "gelu" and implementation.startswith("triton"):
        pytest.skip("no Triton kernel; test_exact_gelu_is_refused_by_triton")
    op = functools.partial(OPS[activation], implementation=implementation)
    return op, functools.partial(reference.gated, activation=activation)


def plain(gate, up, *, activation):
    """The expression that a model would have instead: the activation in float32, rounded before the product."""
    function = {
        "silu": jax.nn.silu,
        "gelu_tanh": jax.nn.gelu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
    }[activation]
    return function(gate.astype(jnp.float32)).astype(up.dtype) * up


@activations
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_matches_float64(shape, activation, implementation, rng):
    _oracle.check_float32(*make(activation, implementation), normal(rng, shape, shape), rng)


@activations
def test_large_gates_match_float64(activation, implementation, rng):
    gate, up = normal(rng, (20, 70), (20, 70))
    _oracle.check_float32(*make(activation, implementation), [30.0 * gate, up], rng)


@activations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, activation, implementation, rng):
    op, oracle = make(activation, implementation)
    arrays = normal(rng, (150, 130), (150, 130), dtype=dtype)
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


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_nothing_gives_nothing(shape, implementation, rng):
    op, _ = make("silu", implementation)
    results = _oracle.value_and_gradients(op, normal(rng, shape, shape), jnp.zeros(shape))
    assert [x.shape for x in results] == [shape] * 3


def test_only_the_inputs_are_kept_for_the_backward(implementation, rng):
    arrays = normal(rng, (37, 70), (37, 70))
    _oracle.check_residuals(make("silu", implementation)[0], arrays, kept=arrays)


@pytest.mark.parametrize("shared", [(), (1,)], ids=["all mapped", "up shared"])
def test_vmap(shared, implementation, rng):
    _oracle.check_vmap(make("silu", implementation)[0], normal(rng, (5, 70), (5, 70)), rng, shared=shared)


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make("gelu_tanh", implementation)[0], normal(rng, (37, 70), (37, 70)), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make("silu", implementation)[0], normal(rng, (37, 70), (37, 70)), rng)


@activations
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, activation, implementation, rng):
    op, _ = make(activation, implementation)
    arrays = normal(rng, (8, 5, 70), (8, 5, 70))
    _oracle.check_shard_map(op, arrays, rng, implementation, check_vma, split=(0, 1))


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_xla_is_partitioned_without_communication(axis_type, rng):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(axis_type,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    arrays = [jax.device_put(x, sharding) for x in normal(rng, (8, 5, 70), (8, 5, 70))]
    run = jax.jit(lambda arrays: _oracle.value_and_gradients(swiglu, arrays, arrays[0]))
    assert all(x.sharding.is_equivalent_to(sharding, 3) for x in run(arrays))
    assert not _oracle.collectives(run.lower(arrays))


def test_exact_gelu_is_refused_by_triton():
    with pytest.raises(ValueError, match=r"no error function.*use 'xla', or approximate=True\."):
        geglu(jnp.ones((2, 3)), jnp.ones((2, 3)), approximate=False, implementation="triton:interpret")


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((jnp.ones((2, 3), int), jnp.ones((2, 3))), TypeError, r"gate has dtype int32, but must be floating point; "),
        ((jnp.ones((2, 3)), jnp.ones((2, 3), int)), TypeError, r"up has dtype int32, but must be floating point; "),
        ((jnp.ones((2, 3)), jnp.ones((1, 3))), ValueError, r"up has shape \(1, 3\), but must have shape \(2, 3\)"),
    ],
)
def test_wrong_arguments_say_what_to_do(op, arguments, error, message, unchecked_types):
    with pytest.raises(error, match=f"^{op.__name__}: {message}"):
        op(*arguments)


def test_approximate_must_be_a_python_bool(unchecked_types):
    with pytest.raises(TypeError, match="^geglu: approximate is a ArrayImpl, but must be a Python bool.*pass True or"):
        geglu(jnp.ones(3), jnp.ones(3), approximate=jnp.array(True))
