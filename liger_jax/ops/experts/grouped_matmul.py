"""Products of rows with the weight of their group."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Integer

from liger_jax.ops import checks, layout, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Choice, Implementation, Kernel, Kernels
from liger_jax.pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu, xla

_OP = "grouped_matmul"
_MODULES = {"xla": xla, "mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}
KERNELS = Kernels(_OP, _MODULES, defaults={"gpu": ("mosaic_gpu",), "tpu": ("mosaic_tpu",)})
_SECOND_DERIVATIVES = "call jax.lax.ragged_dot, which is plain JAX"


@dataclasses.dataclass(frozen=True)
class Products:
    """The three products of a grouped weight."""

    forward: Kernel  # x · w of each row's group
    transposed: Kernel  # y · wᵀ of each row's group, for the gradient of x
    weight_gradient: Kernel  # aᵀ · b over each group's rows

    @classmethod
    def of(cls, choice: Choice, *, transpose_w: bool, weight_dtype: Any, precision: Any) -> "Products":
        """The products of the chosen implementation."""
        return cls(
            choice.kernel("product", transpose_w=transpose_w, precision=precision),
            choice.kernel("product", transpose_w=not transpose_w, precision=precision),
            choice.kernel("weight_gradient", dtype=weight_dtype, precision=precision),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_matmul_vjp(x, w, group_sizes, fill, transpose_w, products):
    return products.forward.run(*guarded(_OP, x, w, group_sizes, fill))


def _forward_rule(x, w, group_sizes, fill, transpose_w, products):
    y = products.forward.run(*guarded(_OP, x.value, w.value, group_sizes.value, fill.value))
    # A residual's shape says which gradients are wanted, as in `gated_mlp`.
    needs = [jnp.zeros(int(primal.perturbed), jnp.float32) for primal in (x, w)]
    kept_x = x.value if w.perturbed else jnp.zeros((0, *x.value.shape[1:]), x.value.dtype)
    return y, (needs, kept_x, w.value, group_sizes.value, fill.value)


def _backward_rule(transpose_w, products, residuals, dy):
    (by_x, by_w), x, w, group_sizes, fill = residuals
    dx = dw = None
    if by_x.size:
        dx = products.transposed.run(*guarded(_OP, dy, w, group_sizes, fill))
    if by_w.size:
        factors = (dy, x) if transpose_w else (x, dy)
        dw = products.weight_gradient.run(*guarded(_OP, *factors, group_sizes, fill))
    return dx, dw, None, None


_grouped_matmul_vjp.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_grouped_matmul = jax.jit(_grouped_matmul_vjp, static_argnums=(4, 5), inline=True)


def guarded(op: str, *arrays: Any) -> tuple[Any, ...]:
    """The arrays, or None, guarded: it is an error to partition or to differentiate an implementation's results."""
    return meshes.opaque(arrays, op, _SECOND_DERIVATIVES)


def grouped_matmul(
    x: Float[ArrayLike, "M K"],
    w: Float[ArrayLike, "E in out"],
    group_sizes: Integer[ArrayLike, " E"],
    *,
    transpose_w: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """Multiplies each row of x with the weight of its group: y[m] = x[m] · w[group of m].

    Rows are sorted by group: the first `group_sizes[0]` rows are multiplied with `w[0]`, the next `group_sizes[1]` rows
    with `w[1]`, and so on. Groups may have any size, including 0. The result of rows after the last group is zero, and
    their values, NaN included, affect neither results nor gradients. Sums are float32 (float64 for float64). Only `x`
    and `w` are kept for the backward, which computes one product for each gradient that is needed. Neither direction
    multiplies rows with other groups' weights.

    Args:
        x: (M, K), any float dtype.
        w: (E, K, N) in x.dtype; (E, N, K) with `transpose_w`.
        group_sizes: (E,), integers of at least 0 whose sum is at most M. Other sizes are a ValueError if their values
            are known, and otherwise make everything NaN.
        transpose_w: whether `w` is (E, N, K), so that y[m] = x[m] · wᵀ.
        implementation: None to choose, or "xla", "mosaic_gpu" (Hopper, for 16 bits and widths that are multiples of 64)
            or "mosaic_tpu" (for float32 and bfloat16); see `liger_jax.ops`.

    Returns:
        (M, N) in x.dtype.

    Raises:
        ValueError: an array is sharded over a mesh with Explicit axes.

    Example:
        >>> x, w = jnp.ones((4, 2)), jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
        >>> grouped_matmul(x, w, jnp.array([1, 2])).tolist()
        [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0], [0.0, 0.0]]

    References:
        Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022 (arXiv:2211.15841).
    """
    x, w, group_sizes = _checked(x, w, group_sizes, transpose_w)
    m, n = x.shape[0], w.shape[1 if transpose_w else 2]
    if x.size == 0 or w.size == 0:
        return jnp.zeros((m, n), x.dtype)
    choice = KERNELS.choose(implementation, x, w)
    products = Products.of(
        choice, transpose_w=transpose_w, weight_dtype=w.dtype, precision=checks.current_precision(_OP, None)
    )
    sizes, fill = usable_sizes(group_sizes, m)
    return _grouped_matmul(*meshes.align_varying(x, w, sizes, fill), transpose_w, products)


def usable_sizes(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Sizes (E,) int32 that fit m rows, and the value of rows and weights without a group: 0, or NaN for wrong sizes.

    If sizes are wrong, there are no groups at all.
    """
    fits = (group_sizes >= 0) & (group_sizes <= m)
    sizes = jnp.where(fits, group_sizes, 0).astype(jnp.int32)
    # Their sum in two halves of 16 bits, which do not wrap around.
    low, high = (jnp.sum(half, dtype=jnp.int32) for half in (sizes % 2**16, sizes // 2**16))
    high += low // 2**16
    sum_fits = (high < m // 2**16) | ((high == m // 2**16) & (low % 2**16 <= m % 2**16))
    is_right = jnp.all(fits) & sum_fits
    return jnp.where(is_right, sizes, 0), jnp.where(is_right, 0.0, jnp.nan).astype(jnp.float32)


def _checked(x: Any, w: Any, group_sizes: Any, transpose_w: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arguments as JAX's arrays, checked."""
    checks.check_flag(_OP, transpose_w=transpose_w)
    x, w = checks.floating(_OP, x=x, w=w)
    group_sizes = checks.as_array(_OP, "group_sizes", group_sizes)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"{_OP}: group_sizes has dtype {group_sizes.dtype}, but must be of integers, numbers of rows; cast it, for "
            "example group_sizes.astype(jnp.int32)."
        )
    checks.check_choice(_OP, "transpose_w", transpose_w, (False, True))
    expected = "(E, N, K)" if transpose_w else "(E, K, N)"
    if x.ndim != 2 or w.ndim != 3 or w.shape[2 if transpose_w else 1] != x.shape[1]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and w {w.shape}, but they must be (M, K) and {expected}; pass "
            f"transpose_w={not transpose_w} if the weights are the other way round."
        )
    checks.check_shape(_OP, "group_sizes", group_sizes, w.shape[:1], "it has the number of rows of each of w's groups")
    if w.dtype != x.dtype:
        raise ValueError(
            f"{_OP}: w has dtype {w.dtype} and x {x.dtype}, but both must have the dtype of the product; cast one, "
            "for example w.astype(x.dtype)."
        )
    refuse_explicit(_OP, x, w, group_sizes)
    if not isinstance(group_sizes, Tracer) and group_sizes.is_fully_addressable:
        sizes = np.asarray(group_sizes, np.int64)
        if sizes.size and (sizes.min() < 0 or sizes.sum() > x.shape[0]):
            raise ValueError(
                f"{_OP}: group_sizes has a least size of {sizes.min()} and a sum of {sizes.sum()}, but sizes must be "
                f"at least 0 and their sum at most M = {x.shape[0]}, the rows of x; count them with jnp.bincount."
            )
    return x, w, group_sizes


def refuse_explicit(op: str, *arrays: jax.Array | None) -> None:
    """Raises a ValueError where an array is sharded over a mesh with Explicit axes."""
    if any(x is not None and layout.is_explicit(x) for x in arrays):
        raise ValueError(
            f"{op}: an array is sharded over a mesh with Explicit axes, over which rows that are sorted by group "
            "cannot be split; call it inside jax.shard_map, where each device sorts its own rows."
        )
