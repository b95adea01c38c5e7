"""Dropout of adapters' inputs, by masks that belong to tokens.

A mask is a hash, and not drawn from a stream of random numbers. So a token has the same mask in any row, micro-batch or
tile, on any device, and when the backward recomputes a layer.

    token    = hash(piece, segment, position in it)    two words, once in a call
    word     = hash(token, the projection's key)       two words for each projection of each layer
    dropped  = hash(word, feature) < rate·2³²

The hash is a permutation of 32 bits: Wellons, "Prospecting for Hash Functions", 2018, with the constants of 2022
(https://github.com/skeeto/hash-prospector), whose bias is 0.107 of 1000.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt32

from liger_jax.models.core.parallel.sequence_shards import SequenceShards
from liger_jax.ops.layout import in_chunks

_FIRST_WORD, _SECOND_WORD = np.uint32(0x9E3779B9), np.uint32(0x6A09E667)  # two hashes of the same numbers


class DropoutKey(nnx.Variable):
    """The key of an adapter's dropout, one for each layer."""


class DropoutPieces(nnx.Variable):
    """The numbers of a batch's pieces, (B, T) by tokens or (B, 1) by rows."""


class DropoutWords(nnx.Variable):
    """The words (B, T, 2) of a projection's tokens. A projection has them while its layer runs."""


def drops(module: Any) -> bool:
    """Whether an adapter in a module, or in a tuple of them, has dropout."""
    return any(getattr(node, "drops", False) for _, node in nnx.iter_graph(module))


def give_words(module: Any, words: UInt32[Array, "B T 2"]) -> None:
    """Sets the tokens' words in the adapters with dropout, in place, in a layer that was just merged."""
    variable = DropoutWords(words)
    for node in [node for _, node in nnx.iter_graph(module) if getattr(node, "drops", False)]:
        node.dropout_words = variable


def token_words(
    shape: tuple[int, ...],
    *,
    pieces: Integer[Array, "rows places"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    first: Any = 0,
    sequence: SequenceShards | None = None,
) -> UInt32[Array, "B T 2"]:
    """Two words for each token, which follow from its piece and its position there.

    `pieces`: the number of each token's piece (B, T), or of each row (B, 1), whose segments are its pieces; `None` to
    count rows from 0. `first`: the position of the first token, where rows do not begin with it. `sequence`: how a mesh
    axis splits rows, which are then in the order of its chunks; `None` where none does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = {name: mesh.shape[name] for name in mesh.manual_axes if mesh.shape[name] > 1}
    if sequence is not None and sequence.axis in manual:
        raise ValueError(
            f"with_dropout: the model runs inside jax.shard_map over {manual}, where a device cannot know which "
            "positions of a row it has. Call the model outside of it, under jax.set_mesh(mesh)."
        )
    if pieces is None:
        if manual:
            raise ValueError(
                f"with_dropout: the model runs inside jax.shard_map over {manual}, where all devices would number "
                "their rows from 0 and have the same masks. Pass the numbers of rows or of documents in the step: "
                "with_dropout(model, key, pieces)."
            )
        pieces = jnp.arange(shape[0], dtype=jnp.uint32)[:, None]
    elif pieces.shape not in (shape, (shape[0], 1)):
        raise ValueError(
            f"with_dropout: pieces has shape {pieces.shape}, and the model is called with input_ids of shape {shape}. "
            f"Pass the document's number of each token, {shape}, or the number of each row, ({shape[0]},)."
        )
    of_tokens = pieces.shape == shape and shape[1] > 1
    positions = first + _counted(shape, [pieces if of_tokens else None, segment_ids, attention_mask], sequence)
    # Documents count from 1, so that a row of one document needs no ids.
    segment = np.uint32(0) if of_tokens or segment_ids is None else segment_ids.astype(jnp.uint32) - np.uint32(1)
    pieces, positions = pieces.astype(jnp.uint32), positions.astype(jnp.uint32)

    def word(begin):
        return jnp.broadcast_to(_hash(_hash(_hash(pieces ^ begin) + segment) + positions), shape)

    return jnp.stack([word(_FIRST_WORD), word(_SECOND_WORD)], axis=-1)


def _counted(shape: tuple[int, ...], ids: list[Any], sequence: SequenceShards | None) -> Int[Array, "#B T"]:
    """Positions since ids last changed."""
    positions = jnp.arange(shape[1], dtype=jnp.int32)[None]
    if ids := [x for x in ids if x is not None]:
        begins = jnp.zeros((shape[0], shape[1] - 1), bool)
        for x in ids if sequence is None else map(sequence.whole_rows, ids):
            begins |= x[:, 1:] != x[:, :-1]
        begins = jnp.pad(begins, ((0, 0), (1, 0)))
        positions = positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
    return positions if sequence is None else in_chunks(positions, 1, sequence.size)


def words_of(projection: Any, x: Float[Array, "*rows D"]) -> UInt32[Array, "*rows 2"]:
    """The words of a projection's tokens: those that were set, or else from the rows and positions of its input."""
    if projection.dropout_words is not None:
        return projection.dropout_words[...]
    length = x.shape[-2] if x.ndim > 1 else 1
    return token_words((math.prod(x.shape[:-2]), length)).reshape(*x.shape[:-1], 2)


def dropped(
    x: Float[Array, "*rows D"], rate: float, key: Key[Array, ""], words: UInt32[Array, "*rows 2"], first: Any = 0
) -> Float[Array, "*rows D"]:
    """x/(1 − rate) where it is kept, else 0.

    `first`: the index of the first feature, if other devices have features before it.
    """
    assert words.shape[:-1] == x.shape[:-1], (words.shape, x.shape)
    of_key = jax.random.bits(key, (2,), jnp.uint32)
    one, other = (_hash(words[..., i] ^ of_key[i])[..., None] for i in (0, 1))
    feature = jnp.arange(x.shape[-1], dtype=jnp.uint32) + jnp.asarray(first).astype(jnp.uint32)
    feature = jnp.expand_dims(feature, tuple(range(x.ndim - 1)))
    least = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(_hash(_hash(other ^ feature) + one) >= least, x / (1 - rate), 0)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation of 32 bits in which each bit of the argument changes half of the result's."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))
