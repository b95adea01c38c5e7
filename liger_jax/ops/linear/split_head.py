"""A head that mesh axes split: the linear losses take it in the weight's place, and gather what they need of it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import Names, full_spec, gathered, names, sent_dtype


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """How the devices that split the tokens split a head's weight, too.

    Attributes:
        axes: for each dimension of the weight, the mesh axes that split it.
        parts: for each dimension, into how many parts.
    """

    axes: tuple[Names, Names]
    parts: tuple[int, int]

    @property
    def spec(self) -> P:
        """The spec of the weight."""
        return P(*(axes or None for axes in self.axes))

    def whole(self, part: Any, hidden: Any) -> jax.ShapeDtypeStruct:
        """The type of the gathered weight.

        Args:
            part: this device's part of the weight, or its type.
            hidden: the hidden states, or their type.

        Returns:
            The shape of the whole weight, in the dtype in which it is sent.
        """
        shape = tuple(size * parts for size, parts in zip(part.shape, self.parts, strict=True))
        return jax.ShapeDtypeStruct(shape, sent_dtype(part.dtype, hidden.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitHead:
    """This device's part of a head's weight. The linear losses take it in the weight's place.

    Attributes:
        part: the part, inside `jax.shard_map`.
        split: how the devices split the weight.
    """

    part: jax.Array
    split: HeadSplit = dataclasses.field(metadata=dict(static=True))

    @property
    def dtype(self) -> Any:
        """The weight's dtype."""
        return self.part.dtype


def head_split(spec: P, sizes: Mapping[str, int]) -> HeadSplit | None:
    """The split of a head that lies as a spec says.

    Args:
        spec: of the weight, along the axes that split the tokens.
        sizes: the sizes of the mesh's axes, as `mesh.shape` has them.

    Returns:
        The split, or None if no axis of more than one device splits the weight.

    Example:
        >>> head_split(P(("data", "fsdp")), {"data": 2, "fsdp": 4})
        HeadSplit(axes=(('data', 'fsdp'), ()), parts=(8, 1))
    """
    first, second = (names(entry) for entry in full_spec(spec, 2))
    parts = [math.prod(sizes[name] for name in axes) for axes in (first, second)]
    return HeadSplit((first, second), (parts[0], parts[1])) if max(parts) > 1 else None


def taken_apart(weight: Any) -> tuple[Any, HeadSplit | None]:
    """A linear loss's weight, and how it is split.

    Args:
        weight: an array, or a `SplitHead`.

    Returns:
        (the weight or this device's part of it, its split or None).
    """
    return (weight.part, weight.split) if isinstance(weight, SplitHead) else (weight, None)


def whole_weight(weight: jax.Array, split: HeadSplit | None, hidden: jax.Array) -> jax.Array:
    """A linear loss's whole weight, gathered at once if it is split.

    Args:
        weight: the weight, or this device's part of it.
        split: the weight's split, or None.
        hidden: the hidden states, whose dtype is the computation's.

    Returns:
        The weight as it is, or gathered in the dtype in which it is sent.
    """
    return weight if split is None else gathered(weight.astype(sent_dtype(weight.dtype, hidden.dtype)), split.spec)
