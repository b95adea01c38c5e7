"""How a loss is measured: against a float64 oracle in NumPy, its gradients against the oracle's central differences."""

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = 2e-5  # share of the largest reference value, in float32
STEP = 1e-5  # step of the central differences: their error is near 1e-10


def float32(x):
    """The values that both sides compute from."""
    return np.asarray(x, np.float32)


def numerical_gradient(function, x):
    """The gradient by central differences in float64; `function` returns a number."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += STEP
        down[index] -= STEP
        gradient[index] = (function(up) - function(down)) / (2 * STEP)
    return gradient


def close(found, expected, tolerance=TOLERANCE, scale=0.0):
    """Checks the largest error, as a share of the largest reference value, or of `scale` if that is larger."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    error, scale = np.abs(found - expected).max(initial=0.0), np.abs(expected).max(initial=scale)
    assert error <= tolerance * scale, f"largest error {error} of {scale}"


def scale_of_sum(value, arrays, gradients):
    """How far a sum moves as its inputs do, 0 for other values. Terms may cancel; their rounding errors do not."""
    if np.ndim(value):
        return 0.0
    return sum(np.abs(x * g).sum() for x, g in zip(arrays, gradients, strict=True))


def assert_matches(ours, oracle, arrays, cotangent=None, constants=()):
    """Values and the gradients by all `arrays`, 0 by those at `constants`, under jit and strict promotion."""
    arrays = [float32(x) for x in arrays]
    exact = [x.astype(np.float64) for x in arrays]
    expected = np.asarray(oracle(*exact))
    weights = np.cos(np.arange(expected.size)).reshape(expected.shape) if cotangent is None else cotangent

    def run(*arrays):
        value, pullback = jax.vjp(ours, *arrays)
        return value, pullback(jnp.asarray(weights, jnp.float32))

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        value, gradients = jax.jit(run)(*(jnp.asarray(x) for x in arrays))
    assert value.dtype == jnp.float32
    of_one = lambda i: lambda x: float(np.sum(weights * oracle(*exact[:i], x, *exact[i + 1 :])))
    gradient = lambda i, x: np.zeros_like(x) if i in constants else numerical_gradient(of_one(i), x)
    true_gradients = [gradient(i, x) for i, x in enumerate(exact)]
    close(value, expected, scale=scale_of_sum(expected, exact, true_gradients))
    for found, gradient in zip(gradients, true_gradients, strict=True):
        close(found, gradient)
