"""Operands of Hopper's kernels of the fused loss: inputs in whole tiles, spans of the vocabulary, a tile's logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tile
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions
from liger_jax.pallas_kernels.hopper import tanh
from liger_jax.pallas_kernels.tiles import round_up

TILE_COLUMNS = 256  # of the widest tile
_PIECE = 64  # what the copy engine moves at once of an inner axis


def extended(x: jax.Array, *sizes: int) -> jax.Array:
    """x with zeros at the end of each axis, up to `sizes`."""
    extra = [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)]
    return jnp.pad(x, extra) if any(more for _, more in extra) else x


def padded(inputs: Inputs, options: LinearOptions, *vectors: Any) -> Any:
    """The inputs and vectors of rows in whole tiles of rows and of width, with the weight in hidden's dtype.

    The padding is zeros without labels. The vocabulary is not padded.
    """
    n, d = inputs.hidden.shape
    rows, width = round_up(n, ROWS), round_up(d, _PIECE)
    v = inputs.weight.shape[options.vocab_dim]
    inputs = inputs._replace(
        hidden=extended(inputs.hidden, rows, width),
        weight=extended(
            inputs.weight.astype(inputs.hidden.dtype), *((v, width) if options.vocab_dim == 0 else (width, v))
        ),
        labels=jnp.pad(inputs.labels, (0, rows - n), constant_values=row_formulas.NO_LABEL),
    )
    return inputs, *jax.tree.map(lambda x: extended(x, rows), vectors)


def cut(grads: Gradients, like: Inputs, dtypes: Gradients) -> Gradients:
    """The gradients without what `padded` added, in their dtypes."""
    cut = lambda grad, x, dtype: None if grad is None else grad[tuple(map(slice, x.shape))].astype(dtype)
    return Gradients(*map(cut, grads, (like.hidden, like.weight, like.bias), dtypes))


class Span(NamedTuple):
    """A span of the vocabulary in a size that the kernels take: its first entry, how many count, and the inputs."""

    first: int
    size: int
    inputs: Inputs
    is_slice: bool  # of a weight: XLA (jaxlib 0.11) makes no copy of it for our kernels, but does for its own products
    offset: int | None = None  # where it begins in the weight and the vectors of `inputs`, if they are whole


def takes(v: int, mode: str, vocab_dim: int) -> bool:
    """Whether the kernels take a vocabulary as it is; others they take in spans.

    Inner axes have to be multiples of 64. In mode "lean" the vocabulary is the inner axis of a weight (D, V) only, and
    a weight (V, D) is moved in tiles of 8 rows.
    """
    return v % (8 if mode == "lean" and vocab_dim == 0 else _PIECE) == 0


def copies_slices(vocab_dim: int) -> bool:
    """Whether XLA copies a slice of the vocabulary that a kernel reads, and its slice of dW that a kernel writes."""
    return vocab_dim != 0 or jax.__version_info__ < (0, 11)


def bounds_of_spans(v: int, options: LinearOptions) -> list[tuple[int, int]]:
    """First entry and size of the vocabulary's spans: one, or its whole tiles and the rest."""
    whole = v if takes(v, options.mode, options.vocab_dim) else v // TILE_COLUMNS * TILE_COLUMNS
    return [(start, size) for start, size in ((0, whole), (whole, v - whole)) if size]


def spans_of(inputs: Inputs, options: LinearOptions) -> list[Span]:
    """The vocabulary's spans: what the kernels take is where it was, and the rest is padded.

    From jaxlib 0.11 on, XLA makes no copy of the slice where a kernel or a product reads it.
    """
    bounds = bounds_of_spans(inputs.weight.shape[options.vocab_dim], options)
    operands = [span_of(inputs, start, size, options) for start, size in bounds]
    return [operands[0]._replace(is_slice=len(operands) > 1), *operands[1:]]


def span_of(inputs: Inputs, start: Any, size: int, options: LinearOptions) -> Span:
    """The entries from `start` on, with zeros after them up to a multiple of 64; labels count from `start`."""
    entries, width = round_up(size, _PIECE), inputs.hidden.shape[1]
    take = lambda x: None if x is None else extended(formulas.take(x, start, size), entries)
    weight = formulas.take(inputs.weight, start, size, options.vocab_dim)
    weight = extended(weight, *((entries, width) if options.vocab_dim == 0 else (width, entries)))
    bias, class_weights = take(inputs.bias), take(inputs.class_weights)
    return Span(start, size, Inputs(inputs.hidden, weight, inputs.labels - start, bias, class_weights), False)


def span_of_whole(inputs: Inputs, start: int, size: int) -> Span:
    """The entries from `start` on of a weight (V, D) that stays whole; labels count from `start`."""
    labels = inputs.labels - start
    labels = jnp.where((labels >= 0) & (labels < size), labels, row_formulas.NO_LABEL)
    return Span(start, size, inputs._replace(labels=labels), False, offset=start)


def column_vectors(inputs: Inputs, with_class_weights: bool) -> list[jax.Array]:
    """The vectors along the vocabulary that a tile loads, float32: the bias, and then the class weights."""
    vectors = [inputs.bias] + [inputs.class_weights] * with_class_weights
    return [x.astype(jnp.float32) for x in vectors if x is not None]


def tile_logits(tile: Tile, has_bias: bool, options: LogitOptions) -> jax.Array:
    """z of a tile of the product, with a tanh that is exact here."""
    u = tile.values + tile.over_columns(tile.column_vectors[0]) if has_bias else tile.values
    return row_formulas.transform(u, options, tanh)
