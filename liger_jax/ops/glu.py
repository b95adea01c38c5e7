"""Gated linear units."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.pallas_kernels.glu import triton, xla

# There is no Mosaic TPU kernel: XLA fuses an elementwise op into its neighbours, and a kernel would add a pass over
# memory.
_MODULES = {"xla": xla, "triton": triton}
# Forward and backward at 16384 × 8192 in bf16 on an H200: swiglu 502 µs in XLA and 494 in Triton, geglu 512 and 499
# (benchmarks/results/glu.md). Inside a model, XLA recomputes swiglu in the pass that makes its gradients.
KERNELS = {"swiglu": Kernels("swiglu", _MODULES), "geglu": Kernels("geglu", _MODULES, defaults={"gpu": ("triton",)})}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gated(gate, up, forward, backward):
    return forward.run(*forward.guarded(gate, up))


def _backward_rule(forward, backward, residuals, dy):
    return backward.run(*backward.guarded(dy, *residuals))


_gated.defvjp(lambda gate, up, forward, backward: (forward.run(*forward.guarded(gate, up)), (gate, up)), _backward_rule)


def swiglu(
    gate: Float[ArrayLike, "*batch gates"],
    up: Float[ArrayLike, "*batch F"] | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """The gated linear unit of LLaMA's feed-forward layer: y = silu(gate) · up, with silu(x) = x·σ(x).

    silu is computed in float32 and rounded to up.dtype before the product. Only `gate` and `up` are kept for the
    backward pass, whose arithmetic is float32. The default is XLA, which fuses the op with its neighbours. If there are
    none, Triton's forward takes 4 % less time on an H200, and its backward as long as XLA's.

    Args:
        gate: (..., F), any float dtype; or (..., 2F), gate and then up, as in Phi-3.
        up: (..., F), any float dtype; None if `gate` has both.
        implementation: None to choose, or "xla" or "triton"; see `liger_jax.ops`.

    Returns:
        (..., F) in up.dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> swiglu(jnp.array([0.0, 1.0]), jnp.array([3.0, 2.0])).tolist()
        [0.0, 1.4621]
        >>> swiglu(jnp.array([0.0, 1.0, 3.0, 2.0])).tolist()
        [0.0, 1.4621]

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).
    """
    return _glu("swiglu", gate, up, "silu", implementation)


def geglu(
    gate: Float[ArrayLike, "*batch gates"],
    up: Float[ArrayLike, "*batch F"] | None = None,
    *,
    approximate: bool = True,
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """The gated linear unit of Gemma's feed-forward layer: y = gelu(gate) · up.

    gelu is computed in float32 and rounded to up.dtype before the product. Only `gate` and `up` are kept for the
    backward pass, whose arithmetic is float32. The default is Triton on NVIDIA GPUs, for two arrays in the tanh form,
    and elsewhere XLA, which fuses the op with its neighbours.

    Args:
        gate: (..., F), any float dtype; or (..., 2F), gate and then up.
        up: (..., F), any float dtype; None if `gate` has both.
        approximate: a Python bool. True: gelu(x) = x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2, as in Gemma; False:
            x·Φ(x), which Triton cannot compute, so XLA is used.
        implementation: None to choose, or "xla" or "triton"; see `liger_jax.ops`.

    Returns:
        (..., F) in up.dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> geglu(jnp.array([0.0, 1.0]), jnp.array([3.0, 2.0])).tolist()
        [0.0, 1.6824]
        >>> geglu(jnp.array([0.0, 1.0, 3.0, 2.0])).tolist()
        [0.0, 1.6824]

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).
    """
    if not isinstance(approximate, bool):
        raise TypeError(
            f"geglu: approximate is a {type(approximate).__name__}, but must be a Python bool, because the kernel is "
            "compiled for its value; pass True or False."
        )
    return _glu("geglu", gate, up, "gelu_tanh" if approximate else "gelu", implementation)


def _glu(op: str, gate: ArrayLike, up: ArrayLike | None, activation: str, implementation: Implementation) -> jax.Array:
    gate, up = checks.floating(op, "up", gate=gate, up=up)
    checks.check_shape(op, "up", up, gate.shape, "gate and up are multiplied element by element")
    if up is None and (gate.ndim == 0 or gate.shape[-1] % 2):
        raise ValueError(
            f"{op}: gate has shape {gate.shape}, but without `up` it must hold gate and up side by side, an even "
            "number of columns; pass `up` if it is a separate array."
        )
    # Two arrays are combined element by element, so their columns may be split over the mesh, too.
    if (spec := _explicit.row_spec(gate) if up is None else _explicit.spec_of_explicit(gate)) is not None:
        local = functools.partial(_glu, op, activation=activation, implementation=implementation)
        return _explicit.on_rows(op, local, spec, (gate, up))
    kernels = KERNELS[op]
    if up is None:  # one array of both is not measured, so XLA is its default
        kernels = dataclasses.replace(kernels, defaults={})
    choice = kernels.choose(implementation, gate, up, activation=activation)
    gate, up = meshes.align_varying(gate, up)
    forward, backward = (choice.kernel(direction, activation=activation) for direction in ("forward", "backward"))
    return _gated(gate, up, forward, backward)
