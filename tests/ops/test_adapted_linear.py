"""What projections with adapters promise, alone and around a gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax.ops import adapted_linear as op
from liger_jax.pallas_kernels import _hopper_product
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import glu as reference

RANKS = 3, 70, 16  # of gate, up and down; a step of the kernel has 64


def linear(x, kernel, a, b):
    return x @ kernel.astype(x.dtype) + (x @ a.astype(x.dtype)) @ b.astype(x.dtype)


def draw(rng, *sizes, dtype=jnp.bfloat16):
    """x (2, 148, D), a kernel (D, F), and float32 A and B of the rank."""
    d, f, rank = sizes
    x, kernel, a, b = normal(rng, (2, 148, d), (d, f), (d, rank), (rank, f))
    return [x.astype(dtype), (0.3 * kernel).astype(dtype), 0.3 * a, 0.3 * b]


def draw_gated(rng, d=128, f=192):
    arrays = [draw(rng, *sizes) for sizes in ((d, f, RANKS[0]), (d, f, RANKS[1]), (f, d, RANKS[2]))]
    kernels = [each[1] for each in arrays]
    return arrays[0][0], *kernels, *[x for each in arrays for x in each[2:]]


def gated(x, *arrays, activation, implementation):
    kernels, adapters = arrays[:3], [arrays[i : i + 2] for i in (3, 5, 7)]
    return op.adapted_gated_mlp(x, kernels, adapters, activation=activation, implementation=implementation)


def gated_reference(x, *arrays, activation):
    kernels, adapters = arrays[:3], [arrays[i : i + 2] for i in (3, 5, 7)]
    gate, up = (linear(x, kernels[i], *adapters[i]) for i in (0, 1))
    return linear(reference.gated(gate, up, activation=activation), kernels[2], *adapters[2])


@pytest.fixture
def few_cores(hopper, monkeypatch):
    if hopper != "mosaic_gpu":  # each walks over several tiles, and uses its memory again
        monkeypatch.setattr(_hopper_product, "NUM_CORES", 2)


@pytest.mark.parametrize("rank", [3, 64, 70])
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_one_accumulation_is_no_worse_than_a_sum_of_products(rank, dtype, few_cores, hopper, rng):
    run = functools.partial(op.adapted_linear, implementation=hopper)
    _oracle.check_half(run, linear, linear, draw(rng, 192, 320, rank, dtype=dtype), rng)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_of_adapted_projections_is_no_worse_than_separate_ones(activation, few_cores, hopper, rng):
    run = functools.partial(gated, activation=activation, implementation=hopper)
    plain = functools.partial(gated, activation=activation, implementation="xla")
    oracle = functools.partial(gated_reference, activation=activation)
    _oracle.check_half(run, plain, oracle, draw_gated(rng), rng)


@pytest.mark.parametrize("wrt", ["a b", "x a b", "x", "x kernel a b"])
def test_a_frozen_array_takes_no_product(wrt, hopper, rng):
    arrays = dict(zip(("x", "kernel", "a", "b"), draw(rng, 128, 192, 5), strict=True))
    chosen = {name: arrays[name] for name in wrt.split()}
    loss = lambda chosen: op.adapted_linear(**(arrays | chosen), implementation=hopper).astype(jnp.float32).sum()
    program = str(jax.make_jaxpr(jax.grad(loss))(chosen))
    narrow = 1 + ("x" in chosen or "a" in chosen) + ("a" in chosen) + ("b" in chosen) + ("kernel" in chosen)
    assert program.count("preferred_element_type=float32") >= ("a" in chosen) + ("b" in chosen)
    assert program.count("dot_general") <= narrow + 2  # and no more than one in each of two kernels
    assert jax.tree.map(lambda x: x.dtype, jax.grad(loss)(chosen)) == {k: v.dtype for k, v in chosen.items()}


def test_the_result_has_the_input_s_dtype_whatever_the_kernel_s_is(rng):
    x, kernel, a, b = draw(rng, 128, 192, 5)
    y = op.adapted_linear(x, kernel.astype("float32"), a, b, implementation="xla")
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, op.adapted_linear(x, kernel, a, b, implementation="xla"))


def test_arrays_of_a_projection_that_do_not_fit_are_refused(rng, unchecked_types):
    """A (rank, 1) would be added to each column without a word."""
    good = dict(zip(("x", "kernel", "a", "b"), draw(rng, 128, 192, 5), strict=True))
    for name, wrong, error, message in (
        ("b", good["b"][:, :1], ValueError, r"b has shape \(5, 1\), but must have shape \(5, 192\): it is \(rank, F\)"),
        ("b", good["b"][0], ValueError, r"b has shape \(192,\), but must be \(rank, F\)"),
        ("a", good["a"].T, ValueError, r"a has shape \(5, 128\), but must have shape \(128, 128\): it is \(D, rank\)"),
        ("kernel", good["kernel"].T, ValueError, r"x has shape \(2, 148, 128\) and kernel has shape \(192, 128\), but"),
        ("x", good["x"].astype(int), TypeError, "x has dtype int32, but must be floating point"),
        ("kernel", None, TypeError, "kernel is None, but must be an array"),
    ):
        with pytest.raises(error, match=f"^adapted_linear: {message}"):
            op.adapted_linear(**good | {name: wrong})
    x, *kernels_and_adapters = draw_gated(rng)
    kernels, adapters = kernels_and_adapters[:3], [kernels_and_adapters[i : i + 2] for i in (3, 5, 7)]
    adapters[2][1] = adapters[2][1][:, :1]
    with pytest.raises(
        ValueError, match=r"^adapted_gated_mlp: down_b has shape \(16, 1\), but must have shape \(16, 128"
    ):
        op.adapted_gated_mlp(x, kernels, adapters, activation="silu")
    with pytest.raises(ValueError, match="^adapted_gated_mlp: its input has 192 columns and down_kernel has shape"):
        op.adapted_gated_mlp(x, [*kernels[:2], kernels[2].T], adapters, activation="silu")


def test_only_a_hopper_that_holds_the_whole_arrays_adds_them(rng):
    x, kernel, *_ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 2048, 4096), (4096, 4096)))

    def can(kind, platform, *, x=x, kernel=kernel):
        device = AbstractDevice(kind, None, platform)
        mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
        found = []
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(lambda x, kernel: found.append(op.can_add(x, kernel)), x, kernel)
        return found[0]

    assert can("NVIDIA H200", "gpu")
    assert not can("NVIDIA A100-SXM4-80GB", "gpu")
    assert not can("cpu", "cpu")
    assert not can("NVIDIA H200", "gpu", x=jax.ShapeDtypeStruct((4, 1, 4096), jnp.bfloat16))
    assert not can("NVIDIA H200", "gpu", x=jax.ShapeDtypeStruct(x.shape, jnp.float32))
