"""The feed-forward of a mixture of experts with low-rank adapters, quantised, or sharded over several devices."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.experts.expert_order import Order, sorted_by_expert, summed
from liger_jax.ops.experts.expert_parallel import on_shards
from liger_jax.ops.experts.grouped_matmul import grouped_matmul
from liger_jax.ops.experts.moe_mlp import EXPERT_GATE_UP
from liger_jax.ops.kernels import Implementation
from liger_jax.pallas_kernels.glu import formulas as glu
from liger_jax.pallas_kernels.grouped_matmul import formulas
from liger_jax.pallas_kernels.tiles import cdiv, promoted

DENSE_BYTES = 2**28  # the most bytes of experts that are dequantised at once, unless a single one takes more
RANK_MULTIPLE = 64  # of the ranks that the grouped product's kernels take


class ExpertAdapter(NamedTuple):
    """The product a · b that is added to the weight of each expert."""

    a: jax.Array  # (E, in, rank)
    b: jax.Array  # (E, rank, out), which holds the adapter's scale


def adapted_moe_mlp(
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    experts: Integer[Array, "N k"],
    gate_up: Any,
    down: Any,
    *,
    gate_up_bias: Float[Array, "E gates"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    gate_up_adapter: ExpertAdapter | None = None,
    down_adapter: ExpertAdapter | None = None,
    activation: str,
    implementation: Implementation = None,
    axis: str | None = None,
) -> Float[Array, "N D"]:
    """`moe_mlp` with experts that have adapters, are `BlockQuantized`, or are sharded over the devices of a mesh axis.

    A weight's product and its adapter's are apart: rows · w + (rows · a) · b, where the grouped product makes all
    three. No sum w + a · b is made, and no gradient of a w that is not trained. Quantised experts, which never are, are
    made dense a few at a time, forward and backward: `DENSE_BYTES` of them. Beside what `moe_mlp` keeps for the
    backward, rows of D for each choice are kept, twice, and rows of F.

    With an `axis`, inside `jax.shard_map`, each device has its own tokens and its own E of the experts, in the axis'
    order, and `experts` number the experts of all devices. Tokens and sums are sent as `expert_parallel` describes. The
    backward then recomputes all but the arguments, which alone are kept.
    """
    arrays = gate_up, down, gate_up_bias, down_bias, gate_up_adapter, down_adapter
    feed_forward, own = _FeedForward(activation, implementation), gate_up.shape[0]
    if axis is not None:
        return on_shards(x, weights, experts, own, arrays, feed_forward, axis)
    order = sorted_by_expert(experts, own)
    return _rows_of_tokens(feed_forward(_rows_of_experts(x, order), None, order.sizes, arrays), weights, order)


@dataclasses.dataclass(frozen=True)
class _FeedForward:
    """The results of rows that are sorted by expert, in groups of given sizes, times the rows' weights if there are."""

    activation: str
    implementation: Implementation

    def __call__(self, rows: jax.Array, of_rows: jax.Array | None, sizes: jax.Array, arrays: Any) -> jax.Array:
        gate_up, down, gate_up_bias, down_bias, gate_up_adapter, down_adapter = arrays
        group = formulas.group_of_rows(sizes, rows.shape[0])
        product = functools.partial(_product, sizes=sizes, implementation=self.implementation)
        both = _with_bias(product(rows, gate_up, gate_up_adapter), gate_up_bias, group)
        h = _gated(checkpoint_name(both, EXPERT_GATE_UP), of_rows, self.activation)
        return _with_bias(product(h, down, down_adapter), down_bias, group, of_rows)


def _with_bias(y: jax.Array, bias: jax.Array | None, group: jax.Array, of_rows: Any = None) -> jax.Array:
    """Adds each row's bias, weighed where rows are.

    Rows after the last group have none, and none has their cotangents, which may be NaN.
    """
    if bias is None:
        return y
    own = bias.at[group].get(mode="fill", fill_value=0)
    return y + (own if of_rows is None else (of_rows * own.astype(of_rows.dtype)).astype(y.dtype))


def _product(rows, weight, adapter, *, sizes, implementation):
    """rows (N·k, in) → (N·k, out) by each row's expert."""
    times = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
    y: Any
    if isinstance(weight, BlockQuantized):
        y = _times_quantized(rows, weight, sizes, implementation)
    else:
        y = times(rows, weight)
    if adapter is None:
        return y
    spare = -adapter.a.shape[-1] % RANK_MULTIPLE
    a, b = jnp.pad(adapter.a, ((0, 0), (0, 0), (0, spare))), jnp.pad(adapter.b, ((0, 0), (0, spare), (0, 0)))
    return y + times(times(rows, a), b)


# --- rows: dispatch and return, which are gathers in both directions --------------------------------------------------


def _gathered(x: jax.Array, order: Order) -> jax.Array:
    """x (N, D) → (N·k, D): each sorted row's token."""
    return x.at[order.token].get(mode="promise_in_bounds")


@jax.custom_vjp
def _rows_of_experts(x: jax.Array, order: Order) -> jax.Array:
    """x (N, D) → (N·k, D): each sorted row's token."""
    return _gathered(x, order)


def _of_experts_backward(order, drows):
    return jnp.where(order.is_right, summed(drows, order.row), jnp.nan).astype(drows.dtype), None


_rows_of_experts.defvjp(lambda x, order: (_gathered(x, order), order), _of_experts_backward)


@jax.custom_vjp
def _rows_of_tokens(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    """rows (N·k, D), weights (N, k) → (N, D): the weighted sum over a token's choices."""
    weights = jnp.where(order.is_right, weights, jnp.nan).astype(promoted(rows.dtype, jnp.float32))
    return summed(rows, order.row, weights).astype(rows.dtype)


def _of_tokens_forward(rows, weights, order):
    return _rows_of_tokens(rows, weights, order), (rows, weights, order)


def _of_tokens_backward(residuals, dy):
    rows, weights, order = residuals
    wide = promoted(rows.dtype, jnp.float32)
    dy_rows = _gathered(dy, order).astype(wide)
    drows = (order.by_row(weights).astype(wide) * dy_rows).astype(rows.dtype)
    return drows, order.by_choice(jnp.sum(rows.astype(wide) * dy_rows, axis=1)).astype(weights.dtype), None


_rows_of_tokens.defvjp(_of_tokens_forward, _of_tokens_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gated(both: jax.Array, of_rows: jax.Array | None, activation: str) -> jax.Array:
    """act(gate) · up of (M, 2F), times the rows' weights (M, 1) if there are; only its inputs are kept."""
    h = glu.product(*jnp.split(both, 2, axis=1), activation=activation)
    return h if of_rows is None else (of_rows * h.astype(of_rows.dtype)).astype(h.dtype)


def _gated_backward(activation, residuals, dh):
    both, of_rows = residuals
    gate, up = jnp.split(both, 2, axis=1)
    dh, dof_rows = dh.astype(promoted(dh.dtype, jnp.float32)), None
    if of_rows is not None:
        h = glu.product(gate, up, activation=activation).astype(dh.dtype)
        dh, dof_rows = of_rows * dh, jnp.sum(h * dh, axis=1, keepdims=True).astype(of_rows.dtype)
    return jnp.concatenate(glu.gradients(dh, gate, up, activation=activation), axis=1), dof_rows


_gated.defvjp(lambda both, of_rows, activation: (_gated(both, of_rows, activation), (both, of_rows)), _gated_backward)


# --- quantised experts ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _times_quantized(rows: jax.Array, weight: BlockQuantized, sizes: jax.Array, implementation: Any) -> jax.Array:
    """rows (N·k, in) · weight (E, in, out) of each row's expert."""
    return _in_chunks(rows, weight, sizes, transpose_w=False, implementation=implementation)


def _times_quantized_forward(rows, weight, sizes, implementation):
    return _times_quantized(rows, weight, sizes, implementation), (weight, sizes)


def _times_quantized_backward(implementation, residuals, dy):
    weight, sizes = residuals
    return _in_chunks(dy, weight, sizes, transpose_w=True, implementation=implementation), None, None


_times_quantized.defvjp(_times_quantized_forward, _times_quantized_backward)


def experts_at_once(shape: tuple[int, ...], dtype: Any) -> int:
    """How many quantised experts are dequantised at the same time.

    Returns the largest divisor of E whose weights fit in `DENSE_BYTES`; at least 1.
    """
    count, of_one = shape[0], shape[1] * shape[2] * jnp.dtype(dtype).itemsize
    return max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * of_one <= DENSE_BYTES))


def _in_chunks(x, weight, sizes, *, transpose_w, implementation):
    """The grouped product, one chunk of experts after the other, of which only one is dequantised.

    The rows of a chunk are multiplied block by block. A block may end after the chunk, where it writes zeros that the
    next chunk's blocks overwrite.
    """
    count, size = weight.shape[0], experts_at_once(weight.shape, x.dtype)
    options = dict(transpose_w=transpose_w, implementation=implementation)
    if size == count:
        return grouped_matmul(x, weight.astype(x.dtype), sizes, **options)
    m, n = x.shape[0], weight.shape[1 if transpose_w else 2]
    rows = cdiv(cdiv(m * size, count), 8) * 8
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    of_chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), (weight, ends - sizes, ends))
    x, y = jnp.pad(x, ((0, rows), (0, 0))), jnp.zeros((m + rows, n), x.dtype)

    def chunk(y, of_chunk):
        codes, begins, ends = of_chunk
        dense, first = codes.astype(x.dtype), begins[0]

        def block(i, y):
            start = first + i * rows
            own = jnp.clip(ends - start, 0, rows) - jnp.clip(begins - start, 0, rows)
            rows_out = grouped_matmul(jax.lax.dynamic_slice_in_dim(x, start, rows), dense, own, **options)
            return jax.lax.dynamic_update_slice_in_dim(y, rows_out, start, axis=0)

        return jax.lax.fori_loop(0, (ends[-1] - first + rows - 1) // rows, block, y), None

    return jax.lax.scan(chunk, y, of_chunks)[0][:m]
