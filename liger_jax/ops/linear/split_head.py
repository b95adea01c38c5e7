"""A head that is sharded over mesh axes: the linear losses take it as the weight, and gather what they need of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import Names, devices_along, full_spec, gathered, names, partition, sent_dtype


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """How the devices that split the tokens split a head's weight, too."""

    axes: tuple[Names, Names]  # for each dimension of the weight, the mesh axes that split it
    shards: tuple[int, int]  # for each dimension, into how many shards

    @property
    def spec(self) -> P:
        """The spec of the weight."""
        return partition(*self.axes)

    def whole(self, shard: Any, hidden: Any) -> jax.ShapeDtypeStruct:
        """The type of the gathered weight."""
        shape = tuple(size * shards for size, shards in zip(shard.shape, self.shards, strict=True))
        return jax.ShapeDtypeStruct(shape, sent_dtype(shard.dtype, hidden.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitHead:
    """This device's shard of a head's weight. The linear losses take it in the weight's place."""

    shard: jax.Array  # the shard, inside `jax.shard_map`
    split: HeadSplit = dataclasses.field(metadata=dict(static=True))  # how the devices split the weight

    @property
    def dtype(self) -> Any:
        """The weight's dtype."""
        return self.shard.dtype


def head_split(spec: P, sizes: Mapping[str, int]) -> HeadSplit | None:
    """The split of a head that is sharded as a spec says."""
    first, second = (names(entry) for entry in full_spec(spec, 2))
    shards = devices_along(first, sizes), devices_along(second, sizes)
    return HeadSplit((first, second), shards) if max(shards) > 1 else None


def taken_apart(weight: Any) -> tuple[Any, HeadSplit | None]:
    """A linear loss's weight, and how it is split.

    Returns (the weight or this device's shard of it, its split or None).
    """
    return (weight.shard, weight.split) if isinstance(weight, SplitHead) else (weight, None)


def whole_weight(weight: jax.Array, split: HeadSplit | None, hidden: jax.Array) -> jax.Array:
    """A linear loss's whole weight, gathered at once if it is split."""
    return weight if split is None else gathered(weight.astype(sent_dtype(weight.dtype, hidden.dtype)), split.spec)
