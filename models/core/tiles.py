"""Functions of single tokens over tiles of a row: what is wide exists for one tile at a time.

A feed-forward makes arrays of F numbers for each token, and its backward several of them. Over a tile of some thousand
tokens its products are as fast as over all of them, and the wide arrays are the tile's. The backward computes a tile
again before it differentiates it, so that only the input is kept.

The last tile ends with the last token. If tiles do not divide the tokens, it overlaps the one before it: its values
there are computed twice, and count once in the gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from liger_jax.ops.block_quantized import BlockQuantized

LEAST_TOKENS, MOST_TOKENS = 2048, 4096  # of a tile
LEAST_TILES = 8  # fewer save little


def tile_tokens(tokens: int, width: int) -> int | None:
    """How many tokens a tile has: about as many as the model is wide, so that its products have no short side.

    Args:
        tokens: a device's tokens.
        width: D.

    Returns:
        The number; `None` where all tokens are computed at once, for no more than 8 tiles.

    Example:
        >>> tile_tokens(65_536, 4096), tile_tokens(8_192, 4096)
        (4096, None)
    """
    size = min(max(width, LEAST_TOKENS), MOST_TOKENS)
    return size if tokens > LEAST_TILES * size else None


def in_tiles(
    function: Callable[[Any, Float[Array, "1 tile D"], Int[Array, ""]], Float[Array, "1 tile D"]],
    weights: Any,
    x: Float[Array, "B T D"],
    size: int,
) -> Float[Array, "B T D"]:
    """`function(weights, x, start)` by tiles of tokens.

    The gradients of weights are summed over tiles in float32 and rounded once. There are none for weights that nobody
    differentiates.

    Args:
        function: computes each token by itself, and returns an array of the shape and dtype of `x`. It also gets the
            number of the tile's first token, for what is drawn at random.
        weights: a tree of arrays, all that `function` may differentiate beside `x`.
        x: any float dtype.
        size: tokens in a tile, at most B·T.

    Returns:
        The function's values.
    """
    leaves, tree = jax.tree.flatten(weights)

    def of_tile(leaves, tile, start):
        return function(jax.tree.unflatten(tree, leaves), tile[None], start)[0]

    @jax.custom_vjp
    def tiled(leaves, x):
        return _forward(of_tile, leaves, x, size)

    def forward_rule(leaves, x):
        # A residual's shape tells which gradients are wanted, as in `ops.gated_mlp`.
        needs = [jnp.zeros(int(leaf.perturbed), jnp.float32) for leaf in leaves]
        values = [leaf.value for leaf in leaves]
        return _forward(of_tile, values, x.value, size), (needs, values, x.value)

    def backward_rule(residuals, dy):
        needs, leaves, x = residuals
        trained = [i for i, need in enumerate(needs) if need.size]
        return _backward(of_tile, leaves, trained, x, dy, size)

    tiled.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return tiled(leaves, x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _forward(of_tile, leaves, x, size):
    """x (N, D) → y (N, D)."""

    def step(y, start):
        tile = of_tile(leaves, jax.lax.dynamic_slice_in_dim(x, start, size), start)
        return jax.lax.dynamic_update_slice_in_dim(y, tile, start, 0), None

    return jax.lax.scan(step, jnp.zeros_like(x), _starts(len(x), size))[0]


def _backward(of_tile, leaves, trained, x, dy, size):
    """x, dy (N, D) → the gradients of leaves, `None` where they are not trained, and of x, in the place of dy."""

    def step(carry, start_and_shared):
        (gradient, sums), (start, shared) = carry, start_and_shared  # `gradient` is y's where no tile was yet, else x's
        is_own = jnp.arange(size)[:, None] >= shared
        of_y = jax.lax.dynamic_slice_in_dim(gradient, start, size)

        def of_trained(chosen, tile):
            whole = list(leaves)
            for i, leaf in zip(trained, chosen, strict=True):
                whole[i] = leaf
            return of_tile(whole, tile, start)

        tile = jax.lax.dynamic_slice_in_dim(x, start, size)
        _, pull = jax.vjp(of_trained, [leaves[i] for i in trained], tile)
        of_leaves, of_x = pull(jnp.where(is_own, of_y, 0))
        sums = [total + leaf.astype(total.dtype) for total, leaf in zip(sums, of_leaves, strict=True)]
        of_x = jnp.where(is_own, of_x, of_y)
        return (jax.lax.dynamic_update_slice_in_dim(gradient, of_x, start, 0), sums), None

    sums = [jnp.zeros(leaves[i].shape, jnp.promote_types(leaves[i].dtype, jnp.float32)) for i in trained]
    starts = _starts(len(x), size)
    # The last tile goes first, and leaves the tokens that it shares with another tile to that one.
    shared = np.where(np.arange(len(starts)) == 0, -len(x) % size, 0).astype(np.int32)
    (of_x, sums), _ = jax.lax.scan(step, (dy, sums), (np.roll(starts, 1), shared))
    of_leaves: list[Any] = [None] * len(leaves)
    for i, total in zip(trained, sums, strict=True):
        of_leaves[i] = total.astype(leaves[i].dtype)
    return of_leaves, of_x


def dense(weights: Any, dtype: Any) -> Any:
    """Makes quantised weights dense, once for all tiles.

    Args:
        weights: a tree of arrays and `BlockQuantized`.
        dtype: dtype of the computation.

    Returns:
        A tree of arrays.
    """
    is_quantized = lambda leaf: isinstance(leaf, BlockQuantized)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_quantized(leaf) else leaf, weights, is_leaf=is_quantized)


def _starts(tokens: int, size: int) -> np.ndarray:
    """The first token of each tile; the last tile ends with the last token."""
    return np.minimum(np.arange(0, tokens, size, dtype=np.int32), tokens - size)


def _sum_dtype(dtype: Any) -> Any:
    """In which gradients are summed."""
    return jnp.promote_types(dtype, jnp.float32)
