"""The fused distillation losses with Hopper's own product, in Pallas Mosaic GPU.

The product that makes a tile of logits also makes the tile's log-sum-exp, from the logits as they are rounded for the
memory. So the normalisers take no pass over the logits. dW is added to its sum where it is: a weight of 16 bits is
summed in three bytes, of which dW holds the upper two, and another one in float32. All else is XLA's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, product
from liger_jax.pallas_kernels._hopper_tiles import ROWS, Epilogue, Tile, row_staging, staging, store_rows, store_tile
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import transform
from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import Buffers
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs, mosaic_gpu_logit_tiles, mosaic_gpu_tiles
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import weight_gradient, weight_operands
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_gradients import FIRST_CHUNK, LAST_CHUNK, add_to_sum
from liger_jax.pallas_kernels.fused_linear_distillation import chunks
from liger_jax.pallas_kernels.fused_linear_distillation.buffers import Sizes, buffers_with_sum
from liger_jax.pallas_kernels.fused_linear_distillation.chunks import Gradients
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions, Options
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK
from liger_jax.pallas_kernels.tiles import cdiv, full_like, out_like

_LOG2_E = math.log2(math.e)


def unsupported(*arrays: jax.Array | None, options: Options) -> str | None:
    """16-bit operands, in sizes that the copy engine moves in tiles."""
    for name, head, x, weight in _heads(arrays, options):
        d, v = x.shape[-1], weight.shape[head.vocab_dim]
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"Hopper's matrix units support bfloat16 and float16, and {name}'s hidden states are {x.dtype}."
        if x.shape[0] < ROWS:
            return f"a tile has {ROWS} tokens, and there are {x.shape[0]}."
        if d % 64 or v % 64:
            return f"the copy engine needs multiples of 64 as D and V, and {name} has D={d} and V={v}."
    if options.vocab_axis is not None:
        return "the normaliser of a vocabulary that is split is not known in the product's epilogue."
    return None


def buffers(sizes: Sizes, mode: str, tokens: int) -> Buffers:
    """The bytes of a mode with chunks of so many tokens: of the sum's three bytes for 16 bits, dW holds two."""
    is_in_bytes = sizes.weight_itemsize == 2
    return buffers_with_sum(sizes, mode, tokens, sizes.float32_sum_bytes // (4 if is_in_bytes else 1))


def _heads(arrays, options):
    student, teacher = arrays[:3], arrays[3:]
    yield "the student", options.student, *student[:2]
    if len(teacher) == 3:
        yield "the teacher", options.teacher, *teacher[:2]


def _logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None, head: HeadOptions) -> tuple[jax.Array, jax.Array]:
    """Raw logits (n, V) in x's dtype, and log Σ exp(z) (n,) of these, as `chunks.logits` says why."""
    (n, d), v = x.shape, weight.shape[head.vocab_dim]
    tiles = mosaic_gpu_logit_tiles(d, n, v)

    def finish(tile: Tile, refs, scratch):
        u = tile.values if bias is None else tile.values + tile.over_columns(tile.column_vectors[0])
        u = u.astype(x.dtype).astype(jnp.float32)
        z = transform(u, head.logit, hopper.tanh)
        if v % tiles.columns:
            z = jnp.where(tile.column_indices() < v - tile.column, z, -jnp.inf)
        maximum = jnp.max(z, axis=1)
        shift = row_formulas.shift_of(maximum) * _LOG2_E
        exp_sum = jnp.sum(jnp.exp2(z * _LOG2_E - tile.over_rows(shift)), axis=1)
        store_rows(tile, [row_formulas.log_normalizer(maximum, exp_sum)], scratch[:1], refs[:1])
        store_tile(tile, u, scratch[1], refs[1], tile.row, tile.column)

    log_sums, raw = product(
        Factors(x, weight, (1, 1 - head.vocab_dim)),
        tiles,
        Epilogue(
            finish,
            out_types=[out_like(x, (cdiv(v, tiles.columns), n), jnp.float32), out_like(x, (n, v), x.dtype)],
            scratch=[row_staging(tiles, jnp.float32), staging(x.dtype)],
            column_vectors=[] if bias is None else [bias.astype(jnp.float32)],
        ),
        name="fused_linear_distillation_logits",
    )
    return raw, jax.nn.logsumexp(log_sums, axis=0)


def _start_of_sum(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Three bytes for each entry of a weight of 16 bits, which the first chunk fills; otherwise zeros in float32."""
    if dtype.itemsize == 2 and hopper.can_write_in_place(like):
        return hopper.empty(like, shape, dtype), hopper.empty(like, shape, jnp.uint8)
    return full_like(like, shape, 0, jnp.float32)


def _add_to_sum(total: Any, du: jax.Array, x: jax.Array, head: HeadOptions, is_first: Any, is_last: Any) -> Any:
    """The sum with duᵀ · X, in place."""
    if isinstance(total, tuple):
        which = jnp.where(is_first, FIRST_CHUNK, jnp.where(is_last, LAST_CHUNK, 0)).astype(jnp.int32)
        high, low = total
        return add_to_sum(high, low, du, x, which[None], head)
    if not hopper.can_add_in_place(x):
        return total + weight_gradient(du, x, head)

    def finish(tile: Tile, refs, scratch):
        store_tile(tile, tile.values, scratch[0], refs[0], tile.row, tile.column, True)

    operands = weight_operands(du, x, head)
    (total,) = product(
        Factors(*operands, (0, 0)),
        mosaic_gpu_tiles(du.shape[0], *(operand.shape[1] for operand in operands)),
        Epilogue(finish, in_place=[total], scratch=[staging(total.dtype)]),
        name="fused_linear_distillation_weight_gradient",
    )
    return total


def _end_of_sum(total: Any, dtype: Any) -> jax.Array:
    return total[0] if isinstance(total, tuple) else total.astype(dtype)


_BACKEND = chunks.Backend(
    logits=_logits,
    empty=hopper.empty_for_slices,
    start_of_sum=_start_of_sum,
    add_to_sum=_add_to_sum,
    end_of_sum=_end_of_sum,
    chunk_multiple=ROWS,
)


def by_tokens(
    student: Head, teacher: Head | TopK, labels: jax.Array, scale: jax.Array, *, options: Any, needs: Needs
) -> tuple[jax.Array, Any, Gradients]:
    """`chunks.by_tokens` with Hopper's products."""
    return chunks.by_tokens(student, teacher, labels, scale, options=options, needs=needs, backend=_BACKEND)
