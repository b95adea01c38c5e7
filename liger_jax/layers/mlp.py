"""Gated feed-forward layers: one op where the projections are plain, else these around the op of a gated unit.

The projections are called as in checkpoints: `gate_proj`, `up_proj` and `down_proj`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from liger_jax import ops
from liger_jax.ops._dispatch import Implementation


class _GatedMLP(nnx.Module):
    """down(gated(gate(x), up(x))); a subclass has `gated`, and beside it the activation as `ops.gated_mlp` takes it."""

    activation: str
    recomputed: bool = False  # as the op takes it
    gate_proj: Any  # nnx.Linear, or what stands in for one
    up_proj: Any
    down_proj: Any

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

    def fuses(self) -> bool:
        """Whether the layer is one op, `ops.gated_mlp`: its projections are products with kernels and nothing else.

        Returns:
            A bool; with biases, LoRA, unlike dtypes or a gate of its own, False.
        """
        gate_of = next(kind for kind in type(self).__mro__ if "gated" in vars(kind))
        if "activation" not in vars(gate_of):
            return False
        projections = self.gate_proj, self.up_proj, self.down_proj
        kinds = {(p.kernel.dtype, p.dtype, p.precision) if _is_plain(p) else None for p in projections}
        return len(kinds) == 1 and None not in kinds

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        if not self.fuses():
            return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        kernels = (projection.kernel[...] for projection in (self.gate_proj, self.up_proj, self.down_proj))
        x, *kernels = promote_dtype((x, *kernels), dtype=self.gate_proj.dtype)
        options = dict(precision=self.gate_proj.precision, implementation=self.implementation)
        return ops.gated_mlp(x, *kernels, activation=self.activation, recomputed=self.recomputed, **options)


def _is_plain(projection: Any) -> bool:
    return (
        type(projection) is nnx.Linear
        and projection.bias is None
        and projection.preferred_element_type is None
        and projection.dot_general is jax.lax.dot_general
        and projection.promote_dtype is promote_dtype
    )


class SwiGLUMLP(_GatedMLP):
    """LLaMA's feed-forward layer: down(silu(gate(x))·up(x)), by `ops.gated_mlp` or `ops.swiglu`.

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

    activation = "silu"

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
    """Gemma's feed-forward layer: down(gelu(gate(x))·up(x)), by `ops.gated_mlp` or `ops.geglu`.

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

    @property
    def activation(self) -> str:
        """As `ops.gated_mlp` takes it."""
        return "gelu_tanh" if self.approximate else "gelu"

    def gated(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """gelu(gate)·up.

        Args:
            gate: (..., F), any float dtype.
            up: (..., F), any float dtype.

        Returns:
            (..., F) in up.dtype.
        """
        return ops.geglu(gate, up, approximate=self.approximate, implementation=self.implementation)
