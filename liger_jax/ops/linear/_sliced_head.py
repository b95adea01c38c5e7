"""Heads that FSDP shards, inside `jax.shard_map`: no device ever holds the whole weight or its whole gradient.

The same mesh axes split the tokens and the head's weight. In mode "lean" each device takes a few entries of its shard,
and the devices gather them, in the products' dtype. The kernels read the gathered slice as if it were the whole
vocabulary. Then it is dropped, and its gradient is summed over the devices and scattered at once. So a slice has
the same number of entries from every shard, and its columns are entries of the vocabulary in another order:

    column = owner · size + place        entry = owner · entries_of_a_shard + start + place

In mode "fast" every chunk of tokens reads the whole weight. There it is gathered once, and its gradient scattered once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops.layout import gathered, scattered
from liger_jax.ops.linear.split_head import HeadSplit
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import IMPOSSIBLE_LABEL, NO_LABEL, Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import over_slices, put, take
from liger_jax.pallas_kernels.tiles import cdiv, full_like


def statistics(
    run: Callable[..., Statistics], inputs: Inputs, split: HeadSplit, options: LinearOptions, entries: int
) -> Statistics:
    """The statistics of all rows; `run` makes a slice's. A slice has at most `entries` of the vocabulary."""
    slices = _Slices(inputs, split, options.vocab_dim, entries)
    n, logit = inputs.hidden.shape[0], options.logit

    def body(statistics, start, size):
        own = run(slices.take(start, size))
        if own.predicted_token is not None:
            own = own._replace(predicted_token=slices.entry_of(own.predicted_token, start, size))
        return jax.tree.map(lambda all_, x: put(all_, x[None], start // slices.size), statistics, own)

    kinds = jax.eval_shape(lambda: run(slices.take(0, slices.size)))
    number = cdiv(slices.entries_of_a_shard, slices.size)
    start = jax.tree.map(lambda x: full_like(inputs.hidden, (number, n), 0, x.dtype), kinds)
    return _merged(slices.over(body, start), logit)


def gradients(
    run: Callable[..., Gradients],
    inputs: Inputs,
    split: HeadSplit,
    options: LinearOptions,
    entries: int,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    needs: Needs,
) -> Gradients:
    """The gradients by hidden, by this device's shard of the weight, and by the bias; `run` makes a slice's."""
    hidden, weight, _, bias, _ = inputs
    slices = _Slices(inputs, split, options.vocab_dim, entries)

    def body(grads, start, size):
        dhidden, dweight, dbias = grads
        own = run(slices.take(start, size), log_normalizer, cotangents)
        if needs.weight:
            dweight = put(dweight, scattered(own.weight, split.spec), start, options.vocab_dim)
        if needs.hidden:
            dhidden += own.hidden.astype(jnp.float32)
        if needs.bias:
            dbias = put(dbias, own.bias.reshape(slices.shards, size), start, 1)
        return Gradients(dhidden, dweight, dbias)

    zeros = Gradients(
        full_like(hidden, hidden.shape, 0, jnp.float32) if needs.hidden else None,
        full_like(hidden, weight.shape, 0, weight.dtype) if needs.weight else None,
        full_like(hidden, (slices.shards, slices.entries_of_a_shard), 0, bias.dtype) if needs.bias else None,
    )
    dhidden, dweight, dbias = slices.over(body, zeros)
    return Gradients(
        dhidden.astype(hidden.dtype) if needs.hidden else None, dweight, dbias.reshape(-1) if needs.bias else None
    )


class _Slices:
    """The slices of a vocabulary that devices split. A slice has at most `size` entries of every shard."""

    def __init__(self, inputs: Inputs, split: HeadSplit, vocab_dim: int, entries: int) -> None:
        self.inputs, self.split, self.vocab_dim = inputs, split, vocab_dim
        self.shards = split.shards[vocab_dim]
        self.entries_of_a_shard = inputs.weight.shape[vocab_dim]
        self.size = min(max(1, entries // self.shards), self.entries_of_a_shard)
        self.dtype = split.whole(inputs.weight, inputs.hidden).dtype

    def over(self, body: Callable[[Any, Any, int], Any], carry: Any) -> Any:
        """carry = body(carry, start, size) for each slice."""
        return over_slices(self.entries_of_a_shard, self.size, body, carry, last_waits=True)

    def take(self, start: Any, size: int) -> Inputs:
        """The inputs with the gathered slice as the vocabulary."""
        hidden, weight, labels, bias, class_weights = self.inputs
        owner, place = labels // self.entries_of_a_shard, labels % self.entries_of_a_shard - start
        is_here = (labels >= 0) & (place >= 0) & (place < size)
        # The label of another slice must match no column of this one, and no column of padding after them.
        missing = jnp.where(labels == NO_LABEL, NO_LABEL, IMPOSSIBLE_LABEL)
        column = jnp.where(is_here, owner * size + place, missing)
        own = take(weight, start, size, self.vocab_dim).astype(self.dtype)
        return Inputs(hidden, gathered(own, self.split.spec), column, *(
            None if x is None else take(x.reshape(self.shards, -1), start, size, 1).reshape(-1)
            for x in (bias, class_weights)
        ))  # fmt: skip

    def entry_of(self, column: jax.Array, start: Any, size: int) -> jax.Array:
        """The vocabulary's entry of a slice's column."""
        return column // size * self.entries_of_a_shard + start + column % size


def _merged(slices: Statistics, options: LogitOptions) -> Statistics:
    """Joins the slices' statistics (slices, N) into whole rows' (N,)."""
    # A slice's Σ exp(z − lse) is 1, and its Σ (z − lse)·exp(z − lse) is −H.
    states = row_formulas.OnlineState(
        maximum=slices.log_normalizer,
        exp_sum=jnp.ones_like(slices.log_normalizer),
        target_logit=slices.target_logit,
        logit_sum=slices.logit_sum,
        predicted_token=None,
        weighted_sum=None if slices.entropy is None else -slices.entropy,
        square_sum=None if slices.log_sum_of_squares is None else jnp.exp(slices.log_sum_of_squares),
    )
    merged = row_formulas.online_merge(states, dataclasses.replace(options, metrics=False))
    if slices.max_logit is None:
        return merged
    max_logit, first = row_formulas.first_of_largest(slices.max_logit, slices.predicted_token)
    return merged._replace(max_logit=max_logit, predicted_token=first)
