"""How the arrays of a linear loss are sharded over a mesh, where it is known."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from liger_jax.ops._explicit import token_spec
from liger_jax.ops.layout import Names, along, mesh_of, names, spec_of
from liger_jax.ops.linear.split_head import HeadSplit, head_split


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shard of a linear loss that one device computes, as the types of its hidden states and its weight say."""

    tokens: P  # how tokens are sharded
    token_axes: Names  # the mesh axes that split them
    weight: P
    vocab_axis: str | None  # the mesh axis over which the vocabulary stays split
    split: HeadSplit | None  # the sharding of the weight over the tokens' axes, along which it is gathered

    @property
    def hidden(self) -> P:
        """How hidden states are sharded: each device has the width whole."""
        return P(*self.tokens, None)

    @property
    def vocabulary(self) -> P:
        """How a vector with a number for each entry of the vocabulary is sharded."""
        return P(self.vocab_axis)

    @property
    def along_tokens(self) -> P:
        """The sharding of the weight over the tokens' axes."""
        return along(self.weight, self.token_axes)


def shards_of(op: str, hidden: jax.Array, weight: jax.Array, vocab_dim: int) -> Shards:
    """The shards of hidden states (..., D) and of a weight, whose axis `vocab_dim` is the vocabulary.

    A mesh axis that splits the weight and the tokens is FSDP's.
    """
    tokens, token_axes = token_spec(op, hidden)
    spec = spec_of(weight)
    staying = [[name for name in names(entry) if name not in token_axes] for entry in spec]
    width_axes, vocab_axes = staying[1 - vocab_dim], staying[vocab_dim]
    if width_axes or len(vocab_axes) > 1 or (vocab_axes and len(names(spec[vocab_dim])) > 1):
        raise ValueError(
            f"{op}: weight is sharded over the mesh as {spec}, and the tokens over {token_axes}. A mesh axis that does "
            "not split tokens may split the vocabulary, but only one axis, and not D. Move it by jax.sharding.reshard."
        )
    mesh: Any = mesh_of(weight)  # None if every device has it whole
    split = None if mesh is None else head_split(along(spec, token_axes), mesh.shape)
    return Shards(tokens, token_axes, spec, vocab_axes[0] if vocab_axes else None, split)
