"""Causal self-attention, by the fastest kernel that the device has."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from liger_jax.ops import _explicit, checks, layout, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Choice, Implementation, Kernels
from liger_jax.ops.place import Place, place_of
from liger_jax.ops.segment_ids import check_segment_ids
from liger_jax.pallas_kernels.attention import cudnn, mosaic_gpu, splash, triton, xla
from liger_jax.pallas_kernels.attention.formulas import sinks_gradient, with_sinks
from liger_jax.pallas_kernels.attention.intervals import Segments

_OP = "causal_attention"
_MODULES = {"xla": xla, "cudnn": cudnn, "mosaic_gpu": mosaic_gpu, "triton": triton, "splash": splash}
# On an H200, forward and backward of one segment in rows of 2,048 to 32,768 take 0.88 to 0.97 of cuDNN's time at width
# 64. At 128 they take 0.90 to 1.07 of it, mostly 0.98 and more, and on an H100 0.98 to 1.47 in an earlier order of
# tiles, so these stay cuDNN's. On an H100, a window of 1,024 takes 0.76, 0.94, 0.98 and 1.02 of it at 512, 2,048, 8,192
# and 32,768 positions, and no workspace of cuDNN (benchmarks/results/attention.md). cuDNN takes neither packed rows nor
# softcaps.
_KERNELS = Kernels(_OP, _MODULES, defaults={"gpu": ("cudnn", "mosaic_gpu", "triton"), "tpu": ("splash",)})
_HOPPER_FIRST = Kernels(_OP, _MODULES, defaults={"gpu": ("mosaic_gpu", "cudnn", "triton"), "tpu": ("splash",)})
_LONG = 2048  # positions from which Hopper's kernels, with gradients in one pass, beat cuDNN's at width 64
ATTENTION_OUTPUT = "attention_output"  # `checkpoint_name` of the forward's values that the backward needs


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q, k, v, sinks, segments, q_offset, forward, backward):
    return _out_and_log_sums(q, k, v, sinks, segments, q_offset, forward)[0]


def _out_and_log_sums(q, k, v, sinks, segments, q_offset, forward):
    results = forward.run(*forward.guarded(q, k, v, segments), q_offset)
    return results if sinks is None else with_sinks(*results, *forward.guarded(sinks))


def _forward_rule(q, k, v, sinks, segments, q_offset, forward, backward):
    results = _out_and_log_sums(q, k, v, sinks, segments, q_offset, forward)
    out, log_sums = checkpoint_name(results, ATTENTION_OUTPUT)
    return out, ((q, k, v, segments, out, log_sums), sinks, q_offset)


def _backward_rule(forward, backward, residuals, dout):
    arrays, sinks, q_offset = residuals
    *_, out, log_sums = arrays
    dsinks = None if sinks is None else sinks_gradient(out, log_sums, dout, sinks)
    return *backward.run(*backward.guarded(*arrays, dout), q_offset), dsinks, None, None


_attend.defvjp(_forward_rule, _backward_rule)


def causal_attention(
    q: Float[ArrayLike, "B Tq Q H"],
    k: Float[ArrayLike, "B T K H"],
    v: Float[ArrayLike, "B T K H"],
    segment_ids: Int[ArrayLike, "B S"] | Segments | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[ArrayLike, " Q"] | None = None,
    q_offset: int | Int[ArrayLike, ""] | None = None,
    sequence_axis: str | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Tq Q H"]:
    """softmax(softcap·tanh(scale·q·kᵀ/softcap))·v over the keys that a position attends to; Q is a multiple of K.

    A position attends to itself and to the earlier positions of its segment, within its window. No (T, T) array is ever
    in memory, neither in the forward nor in the backward. Scores and their softmax are float32. The softmax's weights
    are rounded to q.dtype.

    TPUs use splash attention. NVIDIA GPUs from Ampere on use cuDNN if there are no segments and no softcap, except that
    Hopper GPUs do not use it for windows shorter than T, nor, from JAX 0.11 on, for most rows of 2,048 and more with
    heads of width 64. All other cases use our kernels, which skip blocks that are masked entirely. On Hopper, 2 × 8,192
    positions packed with documents of 512 on average take a quarter of cuDNN's time for one segment. Other GPUs from
    Ampere on run the same algorithm in Triton, which was compiled for an A100 and never timed on one. XLA is used
    everywhere else.

    On a mesh with Explicit axes, the batch may be sharded, and so may the heads of `q`, `k` and `v`, in the same way.
    Inside a `jax.shard_map`, rows may be sharded over `sequence_axis`: each device has chunks of every row, in the
    order of `liger_jax.ops.layout.in_chunks`, and attends to the keys and values of the whole row, which are gathered;
    their gradients are reduce-scattered. The order is not checked: with another one the result is wrong.

    Args:
        q: (B, Tq, Q, H), queries, any float dtype. Tq is T, unless `q_offset` is given.
        k: (B, T, K, H), keys, of q's dtype.
        v: (B, T, K, H), values, of q's dtype.
        segment_ids: (B, S) integers, where S is T; a position attends only to positions with the same id. Documents are
            numbered from 1. Padding has the id 0 and follows the documents; its results have no meaning. For many calls
            with the same ids, pass `Segments.of(ids)`. `None` for one segment. With `sequence_axis`, S is the length of
            the whole rows, whose ids are in their original order.
        window: a position attends to itself and the window − 1 positions before it; `None`, or T or more, for all
            positions before it.
        softcap: positive bound of the scores; `None` for none.
        scale: factor of the scores; `None` for 1/√H.
        sinks: (Q,) any float dtype, one more score in each head's softmax, which belongs to no value and so takes
            weight from the keys, as in gpt-oss; `None` for none.
        q_offset: if there are fewer queries than keys, the position of the first query among the keys, from 0 to T −
            Tq. It may be traced; if it is out of range then, the result is NaN. `None` if there are as many queries as
            keys.
        sequence_axis: the mesh axis over which rows are sharded; `None` for whole rows.
        implementation: None to choose, or "xla" (chunks of queries, anywhere), "cudnn" (NVIDIA GPUs from Ampere on: no
            segments, softcap or sinks), "mosaic_gpu" (Hopper), "triton" (Ampere and newer) or "splash" (TPUs).

    Returns:
        (B, Tq, Q, H) in q.dtype. Under jit, a row in which an id is negative, or a 0 comes before another id, is NaN.

    Raises:
        ValueError: outside of jit, a row has such ids.

    Example:
        >>> values = jnp.array([[1.0], [3.0], [5.0]]).reshape(1, 3, 1, 1)
        >>> causal_attention(jnp.zeros_like(values), values, values).ravel().tolist()
        [1.0, 2.0, 3.0]
        >>> causal_attention(jnp.zeros_like(values), values, values, jnp.array([[1, 1, 2]])).ravel().tolist()
        [1.0, 2.0, 5.0]

    References:
        Dao, "FlashAttention-2", 2023 (arXiv:2307.08691). Xiao et al., "Efficient streaming language models with
        attention sinks", 2023 (arXiv:2309.17453).
    """
    q, k, v = checks.floating(_OP, q=q, k=k, v=v)
    if sinks is not None:
        (sinks,) = checks.floating(_OP, sinks=sinks)
    segments = segment_ids if isinstance(segment_ids, Segments) else None
    ids: Any = segment_ids if segments is None else segments.ids
    if segments is None and ids is not None:
        segment_ids = ids = checks.as_array(_OP, "segment_ids", ids)
    if ids is not None and jnp.issubdtype(ids.dtype, jnp.floating):
        raise TypeError(f"{_OP}: segment_ids have dtype {ids.dtype}, but must be integers, one for each segment; cast.")
    if ids is not None and ids.ndim:
        check_segment_ids(ids, f"{_OP}: ")
    options = dict(window=window, softcap=softcap, scale=scale)
    if sequence_axis is not None:
        return _over_sequence_axis(
            q, k, v, segment_ids, sequence_axis, q_offset, **options, sinks=sinks, implementation=implementation
        )
    offset = _checked_offset(q, k, q_offset)
    _check(q, k, v, ids, window, softcap, scale, is_part=offset is not None)
    if sinks is not None:
        checks.check_shape(_OP, "sinks", sinks, (q.shape[2],), "one for each head of q")
    if window is not None and window >= k.shape[1]:
        options["window"] = None  # it masks nothing, and from 2³¹ on it would overflow a kernel's integers
    if layout.is_explicit(q):
        return _on_mesh(q, k, v, ids, sinks, offset, **options, implementation=implementation)
    if not q.size:
        return q
    place, is_part, num_queries, num_keys = place_of(q, k, v, ids), offset is not None, q.shape[1], k.shape[1]
    case = dict(is_part=is_part, has_sinks=sinks is not None)
    choice = choose(q, k, v, ids, place, **options, **case, implementation=implementation)
    if segments is None and ids is not None:
        segments = Segments.of(ids)
    q, k, v, sinks, *fields = meshes.align_varying(q, k, v, sinks, *(segments or ()))
    v, segments = _refusing(v, Segments(*fields) if fields else None)
    out: Any = _run(choice, q, k, v, sinks, segments, offset, options)
    if not is_part or not isinstance(offset, Tracer):
        return out
    is_inside = (offset >= 0) & (offset <= num_keys - num_queries)
    return jnp.where(is_inside, out, jnp.nan)


def _run(choice: Choice, q, k, v, sinks, segments, q_offset, options):
    if choice.name.startswith(("mosaic_gpu", "triton")):
        forward, backward = (choice.kernel(function, **options) for function in ("forward", "backward"))
        return _attend(q, k, v, sinks, segments, q_offset, forward, backward)
    if choice.name.startswith("splash"):  # it has its own derivatives, and names their residuals
        return choice.kernel("attend", **options, output_name=ATTENTION_OUTPUT).run(q, k, v, segments)
    if choice.name == "xla":
        attend = choice.kernel("attend", **options)
        return checkpoint_name(attend.run(q, k, v, segments, q_offset, sinks), ATTENTION_OUTPUT)
    return choice.kernel("attend", **options).run(q, k, v, segments)  # policies know cuDNN's own call


def _refusing(v: jax.Array, segments: Segments | None) -> tuple[jax.Array, Segments | None]:
    """The values, NaN in rows with wrong ids, and the segments, which are checked only once.

    Every position attends to itself, so that all results of such a row are NaN. The values are the smallest array that
    all results depend on.
    """
    if segments is None or segments.is_valid is None:
        return v, segments
    known = segments._replace(is_valid=None)
    is_checked = not isinstance(segments.is_valid, Tracer) and segments.ids.is_fully_addressable
    if is_checked:  # by `check_segment_ids`
        return v, known
    return v * jnp.where(segments.is_valid, 1.0, jnp.nan).astype(v.dtype)[:, None, None, None], known


def _over_sequence_axis(q, k, v, segments, axis: str, q_offset, *, window, **options: Any):
    """Attention of this device's chunks of each row to the keys and values of all devices."""
    if q_offset is not None:
        raise ValueError(f"{_OP}: q_offset={q_offset!r} is for whole rows of keys; with sequence_axis, leave it out.")
    if q.shape[1] % 2 or k.shape[1] != q.shape[1]:
        raise ValueError(
            f"{_OP}: q has {q.shape[1]} positions and k {k.shape[1]} on each device of sequence_axis={axis!r}, but "
            "both must have the same even number, equal chunks of a row. Order and pad rows by layout.in_chunks."
        )
    if segments is not None and not isinstance(segments, Segments):
        segments = Segments.of(jnp.asarray(segments))
    v, segments = _refusing(v, segments)
    k, v = (layout.from_chunks(layout.gathered(x, P(None, axis)), 1, jax.lax.axis_size(axis)) for x in (k, v))
    return in_chunks(q, k, v, segments, layout.chunk_starts(axis, q.shape[1]), window=window, **options)


def in_chunks(q: Any, k: Any, v: Any, segments: Any, starts: Any, **options: Any) -> Any:
    """Attention of equal chunks of queries, each with its own position in the row of keys."""
    out = []
    for chunk, start in zip(jnp.split(q, len(starts), axis=1), starts, strict=True):
        out.append(causal_attention(chunk, k, v, segments, q_offset=start, **options))
        # In the backward the gradients of whole rows' keys are accumulated chunk by chunk: a single sum would hold all
        # of them at once.
        k, v = jax.lax.optimization_barrier((k, v))
    return jnp.concatenate(out, axis=1)


def choose(
    q: Any, k: Any, v: Any, segment_ids: Any, place: Place, *, implementation: Implementation, **options: Any
) -> Choice:
    """The implementation that runs a case, from its arrays or their types."""
    case = options | {"capability": place.capability}
    is_windowed = options["window"] is not None and options["window"] < q.shape[1]
    is_long = q.shape[1] >= _LONG and q.shape[3] == 64 and mosaic_gpu.takes_one_pass(q, k, segment_ids, None, v)
    kernels = _HOPPER_FIRST if is_windowed or is_long else _KERNELS
    return kernels.choose(implementation, q, k, v, segment_ids, place=place, **case)


def _on_mesh(q, k, v, segment_ids, sinks, q_offset, **options: Any):
    if q_offset is not None:
        raise ValueError(
            f"{_OP}: q_offset is only for use inside jax.shard_map, and q is sharded over a mesh with Explicit axes."
        )
    batch, length, heads, width = layout.spec_of(q)
    if length is not None or width is not None:
        raise ValueError(
            f"{_OP}: q is sharded over the mesh as {layout.spec_of(q)}, but each device must have its T and H axes "
            "whole. Move it by jax.sharding.reshard."
        )
    spec = P(batch, None, heads, None)

    def attend(q, k, v, segment_ids, sinks):
        return causal_attention(q, k, v, segment_ids, sinks=sinks, **options)

    arrays, specs = (q, k, v, segment_ids, sinks), (spec, spec, spec, P(batch, None), P(heads))
    return _explicit.on_shards(_OP, attend, arrays, specs, spec)


def _checked_offset(q, k, q_offset):
    """The position of the first query, as an array; None for 0 where each key has a query."""
    if q_offset is None:
        return None
    q_offset = q_offset if isinstance(q_offset, bool) else checks.as_array(_OP, "q_offset", q_offset, "one integer")
    if isinstance(q_offset, bool) or q_offset.ndim or not jnp.issubdtype(q_offset.dtype, jnp.integer):
        raise TypeError(f"{_OP}: q_offset={q_offset!r} must be one integer, the position of the first query.")
    if not isinstance(q_offset, Tracer) and not 0 <= int(q_offset) <= k.shape[1] - q.shape[1]:
        raise ValueError(
            f"{_OP}: q_offset={int(q_offset)} must be from 0 to {k.shape[1] - q.shape[1]}, where {q.shape[1]} "
            f"queries end within a row of {k.shape[1]} keys."
        )
    return jnp.asarray(q_offset, jnp.int32)


def _check(q, k, v, segment_ids, window, softcap, scale, *, is_part):
    if q.ndim != 4 or k.ndim != 4 or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{_OP}: q has shape {q.shape} and k {k.shape}, but they must be (B, T, Q, H) and (B, T, K, H) with Q a "
            "multiple of K, since query heads share key heads evenly."
        )
    length = k.shape[1] if is_part else q.shape[1]
    like_q = (q.shape[0], length, k.shape[2], q.shape[3])
    checks.check_shape(_OP, "k", k, like_q, "it is (B, T, K, H), with q's B, T and H; fewer queries need q_offset")
    checks.check_shape(_OP, "v", v, like_q, "it is (B, T, K, H), as k is")
    checks.check_shape(_OP, "segment_ids", segment_ids, like_q[:2], "one id for each position of k")
    for name, x in dict(k=k, v=v).items():
        if x.dtype != q.dtype:
            raise ValueError(f"{_OP}: {name} has dtype {x.dtype} and q {q.dtype}, but all must have one; cast it.")
    if window is not None and (isinstance(window, bool) or not isinstance(window, (int, np.integer))):
        raise TypeError(f"{_OP}: window={window!r} must be a Python int, because kernels are compiled for its value.")
    if window is not None and window < 1:
        raise ValueError(
            f"{_OP}: window={window} must be at least 1, since a position sees itself; pass None for no window."
        )
    numbers = {name: x for name, x in dict(softcap=softcap, scale=scale).items() if x is not None}
    checks.check_number(_OP, **numbers)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{_OP}: softcap={softcap} must be positive and finite; pass None for no bound.")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{_OP}: scale={scale} must be finite; pass None for 1/√H.")
