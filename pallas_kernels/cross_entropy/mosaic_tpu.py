"""Cross-entropy in Pallas for TPU.

Memory passes: the statistics read the logits once (an online log-sum-exp), where XLA reads them twice. The
gradient is one read and one write, elementwise. A kernel wins nothing over XLA's fusion there, so it is XLA's.
Rounding: float32 throughout; the formulas are those of formulas.py. Not measured on a TPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.cross_entropy import config, formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import Statistics
from liger_jax.pallas_kernels.tiles import cdiv, in_bounds, out_like, tpu_interpreter, tpu_params


def unsupported(logits: jax.Array, class_weights: jax.Array | None) -> str | None:
    """Mosaic has no float16 and no float64."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel supports float32 and bfloat16, and the logits are {logits.dtype}; use 'xla'."
    return None


def _statistics_kernel(logits_ref, labels_ref, *refs, v, options, has_class_weights, num_fields):
    class_weights_ref, refs = (refs[0], refs[1:]) if has_class_weights else (None, refs)
    out_refs, state_refs = refs[:num_fields], refs[num_fields:]
    n_block_size, v_block_size = logits_ref.shape
    start_state = formulas.online_start(n_block_size, options)
    vocab_tile = pl.program_id(1)

    @pl.when(vocab_tile == 0)
    def _():
        for ref, field in zip(state_refs, jax.tree.leaves(start_state), strict=True):
            ref[...] = field

    state = jax.tree.unflatten(jax.tree.structure(start_state), [ref[...] for ref in state_refs])
    start = vocab_tile * v_block_size
    state = formulas.online_update(
        state,
        formulas.transform(logits_ref[...].astype(jnp.float32), options),
        start + jax.lax.broadcasted_iota(jnp.int32, (1, v_block_size), 1),
        in_bounds(start, v_block_size, v, axis=1),
        labels_ref[...],
        class_weights_ref[...] if has_class_weights else None,
    )
    for ref, field in zip(state_refs, jax.tree.leaves(state), strict=True):
        ref[...] = field

    @pl.when(vocab_tile == pl.num_programs(1) - 1)
    def _():
        for ref, field in zip(out_refs, jax.tree.leaves(state), strict=True):
            ref[...] = field


def statistics(
    logits: jax.Array, labels: jax.Array, class_weights: jax.Array | None, *, options: LogitOptions, interpret: bool
) -> Statistics:
    """logits (N, V), labels (N,) int32, class_weights (V,) float32 or None → Statistics of (N,)."""
    n, v = logits.shape
    n_block_size, v_block_size = config.tpu_block_sizes(n, v)
    logits_spec = pl.BlockSpec((n_block_size, v_block_size), lambda row_tile, vocab_tile: (row_tile, vocab_tile))
    row_spec = pl.BlockSpec((n_block_size, 1), lambda row_tile, _: (row_tile, 0))
    class_weights_spec = pl.BlockSpec((1, v_block_size), lambda _, vocab_tile: (0, vocab_tile))
    weights = () if class_weights is None else (class_weights[None, :],)
    state = jax.eval_shape(lambda: formulas.online_start(n, options))
    leaves = jax.tree.leaves(state)
    kernel = functools.partial(
        _statistics_kernel, v=v, options=options, has_class_weights=class_weights is not None, num_fields=len(leaves)
    )
    fields = pl.pallas_call(
        kernel,
        grid=(cdiv(n, n_block_size), cdiv(v, v_block_size)),
        in_specs=[logits_spec, row_spec, *[class_weights_spec] * len(weights)],
        out_specs=[row_spec] * len(leaves),
        out_shape=[out_like(logits, s.shape, s.dtype) for s in leaves],
        scratch_shapes=[pltpu.VMEM((n_block_size, 1), s.dtype) for s in leaves],
        compiler_params=tpu_params(interpret, "parallel", "arbitrary"),
        interpret=tpu_interpreter(interpret),
        name="cross_entropy_statistics",
    )(logits, labels[:, None], *weights)
    states = jax.tree.unflatten(jax.tree.structure(state), [field.reshape(1, n) for field in fields])
    return formulas.online_merge(states, options)


def gradient(logits: jax.Array, *rows: Any, options: LogitOptions, interpret: bool) -> jax.Array:
    """XLA's own elementwise pass: a kernel could not be faster."""
    del interpret
    return formulas.gradient(logits, *rows, options=options)
