"""Causal self-attention, by the fastest kernel that the device has."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from liger_jax.ops import _checks, _explicit, _mesh, layout
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._kernels import Choice, Implementation, Kernels
from liger_jax.ops._place import Place, place_of
from liger_jax.pallas_kernels.attention import cudnn, mosaic_gpu, splash, triton, xla
from liger_jax.pallas_kernels.attention.intervals import Segments

_OP = "causal_attention"
_MODULES = {"xla": xla, "cudnn": cudnn, "mosaic_gpu": mosaic_gpu, "triton": triton, "splash": splash}
# On an H100, forward and backward of one segment take 1.04 and 1.19 of cuDNN's time at widths 64 and 128. A window of
# 1,024 takes 0.76, 0.94, 0.98 and 1.02 of it at 512, 2,048, 8,192 and 32,768 positions, without cuDNN's workspace
# (benchmarks/results/attention.md). cuDNN takes neither packed rows nor softcaps.
_KERNELS = Kernels(_OP, _MODULES, defaults={"gpu": ("cudnn", "mosaic_gpu", "triton"), "tpu": ("splash",)})
_WINDOW_KERNELS = Kernels(_OP, _MODULES, defaults={"gpu": ("mosaic_gpu", "cudnn", "triton"), "tpu": ("splash",)})
ATTENTION_OUTPUT = "attention_output"  # `checkpoint_name` of the forward's values that the backward needs


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, segments, forward, backward):
    return forward.run(*forward.guarded(q, k, v, segments))[0]


def _forward_rule(q, k, v, segments, forward, backward):
    out, log_sums = checkpoint_name(forward.run(*forward.guarded(q, k, v, segments)), ATTENTION_OUTPUT)
    return out, (q, k, v, segments, out, log_sums)


def _backward_rule(forward, backward, residuals, dout):
    return *backward.run(*backward.guarded(*residuals, dout)), None


_attend.defvjp(_forward_rule, _backward_rule)


def causal_attention(
    q: Float[ArrayLike, "B T Q H"],
    k: Float[ArrayLike, "B T K H"],
    v: Float[ArrayLike, "B T K H"],
    segment_ids: Int[ArrayLike, "B T"] | Segments | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B T Q H"]:
    """softmax(softcap·tanh(scale·q·kᵀ/softcap), over what a position may see)·v, with Q a multiple of K.

    A position sees itself and the earlier positions of its segment, as far as its window goes. No (T, T) array exists,
    forward or backward. Scores and their softmax are float32. The softmax's weights are rounded to q.dtype.

    TPUs run splash attention. NVIDIA GPUs from Ampere on run cuDNN if there are no segments and no softcap; on Hopper
    windows shorter than T do not go to cuDNN either. The other cases go to kernels of ours, which compute only what is
    visible. On Hopper, 2 × 8,192 positions packed with documents of 512 on average take a quarter of cuDNN's time for
    one segment. Other GPUs from Ampere on run the same algorithm in Triton, which was compiled for an A100 and never
    timed on one. XLA runs everywhere else.

    On a mesh with Explicit axes the batch may be split, and the heads of `q`, `k` and `v` alike.

    Args:
        q: (B, T, Q, H), queries, any float dtype.
        k: (B, T, K, H), keys, of q's dtype.
        v: (B, T, K, H), values, of q's dtype.
        segment_ids: (B, T) integers; a position sees only positions with its own id, wherever they stand. For many
            calls with the same ids, pass `Segments.of(ids)`. `None` for one segment.
        window: a position sees itself and window − 1 before it; `None` for all before it, as T or more.
        softcap: positive bound of the scores; `None` for none.
        scale: factor of the scores; `None` for 1/√H.
        implementation: None for the platform's default, or "xla" (chunks of queries, anywhere), "cudnn" (NVIDIA GPUs
            from Ampere on: no segments, no softcap), "mosaic_gpu" (Hopper), "triton" (Ampere and newer), "splash"
            (TPUs), the last three's ":interpret" forms, or a tuple of these to try in order.

    Returns:
        (B, T, Q, H) in q.dtype.

    Raises:
        TypeError: `q`, `k` or `v` is not floating point, or an option is no Python number.
        ValueError: shapes or dtypes do not fit, `window` or `softcap` is out of range, `implementation` is unknown, or
            the named one cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> values = jnp.array([[1.0], [3.0], [5.0]]).reshape(1, 3, 1, 1)
        >>> causal_attention(jnp.zeros_like(values), values, values).ravel().tolist()
        [1.0, 2.0, 3.0]
        >>> causal_attention(jnp.zeros_like(values), values, values, jnp.array([[0, 0, 1]])).ravel().tolist()
        [1.0, 2.0, 5.0]

    References:
        Dao, "FlashAttention-2", 2023 (arXiv:2307.08691).
    """
    q, k, v = _checks.floating(_OP, q=q, k=k, v=v)
    segments = segment_ids if isinstance(segment_ids, Segments) else None
    ids = _checks.as_array(segment_ids) if segments is None else segments.ids
    _check(q, k, v, ids, window, softcap, scale)
    if window is not None and window >= q.shape[1]:
        window = None  # it hides nothing, and from 2³¹ on it would overflow a kernel's integers
    options = dict(window=window, softcap=softcap, scale=scale)
    if layout.is_explicit(q):
        return _on_mesh(q, k, v, ids, **options, implementation=implementation)
    if not q.size:
        return q
    choice = choose(q, k, v, ids, place_of(q, k, v, ids), **options, implementation=implementation)
    if segments is None and ids is not None:
        segments = Segments.of(ids)
    q, k, v, *fields = _mesh.align_varying(q, k, v, *(segments or ()))
    segments = Segments(*fields) if fields else None
    if choice.name.startswith(("mosaic_gpu", "triton")):
        return _attend(q, k, v, segments, choice.kernel("forward", **options), choice.kernel("backward", **options))
    if choice.name.startswith("splash"):  # which has derivatives of its own, and names what they need
        return choice.kernel("attend", **options, output_name=ATTENTION_OUTPUT).run(q, k, v, segments)
    out = choice.kernel("attend", **options).run(q, k, v, segments)
    return checkpoint_name(out, ATTENTION_OUTPUT) if choice.name == "xla" else out  # policies know cuDNN's own call


def choose(
    q: Any, k: Any, v: Any, segment_ids: Any, place: Place, *, implementation: Implementation, **options: Any
) -> Choice:
    """The implementation that runs a case, from its arrays or their types."""
    case = options | {"capability": place.capability}
    kernels = _KERNELS if options["window"] is None or options["window"] >= q.shape[1] else _WINDOW_KERNELS
    return kernels.choose(implementation, q, k, v, segment_ids, place=place, **case)


def _on_mesh(q, k, v, segment_ids, **options: Any):
    batch, length, heads, width = layout.spec_of(q)
    if length is not None or width is not None:
        raise ValueError(
            f"{_OP}: q lies on the mesh as {layout.spec_of(q)}, but each device must have its T and H axes whole. "
            "Move it by jax.sharding.reshard."
        )
    spec = P(batch, None, heads, None)
    attend = functools.partial(causal_attention, **options)
    return _explicit.on_parts(_OP, attend, (q, k, v, segment_ids), (spec, spec, spec, P(batch, None)), spec)


def _check(q, k, v, segment_ids, window, softcap, scale):
    if q.ndim != 4 or k.ndim != 4 or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{_OP}: q has shape {q.shape} and k {k.shape}, but they must be (B, T, Q, H) and (B, T, K, H) with Q a "
            "multiple of K, since query heads share key heads evenly."
        )
    like_q = q.shape[:2] + (k.shape[2], q.shape[3])
    _checks.check_shape(_OP, "k", k, like_q, "it is (B, T, K, H), with q's B, T and H")
    _checks.check_shape(_OP, "v", v, like_q, "it is (B, T, K, H), as k is")
    _checks.check_shape(_OP, "segment_ids", segment_ids, q.shape[:2], "one id for each position of q")
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
    _checks.check_number(_OP, **numbers)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{_OP}: softcap={softcap} must be positive and finite; pass None for no bound.")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{_OP}: scale={scale} must be finite; pass None for 1/√H.")
