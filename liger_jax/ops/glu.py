"""Gated linear units."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _dispatch, _mesh
from liger_jax.pallas_kernels.glu import triton, xla

# No TPU kernel: XLA fuses these elementwise passes into their neighbours, where a kernel would be a wall.
_KERNELS = {"xla": xla, "triton": triton}
_DEFAULTS = {"gpu": ("triton",)}


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the kernel is compiled for."""

    op: str
    activation: str
    choice: str

    def run(self, function: str, *arrays: jax.Array):
        return _dispatch.bind(self.op, _KERNELS, self.choice, function)(*arrays, activation=self.activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _glu(gate, up, options):
    return options.run("forward", gate, up)


def _forward_rule(gate, up, options):
    return options.run("forward", gate, up), (gate, up)


def _backward_rule(options, residuals, dy):
    return options.run("backward", dy, *residuals)


_glu.defvjp(_forward_rule, _backward_rule)


def _checked(op, gate, up, activation, implementation):
    _checks.check_floating(op, gate=gate, up=up)
    _checks.check_shape(op, "up", up, gate.shape, "gate's, element by element")
    choice = _dispatch.choose(op, _KERNELS, _DEFAULTS, implementation, gate, up)
    gate, up = _mesh.align_varying(gate, up)
    return _glu(gate, up, _Options(op, activation, choice))


def swiglu(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], *, implementation: _dispatch.Implementation = None
) -> Float[Array, "*batch F"]:
    """silu(gate) · up, keeping only the two inputs for the backward pass.

    silu(gate) = gate·σ(gate) is computed in float32 and rounded to up.dtype before the product; both gradients are
    computed in float32.

    Args:
        gate: (..., F), any float dtype.
        up: (..., F), any float dtype.
        implementation: None for the platform's default, or "xla", "triton", "triton:interpret", or a tuple of these
            to try in order. On a TPU it is XLA, which fuses the product into its neighbours.

    Returns:
        (..., F) in up.dtype.

    Raises:
        TypeError: `gate` or `up` is not floating point.
        ValueError: the shapes differ, or the named implementation is unknown or cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> print(swiglu(jnp.array([0.0, 1.0]), jnp.array([5.0, 2.0])).round(4))
        [0.     1.4621]

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).
    """
    return _checked("swiglu", gate, up, "silu", implementation)


def geglu(
    gate: Float[Array, "*batch F"],
    up: Float[Array, "*batch F"],
    *,
    approximate: bool = True,
    implementation: _dispatch.Implementation = None,
) -> Float[Array, "*batch F"]:
    """gelu(gate) · up, keeping only the two inputs for the backward pass.

    gelu(gate) is computed in float32 and rounded to up.dtype before the product; both gradients are computed in
    float32.

    Args:
        gate: (..., F), any float dtype.
        up: (..., F), any float dtype.
        approximate: the tanh formula, as Gemma has it; False for the exact a·Φ(a).
        implementation: None for the platform's default, or "xla", "triton", "triton:interpret", or a tuple of these
            to try in order. On a TPU it is XLA, which fuses the product into its neighbours.

    Returns:
        (..., F) in up.dtype.

    Raises:
        TypeError: `gate` or `up` is not floating point.
        ValueError: the shapes differ, or the named implementation is unknown or cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> print(geglu(jnp.array([0.0, 1.0]), jnp.array([5.0, 2.0])).round(4))
        [0.     1.6824]

    References:
        Hendrycks and Gimpel, 2016 (GELU, arXiv:1606.08415); Shazeer, 2020 (arXiv:2002.05202).
    """
    return _checked("geglu", gate, up, "gelu_tanh" if approximate else "gelu", implementation)
