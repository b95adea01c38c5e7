"""Projections whose frozen product and adapters are computed by one kernel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.models.core.remat import ADAPTED
from liger_jax.ops import adapted_linear as op
from liger_jax.ops.block_quantized import BlockQuantized


def adapter(projection: Any) -> tuple[jax.Array, jax.Array]:
    """A, and B times the scale, in float32."""
    return projection.lora_a[...], projection.scale * projection.lora_b[...]


def one_projection(x: Float[Array, "*rows in"], projection: Any) -> Float[Array, "*rows out"] | None:
    """x·W + scale·(x·A)·B without a bias; `None` where these have to be separate products."""
    if not _are_plain(projection):
        return None
    taken = _input(x, projection)
    if taken is None or not op.can_add(taken, projection.kernel[...]):
        return None
    return op.adapted_linear(taken, projection.kernel[...].astype(taken.dtype), *adapter(projection))


def several_projections(x: Float[Array, "*rows in"], projections: Sequence[Any]) -> list[Array] | None:
    """Projections of one input by one product, with A concatenated and B block-diagonal; `None` if they cannot join."""
    if not _are_plain(*projections) or any(each.magnitude is not None for each in projections):
        return None
    if (taken := _input(x, *projections)) is None:
        return None
    kernel = _side_by_side([each.kernel[...] for each in projections], taken.dtype)
    if not op.can_add(taken, kernel):
        return None
    pairs = [adapter(each) for each in projections]
    rank, width = sum(a.shape[1] for a, _ in pairs), kernel.shape[1]
    blocks, row, column = [], 0, 0
    for _, b in pairs:
        rows, columns = b.shape
        blocks.append(jnp.pad(b, ((row, rank - row - rows), (column, width - column - columns))))
        row, column = row + rows, column + columns
    packed = op.adapted_linear(
        taken, kernel.astype(taken.dtype), jnp.concatenate([a for a, _ in pairs], axis=1), sum(blocks)
    )
    # As in `core.attention.in_one_product`: the gradients are concatenated once for all products that read them.
    packed = jax.lax.optimization_barrier(checkpoint_name(packed, ADAPTED))
    outputs, column = [], 0
    for each, (_, b) in zip(projections, pairs, strict=True):
        y = packed[..., column : column + b.shape[1]]
        column += b.shape[1]
        outputs.append(y if each.bias is None else y + each.bias[...].astype(y.dtype))
    return outputs


def gated_mlp(x: Float[Array, "*rows D"], projections: Sequence[Any], activation: str) -> Array | None:
    """down(activation(gate(x))·up(x)); `None` where these have to be separate products."""
    if not _are_plain(*projections) or any(p.magnitude is not None or p.bias is not None for p in projections):
        return None
    taken, kernels = _input(x, *projections), [each.kernel[...] for each in projections]
    if taken is None or not (op.can_add(taken, kernels[0]) and op.can_gate(taken, kernels[1], activation)):
        return None
    kernels = [kernel.astype(taken.dtype) for kernel in kernels]
    return op.adapted_gated_mlp(taken, kernels, [adapter(each) for each in projections], activation=activation)


def _are_plain(*projections: Any) -> bool:
    """Whether all have adapters without dropout, and compute their products as `nnx.Linear` does by default."""
    return all(
        getattr(each, "has_kernels", False)
        and not each.drops
        and each.precision is None
        and each.preferred_element_type is None
        and each.dot_general is jax.lax.dot_general
        and each.promote_dtype is promote_dtype
        and each.dtype == projections[0].dtype
        for each in projections
    )


def _input(x: jax.Array, *projections: Any) -> jax.Array | None:
    """x in the dtype of the products, if that is theirs to say."""
    dtype = projections[0].dtype
    if dtype is None and any(each.kernel[...].dtype != x.dtype for each in projections):
        return None
    return x if dtype is None else x.astype(dtype)


def _side_by_side(kernels: Sequence[Any], dtype: Any) -> Any:
    """Kernels (in, out) as one; quantised ones by their codes."""
    rows = lambda x: (x.shape[0], x.dtype)
    alike = lambda kernel: (jax.tree.structure(kernel), list(map(rows, jax.tree.leaves(kernel))))
    if not isinstance(kernels[0], BlockQuantized) or any(alike(kernel) != alike(kernels[0]) for kernel in kernels):
        return jnp.concatenate([kernel.astype(dtype) for kernel in kernels], axis=1)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *kernels)
