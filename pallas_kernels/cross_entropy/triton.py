"""Cross-entropy in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: the statistics read the logits once (an online log-sum-exp), where XLA reads them twice. The
gradient is one read and one write, elementwise. A kernel wins nothing over XLA's fusion there, so it is XLA's.
Rounding: float32 throughout, by formulas.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.cross_entropy import config, formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import Statistics
from liger_jax.pallas_kernels.tiles import cdiv, in_bounds, out_like, round_up


def unsupported(logits: jax.Array, class_weights: jax.Array | None) -> str | None:
    """Takes every shape, and every float dtype but float64."""
    if logits.dtype == jnp.float64:
        return "the kernel computes in float32 and does not read float64; use 'xla'."
    return None


def _statistics_kernel(logits_ref, labels_ref, *refs, v, options, has_class_weights, v_block_size):
    class_weights_ref, out_refs = (refs[0], refs[1:]) if has_class_weights else (None, refs)
    labels = labels_ref[...]

    def step(i, state):
        start = i * v_block_size
        tile = (slice(None), pl.ds(start, v_block_size))
        in_vocab = in_bounds(start, v_block_size, v, axis=1)
        u = pltriton.load(logits_ref.at[tile], mask=in_vocab, other=0.0).astype(jnp.float32)
        class_weights = None
        if has_class_weights:
            class_weights = pltriton.load(class_weights_ref.at[tile], mask=in_vocab, other=0.0)
        columns = start + jax.lax.broadcasted_iota(jnp.int32, (1, v_block_size), 1)
        return formulas.online_update(state, formulas.transform(u, options), columns, in_vocab, labels, class_weights)

    state = jax.lax.fori_loop(0, cdiv(v, v_block_size), step, formulas.online_start(labels.shape[0], options))
    for ref, field in zip(out_refs, jax.tree.leaves(state), strict=True):
        ref[...] = field


def statistics(
    logits: jax.Array, labels: jax.Array, class_weights: jax.Array | None, *, options: LogitOptions, interpret: bool
) -> Statistics:
    """logits (N, V), labels (N,) int32, class_weights (V,) float32 or None → Statistics of (N,)."""
    n, v = logits.shape
    tiles = config.triton_config(v)
    v_padded = round_up(v, tiles.v_block_size)
    logits_spec = pl.BlockSpec((tiles.n_block_size, v_padded), lambda row_tile: (row_tile, 0))
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile: (row_tile, 0))
    class_weights_spec = pl.BlockSpec((1, v_padded), lambda _: (0, 0))
    weights = () if class_weights is None else (class_weights[None, :],)
    state = jax.eval_shape(lambda: formulas.online_start(n, options))
    kernel = functools.partial(
        _statistics_kernel,
        v=v,
        options=options,
        has_class_weights=class_weights is not None,
        v_block_size=tiles.v_block_size,
    )
    fields = pl.pallas_call(
        kernel,
        grid=(cdiv(n, tiles.n_block_size),),
        in_specs=[logits_spec, row_spec, *[class_weights_spec] * len(weights)],
        out_specs=[row_spec] * len(jax.tree.leaves(state)),
        out_shape=[out_like(logits, s.shape, s.dtype) for s in jax.tree.leaves(state)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=2),
        interpret=interpret,
        name="cross_entropy_statistics",
    )(logits, labels[:, None], *weights)
    states = jax.tree.unflatten(jax.tree.structure(state), [field.reshape(1, n) for field in fields])
    return formulas.online_merge(states, options)


def gradient(logits: jax.Array, *rows: Any, options: LogitOptions, interpret: bool) -> jax.Array:
    """XLA's own elementwise pass: a kernel could not be faster."""
    del interpret
    return formulas.gradient(logits, *rows, options=options)
