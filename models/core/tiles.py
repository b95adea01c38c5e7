"""Functions of single tokens over tiles of a row, so that wide arrays exist for one tile at a time.

A feed-forward makes arrays of F numbers for each token, and its backward several of them. Over a tile of some thousand
tokens its products are as fast as over all of them, and the wide arrays are only as long as the tile. The backward
recomputes a tile before it differentiates it, so that only the input is kept.

The last tile ends with the last token. If tiles do not divide the tokens, it overlaps the one before it: its values
there are computed twice, and count once in the gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from liger_jax.models.core.dropout import DropoutWords, drops, give_words, token_words
from liger_jax.models.core.remat import Remat, is_offloaded, keeps_products
from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.meshes import align_varying, cast, varying_axes

LEAST_TOKENS, MOST_TOKENS = 2048, 4096  # of a tile
LEAST_TILES = 8  # fewer save little
LEAST_TILES_OF_OFFLOADED = 4  # if memory is so short that layers' inputs are offloaded to the host


def over_tokens(
    call: Callable[[Any, Float[Array, "B T D"]], Any],
    layers: tuple[Any, ...],
    x: Float[Array, "B T D"],
    remat: Remat,
    layout: Any,
) -> Any:
    """`call(layers, x)`, over tiles of tokens where that saves memory.

    On a mesh each device has tiles of its own tokens, and the gradients of weights are summed over devices once.

    `call`: computes each token by itself, and returns a tree of arrays (B, T, …). `layers`: the projections that it
    computes with, and all that it differentiates beside `x`.
    """
    tokens = layout.tokens_of_device(*x.shape[:2])
    size = tokens_at_once(tokens, x.shape[2], remat)
    # DoRA's norms of a weight's columns would be made again for each tile.
    if size == tokens or any(getattr(layer, "magnitude", None) is not None for layer in layers):
        return call(layers, x)
    graphdef, words, weights = nnx.split(layers, DropoutWords, ...)
    if not jax.tree.leaves(words) and drops(layers):  # layers that no model has given any
        layers = nnx.merge(graphdef, words, weights, copy=True)
        give_words(layers, token_words(x.shape[:2]))
        graphdef, words, weights = nnx.split(layers, DropoutWords, ...)

    def of_tile(weights, tile, words):
        words = jax.tree.map(lambda word: jnp.moveaxis(word, 2, 0).reshape(-1, *word.shape[1::2]), words)
        return call(nnx.merge(graphdef, words, weights), tile)

    def by_tiles(x, words, weights):
        # Devices of a tensor axis compute their tiles together: each token comes with those of the other devices.
        together = lambda word: jnp.moveaxis(word.reshape(-1, *x.shape[:2], word.shape[-1]), 0, 2)
        return in_tiles(of_tile, dense(weights, x.dtype), x, size, jax.tree.map(together, words))

    between = layout.between_blocks
    return layout.run(by_tiles, (x, words, weights), spec=(between, between, P()), out=between)


def tokens_at_once(tokens: int, width: int, remat: Remat, tensor: int = 1) -> int:
    """How many tokens `over_tokens` computes at once, but for DoRA, whose layers take all.

    Each device of a tensor axis cuts tiles of its own positions. The devices then compute their tiles together, so that
    more tokens are computed at once, and each device has its shard of their width.

    Returns a tile's tokens, where a layer keeps no product; else all. With "offload" shorter rows have tiles, too.
    """
    own = tokens // tensor
    size = None if keeps_products(remat) else tile_tokens(own, width)
    if size is None and is_offloaded(remat) and own > LEAST_TILES_OF_OFFLOADED * LEAST_TOKENS:
        size = LEAST_TOKENS
    return tokens if size is None else size * tensor


def tile_tokens(tokens: int, width: int) -> int | None:
    """How many tokens a tile has: about as many as the model is wide, so that its products have no short side.

    Returns the number; `None` where all tokens are computed at once, for no more than 8 tiles.
    """
    size = min(max(width, LEAST_TOKENS), MOST_TOKENS)
    return size if tokens > LEAST_TILES * size else None


def in_tiles(
    function: Callable[[Any, Float[Array, "1 tile D"], Any], Any],
    weights: Any,
    x: Float[Array, "B T D"],
    size: int,
    numbers: Any = None,
) -> Any:
    """`function(weights, x, numbers)` by tiles of tokens.

    The gradients of weights are summed over tiles in float32 and rounded once. There are none for weights that nobody
    differentiates.

    `function`: computes each token by itself, and returns a tree of arrays (1, tile, …). `weights`: a tree of arrays,
    all that `function` may differentiate beside `x`. `numbers`: a tree of integers (B, T, …), what the function gets of
    each token beside `x`.
    """
    leaves, tree = jax.tree.flatten(weights)
    by_token = lambda x: x.reshape(-1, *x.shape[2:])

    def of_tile(leaves, tile, numbers):
        one_row = jax.tree.map(lambda x: x[None], (tile, numbers))
        return jax.tree.map(lambda y: y[0], function(jax.tree.unflatten(tree, leaves), *one_row))

    @jax.custom_vjp
    def tiled(leaves, x, numbers):
        return _forward(of_tile, leaves, x, numbers, size)

    def forward_rule(leaves, x, numbers):
        # A residual's shape tells which gradients are wanted, as in `ops.gated_mlp`.
        needs = [jnp.zeros(int(leaf.perturbed), jnp.float32) for leaf in leaves]
        values, numbers = [leaf.value for leaf in leaves], jax.tree.map(lambda number: number.value, numbers)
        return _forward(of_tile, values, x.value, numbers, size), (needs, values, x.value, numbers)

    def backward_rule(residuals, dys):
        needs, leaves, x, numbers = residuals
        trained = [i for i, need in enumerate(needs) if need.size]
        return *_backward(of_tile, leaves, trained, x, numbers, dys, size), None

    tiled.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    arrays = leaves, by_token(x), jax.tree.map(by_token, numbers)
    arrays, structure = jax.tree.flatten(arrays)
    ys = tiled(*jax.tree.unflatten(structure, align_varying(*arrays)))
    return jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), ys)


def _forward(of_tile, leaves, x, numbers, size):
    """x (N, D), numbers of (N, …) → a tree of (N, …)."""

    def step(ys, start):
        tiles = of_tile(leaves, *_slices((x, numbers), start, size))
        return jax.tree.map(lambda y, tile: jax.lax.dynamic_update_slice_in_dim(y, tile, start, 0), ys, tiles), None

    types = jax.eval_shape(of_tile, leaves, *_slices((x, numbers), 0, size))
    ys = jax.tree.map(lambda y: _like(x, (len(x), *y.shape[1:]), y.dtype), types)
    return jax.lax.scan(step, ys, _starts(len(x), size))[0]


def _backward(of_tile, leaves, trained, x, numbers, dys, size):
    """x (N, D), numbers and dys of (N, …) → the gradients of leaves, `None` where they are not trained, and of x."""

    def step(carry, start_and_shared):
        (dx, sums), (start, shared) = carry, start_and_shared
        tile, own_numbers = _slices((x, numbers), start, size)

        def of_trained(chosen, tile):
            whole = list(leaves)
            for i, leaf in zip(trained, chosen, strict=True):
                whole[i] = leaf
            return of_tile(whole, tile, own_numbers)

        def own(dy):
            is_own = jnp.expand_dims(jnp.arange(size), range(1, dy.ndim)) >= shared
            return jnp.where(is_own, _slices(dy, start, size), 0)

        _, pull = jax.vjp(of_trained, [leaves[i] for i in trained], tile)
        of_leaves, of_x = pull(jax.tree.map(own, dys))
        sums = [total + leaf.astype(total.dtype) for total, leaf in zip(sums, of_leaves, strict=True)]
        return (jax.lax.dynamic_update_slice_in_dim(dx, of_x, start, 0), sums), None

    sums = [_like(x, leaves[i].shape, jnp.promote_types(leaves[i].dtype, jnp.float32)) for i in trained]
    starts = _starts(len(x), size)
    # The last tile comes first; the tokens that it shares with another tile are overwritten by that one later.
    shared = np.where(np.arange(len(starts)) == 0, -len(x) % size, 0).astype(np.int32)
    (dx, sums), _ = jax.lax.scan(step, (jnp.zeros_like(x), sums), (np.roll(starts, 1), shared))
    of_leaves: list[Any] = [None] * len(leaves)
    for i, total in zip(trained, sums, strict=True):
        of_leaves[i] = total.astype(leaves[i].dtype)
    return of_leaves, dx


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros that vary over the axes of a `jax.shard_map` over which x does."""
    return cast(jnp.zeros(shape, dtype), varying_axes(x))


def _slices(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)


def dense(weights: Any, dtype: Any) -> Any:
    """Makes quantised weights dense, once for all tiles."""
    is_quantized = lambda leaf: isinstance(leaf, BlockQuantized)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_quantized(leaf) else leaf, weights, is_leaf=is_quantized)


def _starts(tokens: int, size: int) -> np.ndarray:
    """The first token of each tile; the last tile ends with the last token."""
    return np.minimum(np.arange(0, tokens, size, dtype=np.int32), tokens - size)
