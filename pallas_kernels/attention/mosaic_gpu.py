"""Causal attention in Pallas Mosaic GPU (Hopper). It computes only visible scores, in packed rows and in windows.

The kernels are warp-specialised and persistent. A block has three warpgroups: one copies tiles into rings of shared
memory, and two compute 64 rows each. In the forward, one of the two makes its softmax while the other multiplies.
Blocks of keys that no query of a tile sees are neither copied nor multiplied, and blocks of keys that all its queries
see are not masked (intervals.py).
The backward computes dq by tiles of queries, and dk and dv by tiles of keys. Each kernel recomputes the scores, so
there are seven products. For some shapes of rows of one document, one kernel computes all three with five products
(`config.ONE_PASS` lists them). It accumulates dq in memory in a fixed order, so every run gives the same bits.
Rounding: scores, softmax, sums and accumulators are float32; weights and scores' gradients are rounded to q's dtype for
their products.
On an H100, packed rows take 0.22 to 0.64 of the time that cuDNN takes for the same rows without segments. The time
grows with the number of visible scores (benchmarks/results/attention.md).
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.attention import (
    config,
    mosaic_gpu_forward,
    mosaic_gpu_gradients,
    mosaic_gpu_key_gradients,
    mosaic_gpu_query_gradient,
)
from liger_jax.pallas_kernels.attention.config import Typed
from liger_jax.pallas_kernels.attention.config import unsupported as unsupported
from liger_jax.pallas_kernels.attention.formulas import Scores
from liger_jax.pallas_kernels.attention.intervals import Segments, intervals

_ROWS = 8  # positions that the copy engine moves at a time


def _padded(*arrays: jax.Array) -> list[jax.Array]:
    """(B, T, heads, H) → T padded to whole copies with positions that nobody sees, H to one of `config.WIDTHS`."""
    width = arrays[0].shape[3]
    wider = next(size for size in config.WIDTHS if size >= width)
    padding = lambda x: ((0, 0), (0, -x.shape[1] % _ROWS), (0, 0), (0, wider - width))
    return [jnp.pad(x, padding(x)) if any(end for _, end in padding(x)) else x for x in arrays]


def _scores(softcap: float | None, scale: float | None, width: int) -> Scores:
    return Scores(softcap, width**-0.5 if scale is None else scale)


def takes_one_pass(q: Typed, k: Typed, segments: Any, window: int | None, others: Any = ()) -> bool:
    """Whether dq is computed together with dk and dv: in rows of one document, if that was measured to be faster."""
    if segments is not None:
        return False
    # JAX 0.10 compiles no barrier of a number, without which registers spill. To the interpreter blocks have no order.
    is_possible = jax.__version_info__ >= (0, 11) and not hopper.is_interpreted()
    is_possible &= all(map(hopper.can_map_warps, jax.tree.leaves((q, k, others))))
    return is_possible and config.is_faster_in_one_pass(q, k, window)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    q_offset: jax.Array | int | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """q (B, Tq, Q, H), k and v (B, Tk, K, H) → out (B, Tq, Q, H), and log2 Σ exp2 of the scores (B, Q, Tq or more).

    The queries are at positions `q_offset` and after in the row of keys, or, with None, from the first on. `segments`
    are those of the keys.
    """
    _, q_length, _, width = q.shape
    bounds = intervals(k.shape[1], segments, window, q_length=q_length, q_offset=q_offset)
    scores = _scores(softcap, scale, width)
    q, k, v = _padded(q, k, v)
    out, lse = mosaic_gpu_forward.forward(q, k, v, bounds, scores)
    return out[:, :q_length, :, :width], lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    q_offset: jax.Array | int | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v, the forward's out and lse, and do, the gradient by out → dq, dk, dv in the shapes of q, k and v."""
    (_, q_length, _, width), k_length = q.shape, k.shape[1]
    bounds = intervals(k_length, segments, window, q_length=q_length, q_offset=q_offset)
    scores = _scores(softcap, scale, width)
    delta = jnp.einsum("btqh,btqh->bqt", out.astype(jnp.float32), do.astype(jnp.float32))
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, lse.shape[2] - q_length)))
    q, k, v, do = _padded(q, k, v, do)
    operands = q, k, v, do, lse, delta, bounds, scores
    if takes_one_pass(q, k, segments, window, (v, do, lse, q_offset)):
        dq, dk, dv = mosaic_gpu_gradients.gradients(*operands)
    else:
        dq = mosaic_gpu_query_gradient.query_gradient(*operands)
        dk, dv = mosaic_gpu_key_gradients.key_gradients(*operands)
    return dq[:, :q_length, :, :width], dk[:, :k_length, :, :width], dv[:, :k_length, :, :width]
