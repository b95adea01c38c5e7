"""Gated feed-forward layers.

Plain projections and the gate run as one op, `ops.gated_mlp`. Projections with a bias or an adapter are called as they
are, around the op of the gate. They are named as in checkpoints: `gate_proj`, `up_proj` and `down_proj`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from liger_jax import ops


class _GatedMLP(nnx.Module):
    """down(gated(gate(x), up(x))). A subclass defines `gated`, and `activation` as `ops.gated_mlp` names it."""

    activation: str
    gate_proj: Any  # nnx.Linear, or a layer that replaces it
    up_proj: Any
    down_proj: Any

    def __init__(
        self,
        width: int,
        inner_width: int,
        *,
        linear: Callable[[int, int], nnx.Module],
        fused: bool = True,
        recomputed: bool = False,
        implementation: str | tuple[str, ...] | None = None,
    ):
        self.gate_proj = linear(width, inner_width)
        self.up_proj = linear(width, inner_width)
        self.down_proj = linear(inner_width, width)
        self.fused, self.recomputed, self.implementation = fused, recomputed, implementation

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        if not (self.fused and are_plain_products(self.gate_proj, self.up_proj, self.down_proj)):
            return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        options = dict(recomputed=self.recomputed, implementation=self.implementation)
        return in_one_op(x, self.gate_proj, self.up_proj, self.down_proj, activation=self.activation, **options)


def are_plain_products(*projections: Any) -> bool:
    """Whether `ops.gated_mlp` can replace these projections: plain products of one dtype and precision."""
    is_plain = all(is_plain_product(p) and p.bias is None for p in projections)
    return is_plain and len({(p.kernel.dtype, p.dtype, p.precision) for p in projections}) == 1


def is_plain_product(projection: Any) -> bool:
    """Whether a projection is x·kernel, plus a bias if it has one, as `nnx.Linear` computes it by default."""
    return (
        type(projection) is nnx.Linear
        and projection.preferred_element_type is None
        and projection.dot_general is jax.lax.dot_general
        and projection.promote_dtype is promote_dtype
    )


def in_one_op(
    x: Float[Array, "*batch D"],
    gate_proj: Any,
    up_proj: Any,
    down_proj: Any,
    *,
    activation: str,
    recomputed: bool,
    implementation: str | tuple[str, ...] | None,
) -> Float[Array, "*batch D"]:
    """down(activation(gate(x))·up(x)) by `ops.gated_mlp`."""
    kernels = (projection.kernel[...] for projection in (gate_proj, up_proj, down_proj))
    x, *kernels = promote_dtype((x, *kernels), dtype=gate_proj.dtype)
    options = dict(precision=gate_proj.precision, implementation=implementation)
    return ops.gated_mlp(x, *kernels, activation=activation, recomputed=recomputed, **options)


class SwiGLUMLP(_GatedMLP):
    """LLaMA's feed-forward layer: down(silu(gate(x))·up(x)), by `ops.gated_mlp` or `ops.swiglu`.

    Args:
        width: D, of input and output.
        inner_width: F.
        linear: makes a projection: `linear(in_width, out_width)`.
        fused: whether plain projections and the gate are computed by one op, `ops.gated_mlp`. A subclass that overrides
            `gated` passes False.
        recomputed: whether gate and up are recomputed in the op's backward instead of being kept.
        implementation: which kernel the op runs, as in `ops.gated_mlp`.

    Example:
        >>> import functools
        >>> linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))
        >>> SwiGLUMLP(16, 48, linear=linear)(jax.numpy.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    activation = "silu"

    def gated(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """silu(gate)·up, in up.dtype."""
        return ops.swiglu(gate, up, implementation=self.implementation)


class GeGLUMLP(_GatedMLP):
    """Gemma's feed-forward layer: down(gelu(gate(x))·up(x)), by `ops.gated_mlp` or `ops.geglu`.

    Args:
        approximate: True for the tanh form of GELU, as in Gemma, False for the exact one. The other arguments are those
            of `SwiGLUMLP`.

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
        fused: bool = True,
        recomputed: bool = False,
        implementation: str | tuple[str, ...] | None = None,
    ):
        super().__init__(
            width, inner_width, linear=linear, fused=fused, recomputed=recomputed, implementation=implementation
        )
        self.approximate = approximate

    @property
    def activation(self) -> str:
        """The activation's name in `ops.gated_mlp`."""
        return "gelu_tanh" if self.approximate else "gelu"

    def gated(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """gelu(gate)·up, in up.dtype."""
        return ops.geglu(gate, up, approximate=self.approximate, implementation=self.implementation)
