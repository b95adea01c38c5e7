"""What rms_norm and fused_add_rms_norm promise."""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import fused_add_rms_norm, rms_norm
from tests.ops import _norms, _oracle
from tests.ops._oracle import normal
from tests.ops.references import norms as reference

CASTING_MODES = ["llama", "gemma", "none"]
casting_modes = pytest.mark.parametrize("casting_mode", CASTING_MODES)


def plain(x, scale=None, *, casting_mode="llama", offset=0.0, eps=1e-6):
    """The plain expression that a model would use, rounding where the casting mode says."""
    x32 = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = x * rstd.astype(x.dtype) if casting_mode == "none" else x32 * rstd
    if casting_mode == "llama":
        normed = normed.astype(x.dtype)
    if scale is None:
        return normed.astype(x.dtype)
    dtype = jnp.float32 if jnp.float32 in (normed.dtype, scale.dtype) else x.dtype
    return (normed.astype(dtype) * (offset + scale.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,)))).astype(x.dtype)


def plain_fused(x, residual, scale=None, **options):
    """The sum rounded as the residual stream is, and its norm in the other dtype."""
    added = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    return plain(added, scale, **options).astype(x.dtype), added


class RootMeanSquare(_norms.KernelPromises):
    """What the two share: options and rounding."""

    options = {"eps": 1e-6, "offset": 0.0}

    @casting_modes
    @pytest.mark.parametrize("numbers", _oracle.first(1, [(1e-6, 1.0), (0.0, 0.0), (0.3, -2.0)]), ids=str)
    def test_every_option_matches_float64(self, numbers, casting_mode, implementation, rng):
        eps, offset = numbers
        functions = self.make(implementation, eps=eps, offset=offset, casting_mode=casting_mode)
        _oracle.check_float32(*functions, self.arrays(rng, (37, 70)), rng)

    @pytest.mark.parametrize("scale_dtype", _oracle.first(1, ["bfloat16", "float32"]))
    @pytest.mark.parametrize("casting_mode", ["gemma", "none"])
    def test_every_casting_mode_is_no_worse_than_its_plain_expression(
        self, casting_mode, scale_dtype, implementation, rng
    ):
        op, oracle = self.make(implementation, casting_mode=casting_mode)
        arrays = self.arrays(rng, (150, 130), jnp.bfloat16, scale_dtype)
        _oracle.check_half(op, functools.partial(self.plain, casting_mode=casting_mode), oracle, arrays, rng)

    def test_llama_rounds_before_the_scale_and_gemma_after(self, implementation):
        # √3 = 1.7320508 is 1.734375 in bfloat16. Times 1.3125 they are 2.2733 and 2.2764, and the tie is at 2.2734.
        x, scale = jnp.array([[1.0, 0.0, 0.0]], jnp.bfloat16), jnp.full(3, 1.3125, jnp.bfloat16)
        rows = [x, *[jnp.zeros_like(x)] * (self.num_rows - 1)]
        of_mode = lambda mode: jax.jit(self.make(implementation, eps=0.0, casting_mode=mode)[0])(*rows, scale)
        y = {mode: float(jax.tree.leaves(of_mode(mode))[0][0, 0]) for mode in CASTING_MODES}
        assert y == {"llama": 2.28125, "gemma": 2.265625, "none": 2.28125}


class TestRMSNorm(RootMeanSquare):
    op, reference = staticmethod(rms_norm), staticmethod(reference.rms_norm)

    def plain(self, *arrays, **options):
        return plain(*arrays, **options)


class TestFusedAddRMSNorm(RootMeanSquare):
    op, reference = staticmethod(fused_add_rms_norm), staticmethod(reference.fused_add_rms_norm)
    num_rows = 2
    limit = 1 / 32  # a bound for each of them, so that their sum stays finite

    def plain(self, *arrays, **options):
        return plain_fused(*arrays, **options)

    def test_is_the_sum_and_its_rms_norm(self, implementation, rng):
        x, residual, scale = self.arrays(rng, (37, 70), jnp.bfloat16)
        y, added = jax.jit(self.make(implementation)[0])(x, residual, scale)
        assert jnp.array_equal(added, x + residual)
        # XLA may norm the sum before it is rounded.
        assert _oracle.largest_error(y, rms_norm(added, scale, implementation="xla")) <= 2 * jnp.finfo(y.dtype).eps

    @pytest.mark.parametrize("dtypes", _oracle.first(1, [("bfloat16", "float32"), ("float32", "bfloat16")]), ids=str)
    def test_the_residual_stream_keeps_its_own_dtype(self, dtypes, implementation, rng):
        x_dtype, residual_dtype = map(jnp.dtype, dtypes)
        (x,), (residual, scale) = normal(rng, (150, 130), dtype=x_dtype), normal(rng, (150, 130), (130,))
        arrays = [x, residual.astype(residual_dtype), scale]
        op, oracle = self.make(implementation, casting_mode="gemma")
        plain = functools.partial(plain_fused, casting_mode="gemma")
        _oracle.check_half(op, plain, oracle, arrays, rng)
        results = _oracle.value_and_gradients(op, arrays, _oracle.random_cotangents(op, arrays, rng))
        assert [x.dtype for x in results] == [x_dtype, residual_dtype, x_dtype, residual_dtype, jnp.float32]

    def test_both_inputs_have_one_gradient(self, implementation, rng):
        arrays = self.arrays(rng, (37, 70))
        op, _ = self.make(implementation)
        _, _, dx, dresidual, _ = _oracle.value_and_gradients(op, arrays, _oracle.random_cotangents(op, arrays, rng))
        assert jnp.array_equal(dx, dresidual)

    def test_an_unused_output_adds_nothing_to_the_gradient(self, implementation, rng):
        x, residual, scale = self.arrays(rng, (37, 70))
        (weights,) = normal(rng, (37, 70))
        op, _ = self.make(implementation)
        gradient = lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(x)
        ours = gradient(lambda x: op(x, residual, scale)[0] * weights)
        alone = gradient(lambda x: rms_norm(x + residual, scale, implementation="xla") * weights)
        assert _oracle.largest_error(ours, alone) < 1e-5
        assert jnp.array_equal(gradient(lambda x: op(x, residual, scale)[1]), jnp.ones_like(x))

    def test_without_a_residual_x_is_the_stream(self, implementation, rng):
        x, _, scale = self.arrays(rng, (37, 70))
        op, reference = self.make(implementation)
        ours, plain = (lambda x, scale: op(x, None, scale)), (lambda x, scale, f=plain_fused: f(x, 0 * x, scale))
        _oracle.check_float32(ours, functools.partial(plain, f=reference), [x, scale], rng)
        x, scale = x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16)
        _oracle.check_half(ours, plain, functools.partial(plain, f=reference), [x, scale], rng)
        assert jnp.array_equal(ours(x, scale)[1], x)

    def test_a_residual_of_another_shape_is_refused(self, unchecked_types):
        with pytest.raises(ValueError, match=r"^fused_add_rms_norm: residual has shape \(3, 3\), but must .*\(2, 3\)"):
            fused_add_rms_norm(jnp.ones((2, 3)), jnp.ones((3, 3)))


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((jnp.ones((2, 3), int),), {}, TypeError, r"x has dtype int32, but must be floating point; cast it"),
        ((jnp.ones((2, 3)), jnp.ones(3, int)), {}, TypeError, r"scale has dtype int32, but must be floating point"),
        ((jnp.ones((2, 3)), jnp.ones(2)), {}, ValueError, r"scale has shape \(2,\), but must have shape \(3,\): one"),
        ((jnp.ones((3, 0)),), {}, ValueError, r"x has shape \(3, 0\), whose last axis must have elements to normalise"),
        ((jnp.ones(()),), {}, ValueError, r"x has shape \(\), but must have at least one axis .* reshape it to \(1,\)"),
        ((jnp.ones((2, 3)),), {"eps": "0"}, TypeError, r"eps is a str, but must be a Python number, because"),
        ((jnp.ones((2, 3)),), {"offset": jnp.ones(())}, TypeError, r"offset is a ArrayImpl, but must be a Python"),
        ((jnp.ones((2, 3)),), {"casting_mode": "lama"}, ValueError, r"casting_mode='lama' is unknown; pass one of \("),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"^rms_norm: {message}"):
        rms_norm(*arguments, **options)
