"""Fused linear cross-entropy in Pallas Mosaic GPU (Hopper): products at the matrix units' speed, with our epilogues.

Statistics: each tile of logits is folded, in the registers that hold it, into one number a row. XLA merges the tiles'
numbers.
lean: for each slice of the vocabulary the same product, with the softmax's gradient as its epilogue, writes du. A
second product adds du · W to dX, and a third writes duᵀ · X to its place in dW.
fast: the product also writes E = exp(z − the tile's maximum), and one pass over E writes du in its place. If one chunk
holds all tokens, dW is one product. Otherwise it is summed over chunks, in float32, or in three bytes if the weight has
16 bits.
Memory passes: fast writes E, reads and writes it once more as du, and reads du twice.
Rounding: statistics and losses come from the float32 accumulators. E is relative to its tile's maximum. So its rounding
costs 2^-9 of a probability, where the rounding of a logit z would cost |z| · 2^-9. du is rounded once more.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels._hopper_product import ROWS
from liger_jax.pallas_kernels._tiles import full_like, round_up
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_kernels as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed

_PIECE = 64  # what the copy engine moves at once of an inner axis
_TILE_COLUMNS = 256  # of the widest tile
_WIDEST_SOFTCAP = 40.0  # up to this |z|, exp(z − maximum) is a normal number, whose logarithm gives z back


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """16-bit operands, and in mode "fast" logits that can be recovered from what it keeps."""
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units take bfloat16 and float16, and hidden is {hidden.dtype}; use 'xla'."
    if options.mode == "fast" and options.logit.entropy:
        return "its mode='fast' keeps no logits to make entropies of; use mode='lean', or 'xla'."
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where logits cannot be recovered "
            "from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


def _extended(x: jax.Array, *sizes: int) -> jax.Array:
    """x with zeros behind each axis, up to `sizes`."""
    extra = [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)]
    return jnp.pad(x, extra) if any(more for _, more in extra) else x


def _padded(inputs: Inputs, options: LinearOptions, *vectors: Any) -> Any:
    """The inputs and vectors of rows in whole tiles of rows and of width, with the weight in hidden's dtype.

    What is added has no label, and is zeros. The vocabulary stays as it is.
    """
    n, d = inputs.hidden.shape
    rows, width = round_up(n, ROWS), round_up(d, _PIECE)
    v = inputs.weight.shape[options.vocab_dim]
    inputs = inputs._replace(
        hidden=_extended(inputs.hidden, rows, width),
        weight=_extended(
            inputs.weight.astype(inputs.hidden.dtype), *((v, width) if options.vocab_dim == 0 else (width, v))
        ),
        labels=jnp.pad(inputs.labels, (0, rows - n), constant_values=row_formulas.NO_LABEL),
    )
    return inputs, *jax.tree.map(lambda x: _extended(x, rows), vectors)


def _cut(grads: Gradients, like: Inputs, dtypes: Gradients) -> Gradients:
    """The gradients without what `_padded` added, in their dtypes."""
    cut = lambda grad, x, dtype: None if grad is None else grad[tuple(map(slice, x.shape))].astype(dtype)
    return Gradients(*map(cut, grads, (like.hidden, like.weight, like.bias), dtypes))


class _Part(NamedTuple):
    """A part of the vocabulary in a size that the kernels take: its first entry, how many count, and the inputs."""

    first: int
    size: int
    inputs: Inputs
    is_slice: bool  # of a weight: XLA (jaxlib 0.11) makes no copy of it for our kernels, but does for its own products


def takes(v: int, mode: str, vocab_dim: int) -> bool:
    """Whether the kernels take a vocabulary as it is; others they take in parts.

    Inner axes have to be multiples of 64. In mode "lean" the vocabulary is the inner axis of a weight (D, V) only, and
    a weight (V, D) is moved in tiles of 8 rows.
    """
    return v % (8 if mode == "lean" and vocab_dim == 0 else _PIECE) == 0


def copies_slices(vocab_dim: int) -> bool:
    """Whether XLA copies a slice of the vocabulary that a kernel reads, and its part of dW that a kernel writes."""
    return vocab_dim != 0 or jax.__version_info__ < (0, 11)


def _spans(v: int, options: LinearOptions) -> list[tuple[int, int]]:
    """First entry and size of the vocabulary's parts: one, or its whole tiles and the rest."""
    whole = v if takes(v, options.mode, options.vocab_dim) else v // _TILE_COLUMNS * _TILE_COLUMNS
    return [(start, size) for start, size in ((0, whole), (whole, v - whole)) if size]


def _parts(inputs: Inputs, options: LinearOptions) -> list[_Part]:
    """The vocabulary's parts: what the kernels take lies where it was, and the rest is padded.

    From jaxlib 0.11 on, XLA makes no copy of the slice where a kernel or a product reads it.
    """
    spans = _spans(inputs.weight.shape[options.vocab_dim], options)
    parts = [_part(inputs, start, size, options) for start, size in spans]
    return [parts[0]._replace(is_slice=len(parts) > 1), *parts[1:]]


def _part(inputs: Inputs, start: Any, size: int, options: LinearOptions) -> _Part:
    """The entries from `start` on, with zeros behind them up to a multiple of 64; labels count from `start`."""
    entries, width = round_up(size, _PIECE), inputs.hidden.shape[1]
    take = lambda x: None if x is None else _extended(formulas.take(x, start, size), entries)
    weight = formulas.take(inputs.weight, start, size, options.vocab_dim)
    weight = _extended(weight, *((entries, width) if options.vocab_dim == 0 else (width, entries)))
    bias, class_weights = take(inputs.bias), take(inputs.class_weights)
    return _Part(start, size, Inputs(inputs.hidden, weight, inputs.labels - start, bias, class_weights), False)


def _statistics_of(
    parts: list[_Part], options: LinearOptions, keep: bool
) -> tuple[Statistics, list[tuple[jax.Array, jax.Array | None]]]:
    """The statistics of all rows, and for each part the maximum of each tile, and with `keep` E."""
    states, kept = [], []
    for part in parts:
        state, exponentials = kernels.partial_statistics(part.inputs, options, part.size, keep)
        kept.append((state.maximum, exponentials))
        if state.predicted_token is not None:
            state = state._replace(predicted_token=state.predicted_token + part.first)
        states.append(state)
    merged = jax.tree.map(lambda *tiles: jnp.concatenate(tiles), *states)
    return row_formulas.online_merge(merged, options.logit), kept


def _zeros_if(like: jax.Array, needed: bool | None, shape: tuple[int, ...], dtype: Any) -> jax.Array | None:
    """Zeros for a loop's carry, or None where nobody asks for them."""
    return full_like(like, shape, 0, dtype) if needed else None


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """The statistics of all rows, each (N,)."""
    n = inputs.hidden.shape[0]
    (inputs,) = _padded(inputs, options)
    found, _ = _statistics_of(_parts(inputs, options), options, keep=False)
    return jax.tree.map(lambda x: x[:n], found)


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X."""
    like, v = inputs, inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs = inputs._replace(hidden=formulas.live_rows(inputs.hidden, cotangents))
    inputs, lse, cotangents = _padded(inputs, options, formulas.live_rows(log_normalizer, cotangents), cotangents)
    # Otherwise each slice of the weight is copied, and padded if need be.
    reads_in_place = takes(v, options.mode, options.vocab_dim)
    writes_in_place = reads_in_place and _hopper.can_write_in_place(inputs.hidden)
    width = like.hidden.shape[1]

    def body(grads, first, size):
        dhidden, dweight, dbias = grads
        part, start = inputs, jnp.asarray(first, jnp.int32)[None]
        if not reads_in_place:
            part, start = _part(inputs, first, size, options).inputs, jnp.zeros_like(start)
        du = kernels.logit_gradients(part, lse, cotangents, start, size, options, v if reads_in_place else size)
        if needs.hidden and _hopper.can_add_in_place(inputs.hidden):
            dhidden = kernels.add_product(dhidden, du, part, start, options)
        elif needs.hidden:
            weight = formulas.take(part.weight, start[0], size, options.vocab_dim)
            dhidden += formulas.product(du[:, :size], weight, 1, options.vocab_dim, options)
        if needs.weight and writes_in_place:
            dweight = kernels.put_product(dweight, du, inputs.hidden, start, options)
        elif needs.weight:
            product = kernels.weight_gradient(du, inputs.hidden, options, dtypes.weight)
            own = (size, width) if options.vocab_dim == 0 else (width, size)
            dweight = formulas.put(dweight, product[: own[0], : own[1]], first, options.vocab_dim)
        if needs.bias:
            dbias = formulas.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), first)
        return Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    shape = inputs.weight.shape if writes_in_place else like.weight.shape
    start_carry = Gradients(
        zeros_of(needs.hidden, inputs.hidden.shape, jnp.float32),
        _unset(inputs.hidden, shape, dtypes.weight) if needs.weight else None,
        zeros_of(needs.bias, (v,), dtypes.bias),
    )
    # Slices begin at whole tiles.
    size = min(round_up(options.chunk_size, _TILE_COLUMNS), v)
    grads = formulas.over_slices(v, size, body, start_carry, last_waits=not reads_in_place)
    return _cut(grads, like, dtypes)


def _unset(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array to be filled. XLA (jaxlib 0.12.0) fails where it fuses the call that makes it with a slice's writing."""
    return jax.lax.optimization_barrier(_hopper.empty(like, shape, dtype))


def gradients_in_forward(
    inputs: Inputs,
    terms: Any,
    constants: Any,
    *,
    options: LinearOptions,
    needs: Needs,
    row_cotangents: Callable[[Statistics, Any, Any], Cotangents],
) -> tuple[Statistics, Gradients]:
    """The fast mode: for each chunk of tokens E and statistics, du in E's place, dX = du · W, and dW (+)= duᵀ · X.

    `row_cotangents` makes the loss's derivatives from the statistics and the terms of a chunk's rows, and `constants`.
    """
    like, n = inputs, inputs.hidden.shape[0]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, terms = _padded(inputs, options, terms)
    padded = inputs.hidden.shape[0]
    chunk_size = min(round_up(options.chunk_size, ROWS), padded)
    one_chunk = chunk_size == padded
    in_bytes = (
        needs.weight and not one_chunk and dtypes.weight.itemsize == 2 and _hopper.can_write_in_place(inputs.hidden)
    )

    def body(carry, start, size):
        stats, (dhidden, dweight, dbias) = carry
        chunk, chunk_terms = formulas.take_tokens(inputs, terms, start, size)
        parts = _parts(chunk, options)
        chunk_stats, kept = _statistics_of(parts, options, keep=True)
        lse = chunk_stats.log_normalizer
        cotangents = row_cotangents(chunk_stats, chunk_terms, constants)
        dus = [
            kernels.make_logit_gradients(exponentials, maximum, part.inputs, lse, cotangents, options, part.size)
            for part, (maximum, exponentials) in zip(parts, kept, strict=True)
        ]
        if needs.weight:
            is_last = jnp.asarray(start + size == padded, jnp.int32)
            which = jnp.where(start == 0, kernels.FIRST_PART, is_last * kernels.LAST_PART)[None]  # else 0
            dweight = [
                weight_gradient(total, part, du, which) for total, part, du in zip(dweight, parts, dus, strict=True)
            ]
        if needs.hidden:
            if not one_chunk:  # dX comes after dW: then the chunk of dX can lie where the chunk of X did
                dus, dweight = jax.lax.optimization_barrier((dus, dweight))
            dx, *rest = [hidden_gradient(part, du) for part, du in zip(parts, dus, strict=True)]
            for more in rest:  # of one tile, in float32
                dx = dx.astype(jnp.float32) + more
            dhidden = formulas.put(dhidden, dx, start)
        if needs.bias:
            own = [jnp.sum(du[:, : part.size].astype(jnp.float32), axis=0) for part, du in zip(parts, dus, strict=True)]
            dbias += jnp.concatenate(own)
        stats = jax.tree.map(lambda whole, part: formulas.put(whole, part, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    def hidden_gradient(part, du):
        if part.is_slice:
            return kernels.hidden_gradient(du, part.inputs.weight, options, dtypes.hidden)
        dtype = jnp.float32 if part.first else dtypes.hidden
        return formulas.product(du, part.inputs.weight, 1, options.vocab_dim, options, dtype)

    def weight_gradient(total, part, du, which):
        """A part of dW: over all tokens, or added to the dW of the earlier chunks."""
        hidden = part.inputs.hidden
        if in_bytes:
            high, low = total
            return kernels.add_to_sum(high, low, du, hidden, which, options)
        if one_chunk and part.is_slice:
            return kernels.weight_gradient(du, hidden, options, dtypes.weight)
        if one_chunk:
            return formulas.weight_gradient(du, hidden, options, dtypes.weight)
        if _hopper.can_add_in_place(hidden):
            return kernels.put_product(total, du, hidden, jnp.zeros(1, jnp.int32), options, add=True)
        return total + formulas.weight_gradient(du, hidden, options)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    spans = _spans(like.weight.shape[options.vocab_dim], options)
    shapes = [part.inputs.weight.shape for part in _parts(inputs, options)]
    if in_bytes:
        unset = functools.partial(_hopper.empty, inputs.hidden)
        accumulators = [(unset(shape, dtypes.weight), unset(shape, jnp.uint8)) for shape in shapes]
    else:  # one chunk makes its parts of dW, and adds them to nothing
        accumulators = [zeros_of(needs.weight and not one_chunk, shape, jnp.float32) for shape in shapes]
    kinds = Statistics(*[jnp.float32] * 7)._replace(predicted_token=jnp.int32)
    metrics, entropy = options.logit.metrics, options.logit.entropy
    wanted = Statistics(True, True, options.logit.logit_sum, metrics, metrics, entropy, entropy)
    zeros = Statistics(*(zeros_of(want, (padded,), kind) for want, kind in zip(wanted, kinds, strict=True)))
    start_carry = (
        zeros,
        Gradients(
            zeros_of(needs.hidden, inputs.hidden.shape, dtypes.hidden),
            accumulators,
            zeros_of(needs.bias, (like.weight.shape[options.vocab_dim],), jnp.float32),
        ),
    )
    stats, grads = formulas.over_slices(padded, chunk_size, body, start_carry, last_waits=True)
    weight = None
    if needs.weight:
        pieces = [total[0] if in_bytes else total for total in grads.weight]
        # After dX, so that until then a copy of the weight can lie where dW will.
        after = grads.hidden if needs.hidden else inputs.hidden
        weight = _joined(pieces, spans, like.weight.shape, dtypes.weight, options, after)
    grads = grads._replace(weight=weight)
    return jax.tree.map(lambda x: x[:n], stats), _cut(grads, like, dtypes)


def _joined(
    pieces: list[jax.Array],
    spans: list[tuple[int, int]],
    shape: tuple[int, ...],
    dtype: Any,
    options: LinearOptions,
    after: jax.Array,
) -> jax.Array:
    """The parts of dW in one array. From jaxlib 0.11 on, XLA has the first part's product write to its place there."""
    if len(pieces) == 1:
        return pieces[0]
    whole, width = _unset(after, shape, dtype), shape[1 - options.vocab_dim]
    for piece, (start, size) in reversed(list(zip(pieces, spans, strict=True))):
        piece = piece[:size, :width] if options.vocab_dim == 0 else piece[:width, :size]
        whole = formulas.put(whole, piece, start, options.vocab_dim)
    return whole
