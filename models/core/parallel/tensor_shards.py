"""Tensor parallelism: how a model's matrices and its positions are sharded over a mesh axis."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.expert_shards import EXPERTS, entries_of_experts, width_field
from liger_jax.models.core.parallel.mesh_axes import does_not_divide, nearest_divisor
from liger_jax.models.core.parameters import ParameterInfo
from liger_jax.ops.layout import Names, along, devices_along, partition

KEY_HEADS = ("k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class TensorShards:
    """A mesh axis that splits heads, feed-forwards and the vocabulary over several devices."""

    axis: str  # its name
    size: int  # its devices, more than one
    fsdp: Names  # the axes that split parameters once more
    fsdp_size: int  # the devices along these
    axes: Names  # all axes of the mesh that are not Manual
    rows: P  # how arrays (B, …) are sharded whose rows are whole
    tokens: P  # how arrays (B, T, …) are sharded of which all devices of the axis have the same positions
    between: P  # how activations (B, T, D) are sharded between blocks
    logits: P  # how logits (B, T, V) are sharded
    expert: str | None  # the axis that splits experts, or `None`
    expert_size: int  # its devices

    @classmethod
    def of(cls, layout: Any, sizes: Mapping[str, int]) -> "TensorShards":
        """The shards of a `Layout` on a mesh, which may lack other axes of the layout."""
        fsdp, experts = tuple(name for name in layout.fsdp_axes if name in sizes), devices_along(layout.expert, sizes)
        return cls(
            axis=layout.tensor,
            size=sizes[layout.tensor],
            fsdp=fsdp,
            fsdp_size=devices_along(fsdp, sizes),
            axes=tuple(sizes),
            rows=along(layout.of_rows, sizes),
            tokens=along(layout.in_loss, sizes),
            between=along(layout.between_blocks, sizes),
            logits=along(layout.of_logits, sizes),
            expert=layout.expert if experts > 1 else None,
            expert_size=experts,
        )

    @property
    def others(self) -> Names:
        """The axes that split each expert's parameters once more: those of fsdp, but for the one of experts."""
        return tuple(name for name in self.fsdp if name != self.expert) if self.others_size > 1 else ()

    @property
    def others_size(self) -> int:
        """The devices along these."""
        return self.fsdp_size // (self.expert_size if self.expert in self.fsdp else 1)

    def spec(self, info: ParameterInfo, shape: tuple[int, ...]) -> P:
        """How a parameter is sharded over the mesh.

        `tensor_axis` is split by the tensor axis. A matrix's first axis, the inputs or the vocabulary, is split by
        fsdp: XLA transposes what it gathers along another one, gradients and state included. The second axis is split
        where both do not divide the first. Codes and scales of quantised weights are split by fsdp along the output, so
        that blocks stay whole. A vocabulary and key heads that the tensor axis does not divide are whole along it, and
        so is a vector that fsdp does not divide.
        """
        if info.expert_axis is not None:
            return partition(*entries_of_experts(self, info, shape))
        entries: list[Names] = [() for _ in shape]
        at = info.tensor_axis
        if at is None and info.kind.startswith("kernel"):
            raise ValueError(
                f"{info.name} is a matrix that {self.axis}={self.size} cannot split: tensor parallelism "
                f"supports only the projections of known models. Give the devices to an axis of the batch."
            )
        if at is not None and shape[at] % self.size == 0:
            entries[at] = (self.axis,)
        elif at is not None and info.kind not in ("embedding", "head") and not info.is_in(*KEY_HEADS):
            raise ValueError(does_not_divide(self.axis, self.size, at, info, shape))
        is_vector = info.kind in ("bias", "norm")
        other = info.out_axis if is_vector else self.fsdp_axis(info, shape[-2] if len(shape) > 1 else 0)
        if other is not None and self.fsdp_size > 1:
            shards = self.fsdp_size * (self.size if entries[other] else 1)
            if shape[other] % shards == 0:
                entries[other] = (*entries[other], *self.fsdp)
            elif not is_vector:
                names = "·".join((*entries[other], *self.fsdp))
                raise ValueError(does_not_divide(names, shards, other, info, shape))
        return partition(*entries)

    def check(self, config: Any) -> None:
        """Raises a ValueError unless the axis can split an architecture, and divides its heads and its feed-forward."""
        if config.num_recurrent_layers:
            raise ValueError(
                f"tensor={self.axis!r} has {self.size} devices, and {type(config).__name__} has layers of linear "
                "attention or convolutions, which the axis cannot split. Give the devices to fsdp."
            )
        if config.layers_differ:
            raise ValueError(
                f"tensor={self.axis!r} has {self.size} devices, and {type(config).__name__} has layers of different "
                "sizes, which the axis cannot split. Give the devices to fsdp."
            )
        numbers = dict(num_attention_heads=config.num_attention_heads)
        if any(config.feed_forward_of(i) != EXPERTS for i in range(config.num_hidden_layers)):
            numbers["intermediate_size"] = config.intermediate_size
        if config.experts is not None:
            numbers[width_field(config)] = config.experts.width
        for name, number in numbers.items():
            if number % self.size:
                named = " and ".join(f"{name}={number}" for name, number in numbers.items())
                raise ValueError(
                    f"tensor={self.axis!r} has {self.size} devices, which do not divide {name}={number}. The nearest "
                    f"number that divides {named} is {nearest_divisor(math.gcd(*numbers.values()), self.size)}."
                )

    def padded(self, x: jax.Array) -> jax.Array:
        """Rows in which each device has as many positions as every other one.

        No position sees those that are added, which are after it, and no largest position or id grows.

        Returns the rows, with their last number repeated until the axis divides T.
        """
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.size)), mode="edge")

    def padded_mask(self, is_token: jax.Array | None, input_ids: jax.Array) -> jax.Array | None:
        """Where padded rows hold a token: routers do not count the positions that are added."""
        missing = -input_ids.shape[1] % self.size
        if not missing:
            return is_token
        is_token = jnp.ones(input_ids.shape, bool) if is_token is None else is_token
        return jnp.pad(is_token, ((0, 0), (0, missing)))

    def fsdp_axis(self, info: ParameterInfo, first: int) -> int | None:
        """The axis of a parameter that fsdp splits, too.

        `first`: the size of the first axis of a matrix; 0 where it does not matter. Returns the axis; `None` for a
        vector, and for what every device has whole.
        """
        if info.kind in ("embedding", "head"):
            return 0 if self.splits_vocabulary(first) else 1
        if info.kind == "router":
            return info.in_axis
        if info.kind == "kernel":
            both = info.tensor_axis == info.in_axis and first % (self.size * self.fsdp_size)
            return info.out_axis if both else info.in_axis
        return info.out_axis if info.kind.endswith(("_codes", "_scales")) else None

    def splits_vocabulary(self, vocab_size: int) -> bool:
        """Whether the tensor axis and fsdp split a vocabulary together; if not, fsdp splits its vectors."""
        return vocab_size % (self.size * self.fsdp_size) == 0

    def of_vocabulary(self, vocab_size: int, width: int) -> P:
        """How an embedding or a head (V, D) is sharded, padded so that the devices of the tensor axis have equal
        shards.

        A head with an adapter's columns may be of a width that fsdp does not divide.
        """
        if self.splits_vocabulary(vocab_size):
            return P((self.axis, *self.fsdp))
        return P(self.axis, self.fsdp if width % self.fsdp_size == 0 else None)

    def by_devices(self, x: jax.Array, pieces: Sequence[tuple[int, int]]) -> jax.Array:
        """Distributes the columns of several pieces, such as those of queries, keys and values, over the devices.

        `pieces`: (heads, width) of each, one after another. Where the axis does not divide the heads, each is repeated
        so often that it does. Returns (…, devices, own): each device has as many heads of each piece as any other.
        """
        by_devices, start = [], 0
        for heads, width in pieces:
            piece = x[..., start : start + heads * width].reshape(*x.shape[:-1], heads, width)
            piece = jnp.repeat(piece, self.size // math.gcd(heads, self.size), axis=-2)
            by_devices.append(piece.reshape(*x.shape[:-1], self.size, -1))
            start += heads * width
        return jnp.concatenate(by_devices, axis=-1)
