"""A vocabulary that is sharded over a mesh axis: the embedding, the logits, and the head of the fused losses.

Every device has the same number of entries, the last one with padding if need be. Token ids
and labels are those of the whole vocabulary everywhere.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.embedding import embed, head_logits
from liger_jax.models.core.parallel.mesh_axes import nearest_divisor
from liger_jax.models.core.parallel.tensor_collectives import all_positions, summed
from liger_jax.models.core.parallel.tensor_shards import TensorShards
from liger_jax.ops.layout import along, gathered, sent_dtype
from liger_jax.ops.linear.split_head import SplitHead, head_split, taken_apart
from liger_jax.ops.meshes import on_devices

# The logit of an entry that is padding. It is infinite, so that any factor of logits leaves it as it is. A finite one,
# such as −1e30, is scaled with the logits, and its rounding is more than exp takes.
NO_LOGIT = -jnp.inf


def padded(table: jax.Array, size: int) -> jax.Array:
    """A table (V, D) with zeros after its last entry, so that `size` devices have equal shards."""
    return jnp.pad(table, ((0, -table.shape[0] % size), (0, 0)))


def embed_shards(shards: TensorShards, table: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
    """Looks up table[ids]: each device those of its shard of the vocabulary.

    Returns (B, T, D), which is sharded as `shards.between` says; an id outside [0, V) gives NaN.
    """
    vocab_size = table.shape[0]

    def local(ids, shard):
        shard = gathered(shard, on_fsdp)
        own = ids - jax.lax.axis_index(shards.axis) * shard.shape[0]
        is_own = (own >= 0) & (own < shard.shape[0])
        elsewhere = jnp.where((ids >= 0) & (ids < vocab_size), 0.0, jnp.nan).astype(dtype)
        rows = embed(shard, jnp.where(is_own, own, -1), dtype)  # an id of -1 has no gradient
        return summed(jnp.where(is_own[..., None], rows, elsewhere[..., None]), shards.axis)

    of_table = shards.of_vocabulary(*table.shape)
    table = padded(table.astype(sent_dtype(table.dtype, dtype)), shards.size)
    on_fsdp, specs = along(of_table, shards.fsdp), (shards.tokens, of_table)
    return on_devices(local, in_specs=specs, out_specs=shards.between)(ids, table)


def logits_shards(shards: TensorShards, hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Logits (B, T, V′): each device makes those of its shard of the vocabulary, and no logits are sent.

    Returns float32 logits, split along V′. Those beyond V are padding's.
    """
    rows, axis = _rows(shards, hidden)

    def local(hidden, shard):
        return head_logits(all_positions(hidden, axis), gathered(shard, along(of_head, shards.fsdp)))

    of_head = shards.of_vocabulary(*head.shape)
    head = padded(head.astype(sent_dtype(head.dtype, hidden.dtype)), shards.size)
    return on_devices(local, in_specs=(rows, of_head), out_specs=shards.logits)(hidden, head)


def without_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits in which the entries that are padding have no shard in a softmax."""
    is_entry = jnp.arange(logits.shape[-1]) < vocab_size
    return logits if logits.shape[-1] == vocab_size else jnp.where(is_entry, logits, NO_LOGIT)


def loss_on_shards(
    shards: TensorShards,
    function: Callable[..., Any],
    split: tuple[Any, ...],
    whole: tuple[Any, ...],
    head: Any,
    spec: P,
    out: Any,
) -> Any:
    """`Layout.run` for a linear loss: each device has its tokens' whole rows, and its shard of the vocabulary.

    The hidden states' gradient is scattered over the tensor axis where their positions were gathered.

    `function`: takes one device's shards of `split`, then `whole`, then the head, which is padded. `split`: hidden
    states (B, T, D), and trees of arrays (B, T).
    """
    rows, axis = _rows(shards, split[0])
    split_of_head, of_head = None, P(shards.axis)
    if isinstance(head, jax.Array):
        of_head = shards.of_vocabulary(*head.shape)
        head = padded(head, shards.size)
        split_of_head = head_split(along(of_head, shards.fsdp), jax.sharding.get_abstract_mesh().shape)
    elif head.shape[0] % shards.size:
        raise ValueError(
            f"tensor={shards.axis!r} has {shards.size} devices, which do not divide the {head.shape[0]} entries of a "
            'quantised head. Quantise the projections alone: quantize(model, "nf4", head=False).'
        )

    def local(split, whole, head):
        hidden, *tokens = split
        head = head if split_of_head is None else SplitHead(head, split_of_head)
        return function(all_positions(hidden, axis), *tokens, *whole, head)

    specs = (rows, *(spec for _ in split[1:])), tuple(P() for _ in whole), of_head
    return on_devices(local, in_specs=specs, out_specs=out)(tuple(split), tuple(whole), head)


def vocabulary_of(shards: TensorShards, head: Any, config: Any) -> dict[str, Any]:
    """The arguments of a linear loss that describe its head inside `loss_on_shards`.

    Returns `vocab_axis`, and if the head has padding, a `bias` that masks it.
    """
    (shard, split), vocab_size = taken_apart(head), config.vocab_size
    size = shard.shape[0] * (1 if split is None else split.shards[0])
    if size * shards.size == vocab_size:
        return dict(vocab_axis=shards.axis)
    if config.final_logit_softcapping is not None:
        raise ValueError(
            f"tensor={shards.axis!r} has {shards.size} devices, which do not divide vocab_size={vocab_size}. The "
            f"vocabulary cannot be padded, since final_logit_softcapping={config.final_logit_softcapping} bounds the "
            f"logits of padding. The nearest number that divides it is {nearest_divisor(vocab_size, shards.size)}."
        )
    is_entry = jax.lax.axis_index(shards.axis) * size + jnp.arange(size) < vocab_size
    return dict(vocab_axis=shards.axis, bias=jnp.where(is_entry, 0.0, NO_LOGIT).astype(jnp.float32))


def _rows(shards: TensorShards, hidden: jax.Array) -> tuple[P, str | None]:
    """How hidden states enter, and the axis over which to gather their positions; they may have been cut."""
    return (shards.tokens, None) if hidden.shape[1] % shards.size else (shards.between, shards.axis)
