"""What fp8_matmul promises."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.ops import fp8_matmul
from liger_jax.ops._place import Place, described
from liger_jax.ops.fp8_matmul import refusal
from tests.ops import _oracle
from tests.ops._oracle import normal

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# A GPU's quotient may lie on the other side of a tie, and Hopper's sums of FP8 products hold about 14 bits.
TOLERANCE = {"cpu": _oracle.TOLERANCE, "gpu": 2e-3}


@pytest.fixture(autouse=True)
def fp8_here():
    if (reason := refusal(Place(described(jax.devices()[0])))) is not None:
        pytest.skip(reason)


def rounded(x, dtype):
    """What FP8 numbers of x are worth, in float64: NumPy rounds, and no code of ours."""
    x = np.asarray(x, np.float32)
    scale = np.max(np.abs(x)) / np.float32(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64) * np.float64(scale)


def truth(x, kernel, dy):
    """Value and gradients in float64 of operands that are rounded."""
    x, kernel, dy = rounded(x, E4M3), rounded(kernel, E4M3), rounded(dy, E5M2)
    rows = x.reshape(-1, x.shape[-1])
    return x @ kernel, dy @ kernel.T, rows.T @ dy.reshape(len(rows), -1)


def results(x, kernel, dy):
    return _oracle.value_and_gradients(fp8_matmul, [x, kernel], dy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", _oracle.first(2, [(3, 5, 129, 7), (33, 17), (37, 70, 29), (4, 5, 1)]), ids=str)
def test_value_and_gradients_are_those_of_rounded_operands(sizes, dtype, rng, platform):
    *shape, columns = sizes
    scales = 10.0 ** rng.uniform(-3, 3, 3)  # whatever an array's size
    shapes = shape, (shape[-1], columns), (*shape[:-1], columns)
    drawn = (scale * rng.standard_normal(s) for scale, s in zip(scales, shapes, strict=True))
    x, kernel, dy = (jnp.asarray(array, dtype) for array in drawn)
    tolerance = TOLERANCE[platform] if dtype == "float32" else TOLERANCE[platform] + 2**-8
    for found, expected in zip(results(x, kernel, dy), truth(x, kernel, dy), strict=True):
        assert found.dtype == dtype
        assert _oracle.largest_error(found, expected) <= tolerance


def test_results_are_near_those_of_the_operands(rng):
    x, kernel, dy = normal(rng, (64, 300), (300, 65), (64, 65))
    wide = [np.asarray(array, np.float64) for array in (x, kernel, dy)]
    exact = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    # e4m3 is off by 2⁻⁴ of a number at most and by 2.5 % in the root mean square, e5m2 by twice as much.
    for found, expected, most in zip(results(x, kernel, dy), exact, (0.045, 0.07, 0.07), strict=True):
        error = _oracle.rms_error(found, expected) / np.std(expected)
        assert most / 3 < error < most, error


def test_the_largest_number_of_each_array_is_kept():
    largest = jnp.float32(1.7)
    assert fp8_matmul(jnp.full((1, 1), largest), jnp.full((1, 1), largest)).item() == pytest.approx(1.7**2, rel=1e-6)


@pytest.mark.parametrize("size", _oracle.first(2, [1e-38, 1e30, 1e-42, 1e-30]))
def test_no_size_of_numbers_gives_a_wrong_result(size, rng):
    x, kernel = normal(rng, (7, 20), (20, 9))
    small = fp8_matmul(jnp.float32(size) * x, kernel)
    expected = np.asarray(jnp.float32(size) * x, np.float64) @ np.asarray(kernel, np.float64)
    # Below float32's smallest normal number 1.2e-38, a scale is that number, and a CPU takes smaller ones for 0.
    floor = 1e-38 * np.abs(np.asarray(kernel)).sum(0).max()
    assert np.max(np.abs(np.asarray(small, np.float64) - expected)) <= 0.1 * np.max(np.abs(expected)) + floor


def test_zeros_give_zeros():
    value, *gradients = results(jnp.zeros((3, 5)), jnp.zeros((5, 2)), jnp.zeros((3, 2)))
    assert not any(array.any() for array in (value, *gradients))


@pytest.mark.parametrize("shape", _oracle.first(1, [(2, 0, 5), (3, 0)]), ids=str)
def test_nothing_gives_nothing(shape):
    dy = (*shape[:-1], 4)
    found = results(jnp.zeros(shape), jnp.zeros((shape[-1], 4)), jnp.zeros(dy))
    assert [array.shape for array in found] == [dy, shape, (shape[-1], 4)]
    assert not any(array.any() for array in found)


@pytest.mark.parametrize("bad", _oracle.first(1, [-np.inf, np.nan, np.inf]), ids=str)
@pytest.mark.parametrize("place, nan", [(0, (0, 2)), (1, (0, 1)), (2, (1, 2))], ids=["x", "kernel", "gradient"])
def test_what_is_not_finite_makes_all_of_a_product_nan(place, nan, bad, rng):
    arrays = normal(rng, (6, 10), (10, 7), (6, 7))
    arrays[place] = arrays[place].at[3, 2].set(bad)
    for i, result in enumerate(results(*arrays)):
        assert bool(jnp.isnan(result).all()) == (i in nan)
        assert bool(jnp.isfinite(result).all()) == (i not in nan)


def products(function, *arrays):
    """The dtypes of the operands of each product of a program."""
    equations = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                equations.append(tuple(x.aval.dtype for x in equation.invars))
            for sub in jaxprs_in_params(equation.params):
                walk(sub)

    walk(jax.make_jaxpr(function)(*arrays).jaxpr)
    return equations


def test_operands_of_all_three_products_are_fp8(rng):
    x, kernel = normal(rng, (6, 10), (10, 7), dtype=jnp.bfloat16)
    total = lambda x, kernel: jnp.sum(jnp.sin(fp8_matmul(x, kernel)))
    found = products(jax.grad(total, argnums=(0, 1)), x, kernel)
    assert found == [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@pytest.mark.parametrize("wanted, count", [(0, 2), (1, 2)], ids=["x", "kernel"])
def test_there_is_no_product_for_a_gradient_that_nobody_wants(wanted, count, rng):
    arrays = normal(rng, (6, 10), (10, 7))

    def total(own):
        return jnp.sum(fp8_matmul(*(own if i == wanted else arrays[i] for i in range(2))))

    assert len(products(jax.grad(total), arrays[wanted])) == count


def test_x_is_not_kept_where_the_kernel_is_frozen(rng):
    x, kernel = normal(rng, (60, 10), (10, 7))
    _, pull = jax.vjp(lambda x: fp8_matmul(x, kernel), x)
    assert x.shape not in {jnp.shape(leaf) for leaf in jax.tree.leaves(pull)}


def test_vmap_gives_every_product_its_own_scales(rng, platform):
    x, kernel, dy = normal(rng, (4, 6, 10), (4, 10, 7), (4, 6, 7))
    x *= 10.0 ** jnp.arange(4, dtype=jnp.float32)[:, None, None]
    many = _oracle.value_and_gradients(jax.vmap(fp8_matmul), [x, kernel], dy)
    for i in range(4):
        for found, expected in zip(many, truth(x[i], kernel[i], dy[i]), strict=True):
            assert _oracle.largest_error(found[i], expected) <= TOLERANCE[platform]


@pytest.mark.parametrize("check_vma", _oracle.first(1, [False, True]))
def test_parts_of_a_shard_map_have_their_own_scales(check_vma, devices, rng):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    x, kernel, dy = normal(rng, (8, 10), (10, 7), (8, 7))
    x = x.at[0, 0].set(100.0)  # on the first device
    specs: dict[str, Any] = dict(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    value, dx, dkernel = _oracle.value_and_gradients(jax.shard_map(fp8_matmul, **specs), [x, kernel], dy)
    parts = [truth(x, kernel, dy) for x, dy in zip(*(jnp.split(a, len(devices)) for a in (x, dy)), strict=True)]
    assert _oracle.largest_error(value, np.concatenate([part[0] for part in parts])) <= 2e-3
    assert _oracle.largest_error(dx, np.concatenate([part[1] for part in parts])) <= 2e-3
    assert _oracle.largest_error(dkernel, sum(part[2] for part in parts)) <= 2e-3


def test_devices_of_an_auto_mesh_share_one_scale(devices, rng):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    x, kernel, dy = normal(rng, (8, 10), (10, 7), (8, 7))
    x = x.at[0, 0].set(100.0)
    split = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    for found, expected in zip(results(split, kernel, dy), results(x, kernel, dy), strict=True):
        assert _oracle.largest_error(found, expected) <= _oracle.SAME


@pytest.mark.parametrize(
    "kind, platform, reason",
    [
        ("NVIDIA A100-SXM4-80GB", "gpu", "A100-SXM4-80GB has no FP8 products, .* of compute capability 8.9"),
        ("AMD Instinct MI300X", "gpu", "MI300X has no FP8 products, which take an NVIDIA GPU"),
        ("TPU v5p", "tpu", "on TPU v5p FP8 products were never measured"),
        ("NVIDIA H100 80GB HBM3", "gpu", None),
        ("NVIDIA L4", "gpu", None),
        ("NVIDIA B200", "gpu", None),
        ("cpu", "cpu", None),
    ],
)
def test_devices_without_fp8_are_refused(kind, platform, reason):
    found = refusal(Place(AbstractDevice(kind, None, platform)))
    if reason is None:
        assert found is None
    else:
        assert found is not None and re.search(reason, found)


def test_a_program_for_an_older_gpu_is_refused(rng):
    arrays = normal(rng, (6, 10), (10, 7))
    device = AbstractDevice("NVIDIA A100-SXM4-80GB", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match="without KernelOptions"):
        jax.eval_shape(fp8_matmul, *arrays)


def test_what_does_not_fit_is_refused(devices, unchecked_types):
    x, kernel = jnp.ones((2, 3)), jnp.ones((3, 4))
    with pytest.raises(TypeError, match="x has dtype int32"):
        fp8_matmul(x.astype(jnp.int32), kernel)
    with pytest.raises(ValueError, match=r"must be \(\.\.\., D\) and \(D, F\)"):
        fp8_matmul(x, kernel.T)
    with pytest.raises(ValueError, match="kernel has dtype bfloat16 and x float32"):
        fp8_matmul(x, kernel.astype(jnp.bfloat16))
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Explicit axes"):
        fp8_matmul(jax.device_put(jnp.ones((8, 3)), P("data")), kernel)
