"""What rms_norm promises."""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import rms_norm
from liger_jax.pallas_kernels.rms_norm import reference
from tests.ops import _oracle
from tests.ops._oracle import normal

CASTING_MODES = ["llama", "gemma", "none"]
# Ragged in every tile, one row, width 1, one axis, three axes, and more rows than Triton's backward has programs.
SHAPES = [(37, 19), (1, 300), (33, 1), (1, 1), (70,), (3, 5, 129), (300, 4097)]

with_and_without_scale = pytest.mark.parametrize("with_scale", [True, False], ids=["scale", "no scale"])
casting_modes = pytest.mark.parametrize("casting_mode", CASTING_MODES)


def make(implementation, eps=1e-6, offset=0.0, **options):
    """The op and its reference as functions of (x,) or (x, scale)."""
    op = functools.partial(rms_norm, eps=eps, offset=offset, implementation=implementation, **options)
    return op, lambda x, scale=None: reference.rms_norm(x, scale, eps=eps, offset=offset)


def plain(x, scale=None, *, casting_mode, offset=0.0, eps=1e-6):
    """The expression that a model would have instead, rounding where the casting mode says."""
    x32 = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = x * rstd.astype(x.dtype) if casting_mode == "none" else x32 * rstd
    if casting_mode == "llama":
        normed = normed.astype(x.dtype)
    if scale is None:
        return normed.astype(x.dtype)
    dtype = jnp.float32 if jnp.float32 in (normed.dtype, scale.dtype) else x.dtype
    return (normed.astype(dtype) * (offset + scale.astype(dtype)[None, :])).astype(x.dtype)


@with_and_without_scale
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_matches_float64(shape, with_scale, implementation, rng):
    op, oracle = make(implementation, eps=0.1)  # with less, the gradient of a row of width 1 cancels to nothing
    _oracle.check_float32(op, oracle, normal(rng, shape, shape[-1:])[: 1 + with_scale], rng)


@casting_modes
@pytest.mark.parametrize("eps, offset", [(0.0, 0.0), (1e-6, 1.0), (0.3, -2.0)])
def test_every_option_matches_float64(eps, offset, casting_mode, implementation, rng):
    op, oracle = make(implementation, eps=eps, offset=offset, casting_mode=casting_mode)
    _oracle.check_float32(op, oracle, normal(rng, (37, 70), (70,)), rng)


@casting_modes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, casting_mode, implementation, rng):
    if dtype == "float16" and implementation.startswith("mosaic_tpu"):
        pytest.skip("Mosaic has no float16; test_float16_is_refused_on_tpu")
    op, oracle = make(implementation, casting_mode=casting_mode)
    arrays = normal(rng, (150, 130), (130,), dtype=dtype)
    _oracle.check_half(op, functools.partial(plain, casting_mode=casting_mode), oracle, arrays, rng)


@casting_modes
def test_float32_scale_multiplies_in_float32_and_keeps_its_gradients_dtype(casting_mode, implementation, rng):
    op, oracle = make(implementation, casting_mode=casting_mode)
    (x,), (scale,) = normal(rng, (150, 130), dtype=jnp.bfloat16), normal(rng, (130,))
    _oracle.check_half(op, functools.partial(plain, casting_mode=casting_mode), oracle, [x, scale], rng)
    dx, dscale = jax.grad(lambda x, scale: op(x, scale).astype(jnp.float32).sum(), (0, 1))(x, scale)
    assert (dx.dtype, dscale.dtype) == (jnp.bfloat16, jnp.float32)


def test_llama_rounds_before_the_scale_and_gemma_after(implementation):
    # √3 = 1.7320508 is 1.734375 in bfloat16. Times 1.3125 they are 2.2733 and 2.2764, and the tie is at 2.2734.
    x, scale = jnp.array([[1.0, 0.0, 0.0]], jnp.bfloat16), jnp.full(3, 1.3125, jnp.bfloat16)
    y = {mode: make(implementation, eps=0.0, casting_mode=mode)[0](x, scale)[0, 0] for mode in CASTING_MODES}
    assert {mode: float(value) for mode, value in y.items()} == {"llama": 2.28125, "gemma": 2.265625, "none": 2.28125}


@with_and_without_scale
def test_no_rows_give_no_rows_and_zero_gradient(with_scale, implementation, rng):
    op, _ = make(implementation)
    arrays = normal(rng, (0, 64), (64,))[: 1 + with_scale]
    y, *gradients = _oracle.value_and_gradients(op, arrays, jnp.zeros((0, 64)))
    assert y.shape == (0, 64)
    assert [g.shape for g in gradients] == [x.shape for x in arrays]
    assert all(not g.any() for g in gradients)


def test_rows_do_not_see_each_other(implementation, rng):
    op, _ = make(implementation)
    x, scale = normal(rng, (9, 40), (40,))
    y = op(x.at[4].set(jnp.nan), scale)
    assert jnp.isnan(y[4]).all()
    rest = jnp.arange(9) != 4
    assert jnp.array_equal(y[rest], op(x, scale)[rest])


def test_only_the_inputs_are_kept_for_the_backward(implementation, rng):
    arrays = normal(rng, (37, 70), (70,))
    _oracle.check_residuals(make(implementation)[0], arrays, kept=arrays)


@pytest.mark.parametrize("shared", [(), (1,)], ids=["all mapped", "scale shared"])
def test_vmap(shared, implementation, rng):
    _oracle.check_vmap(make(implementation)[0], normal(rng, (5, 70), (70,)), rng, shared=shared)


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make(implementation)[0], normal(rng, (37, 70), (70,)), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make(implementation)[0], normal(rng, (37, 70), (70,)), rng)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_a_replicated_scale(check_vma, implementation, rng):
    arrays = normal(rng, (8, 5, 70), (70,))
    _oracle.check_shard_map(make(implementation)[0], arrays, rng, implementation, check_vma)


def test_float16_is_refused_on_tpu(platform):
    name = "mosaic_tpu" if platform == "tpu" else "mosaic_tpu:interpret"
    with pytest.raises(ValueError, match=r"takes float32 and bfloat16, and x is float16; use 'xla'\."):
        rms_norm(jnp.ones((4, 8), jnp.float16), implementation=name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("triton:interpret", r"a row of 65537 elements exceeds 65536, what one program holds; use 'xla'\."),
        ("mosaic_tpu:interpret", r"16 rows of 65537 elements exceed VMEM; use 'xla'\."),
    ],
)
def test_rows_too_long_for_a_kernel_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(rms_norm, implementation=name), jnp.ones((4, 65537)))


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((jnp.ones((2, 3), int),), {}, TypeError, r"x has dtype int32, but must be floating point; cast it"),
        ((jnp.ones((2, 3)), jnp.ones(3, int)), {}, TypeError, r"scale has dtype int32, but must be floating point"),
        ((jnp.ones((2, 3)), jnp.ones(2)), {}, ValueError, r"scale has shape \(2,\), but must have shape \(3,\): one"),
        ((jnp.ones(()),), {}, ValueError, r"x has shape \(\), but must have at least one axis .* reshape it to \(1,\)"),
        ((jnp.ones((2, 3)),), {"eps": "0"}, TypeError, r"eps is a str, but must be a Python number, because"),
        ((jnp.ones((2, 3)),), {"offset": jnp.ones(())}, TypeError, r"offset is a ArrayImpl, but must be a Python"),
        ((jnp.ones((2, 3)),), {"casting_mode": "lama"}, ValueError, r"casting_mode='lama' is unknown; pass one of \("),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"^rms_norm: {message}"):
        rms_norm(*arguments, **options)
