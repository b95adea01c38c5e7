"""Gated feed-forward layers: three projections around the op of a gated unit, which keeps only its inputs.

The projections are called as in checkpoints: `gate_proj`, `up_proj` and `down_proj`.
"""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from liger_jax import ops
from liger_jax.ops._dispatch import Implementation


class _GatedMLP(nnx.Module):
    """down(gated(gate(x), up(x))); a subclass has `gated`."""

    def __init__(
        self,
        width: int,
        inner_width: int,
        *,
        linear: Callable[[int, int], nnx.Module],
        implementation: Implementation = None,
    ):
        self.gate_proj = linear(width, inner_width)
        self.up_proj = linear(width, inner_width)
        self.down_proj = linear(inner_width, width)
        self.implementation = implementation

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class SwiGLUMLP(_GatedMLP):
    """LLaMA's feed-forward layer: down(silu(gate(x))·up(x)), the gate by `ops.swiglu`.

    Args:
        width: D, of input and output.
        inner_width: F.
        linear: makes a projection: `linear(in_width, out_width)`.
        implementation: as the op takes it.

    Example:
        >>> import functools
        >>> linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))
        >>> SwiGLUMLP(16, 48, linear=linear)(jax.numpy.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    def gated(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """silu(gate)·up.

        Args:
            gate: (..., F), any float dtype.
            up: (..., F), any float dtype.

        Returns:
            (..., F) in up.dtype.
        """
        return ops.swiglu(gate, up, implementation=self.implementation)


class GeGLUMLP(_GatedMLP):
    """Gemma's feed-forward layer: down(gelu(gate(x))·up(x)), the gate by `ops.geglu`.

    Args:
        width: D, of input and output.
        inner_width: F.
        linear: makes a projection: `linear(in_width, out_width)`.
        approximate: the GELU by tanh, as in Gemma, or exact.
        implementation: as the op takes it.

    Example:
        >>> import functools
        >>> linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))
        >>> GeGLUMLP(16, 48, linear=linear)(jax.numpy.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    def __init__(
        self,
        width: int,
        inner_width: int,
        *,
        linear: Callable[[int, int], nnx.Module],
        approximate: bool = True,
        implementation: Implementation = None,
    ):
        super().__init__(width, inner_width, linear=linear, implementation=implementation)
        self.approximate = approximate

    def gated(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """gelu(gate)·up.

        Args:
            gate: (..., F), any float dtype.
            up: (..., F), any float dtype.

        Returns:
            (..., F) in up.dtype.
        """
        return ops.geglu(gate, up, approximate=self.approximate, implementation=self.implementation)
