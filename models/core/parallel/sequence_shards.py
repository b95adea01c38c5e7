"""Sequence parallelism: rows are sharded over a mesh axis, so that each device computes chunks of every row.

A batch is prepared once, by `Layout.place`. Labels are shifted while the next token is on the same device, positions
are attached, rows are padded, and their chunks are put in the order of the devices (`ops.layout.in_chunks`): device i
of c has the chunks i and 2c − 1 − i of 2c, which balances the work of causal attention; of a long row it has two such
pairs. After that positions are independent, except in attention, where keys and values are gathered.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.losses import shifted_labels
from liger_jax.ops.labels import IGNORE_INDEX, as_labels
from liger_jax.ops.layout import devices_along, from_chunks, in_chunks
from liger_jax.ops.segment_ids import default_positions

# The padding after a row's last position, which is not scored. Tokens and positions repeat their last number, so that
# the largest one does not grow; no position attends to later ones. Segments and masks are 0, as at other padding.
_REPEATED = ("input_ids", "positions")
_PADDED_BEHIND = ("segment_ids", "attention_mask", "token_mask")  # the arguments that mask positions for routers
_PADDING = {"shift_labels": IGNORE_INDEX}


@dataclasses.dataclass(frozen=True)
class SequenceShards:
    """A mesh axis that splits rows over several devices."""

    axis: str  # its name
    size: int  # its devices c, more than one
    # The length of a row is a multiple of this: it has 2c chunks, and on each device equal shards for the devices of a
    # tensor axis.
    multiple: int
    rows: P  # how arrays (B, …) are sharded whose rows are whole

    @classmethod
    def of(cls, layout: Any, sizes: Mapping[str, int]) -> "SequenceShards":
        """The shards of a `Layout` on a mesh."""
        size = sizes[layout.sequence]
        return cls(layout.sequence, size, size * math.lcm(2, devices_along(layout.tensor, sizes)), layout.of_rows)

    def prepared(self, batch: Any) -> dict[str, Any]:
        """A model's arguments for rows that are split.

        `batch`: (B, T) token ids, which are their own labels; or the model's arguments by name. An array (B, T, …) or
        (1, T, …) of any name belongs to the positions. Returns the arguments, with `shift_labels` in the place of
        `labels`, `positions`, and rows of T′ positions, the next multiple of `multiple`, in the order of the devices'
        chunks. Where T′ is not T and nothing else tells padding there is a `token_mask`, 0 after the rows. A batch that
        is split already stays as it is, and types are those of what their arrays become.
        """
        if self._is_placed(batch):
            return batch
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            return jax.eval_shape(self.prepared, batch)
        named = dict(batch) if isinstance(batch, Mapping) else dict(input_ids=batch, labels=batch)
        if named.get("input_ids") is None:
            raise ValueError(
                f"place: {self.size} devices share rows along sequence={self.axis!r}, and the batch has no input_ids, "
                f"but {sorted(map(str, named))}. Pass one batch, as a model's arguments by name."
            )
        if (labels := named.pop("labels", None)) is not None:
            if named.get("shift_labels") is not None:
                raise ValueError("place: labels and shift_labels exclude each other. Pass one of them.")
            named["shift_labels"] = shifted_labels(labels, named.get("segment_ids"))
        elif named.get("shift_labels") is not None:
            named["shift_labels"] = as_labels(named["shift_labels"])
        shape = jnp.shape(named["input_ids"])
        if named.get("positions") is None:
            named["positions"] = default_positions(shape[1], named.get("segment_ids"))
        if shape[1] % self.multiple and all(named.get(name) is None for name in _PADDED_BEHIND):
            named["token_mask"] = jnp.ones(shape, bool)
        return {name: self._in_order(name, x, shape) for name, x in named.items()}

    def _is_placed(self, batch: Any) -> bool:
        """Whether a batch's rows are split already, by an earlier `Layout.place`."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        spec = getattr(getattr(ids, "sharding", None), "spec", ())
        return len(spec) > 1 and spec[1] == self.axis

    def _in_order(self, name: str, x: Any, shape: tuple[int, ...]) -> Any:
        """An argument, padded and in the order of chunks if it has an axis of positions."""
        if jnp.ndim(x) < 2 or jnp.shape(x)[1] != shape[1] or jnp.shape(x)[0] not in (1, shape[0]):
            return x
        x = jnp.asarray(x)
        behind = [(0, 0), (0, -shape[1] % self.multiple), *[(0, 0)] * (x.ndim - 2)]
        filling: dict[str, Any] = dict(constant_values=_PADDING.get(name, 0))
        filling = dict(mode="edge") if name in _REPEATED else filling
        return in_chunks(jnp.pad(x, behind, **filling), 1, self.size)

    def whole_rows(self, ids: jax.Array) -> jax.Array:
        """Arrays (B, T) with whole rows, in their original order."""
        return from_chunks(jax.lax.with_sharding_constraint(ids, self.rows), 1, self.size)

    def check_rows(self, length: int, positions: Any, cache: Any) -> None:
        """Raises a ValueError unless a model's rows may have been prepared, and no argument needs whole rows."""
        where = f"on a mesh with {self.size} devices along sequence={self.axis!r}"
        if cache is not None:
            raise ValueError(
                f"cache is given {where}, over which it cannot be sharded. Generate on a mesh whose devices split "
                "the batch."
            )
        if positions is None or length % self.multiple:
            problem = "positions is not given" if positions is None else f"input_ids has {length} positions"
            raise ValueError(
                f"{problem} {where}, each of which has chunks of a row of {self.multiple}·n positions. Pass the "
                "result of layout.place(batch), which pads and reorders rows and adds positions."
            )

    def check(self, config: Any) -> None:
        """Raises a ValueError unless the layers of an architecture can share rows."""
        if config.num_recurrent_layers:
            raise ValueError(
                f"sequence={self.axis!r} has {self.size} devices, and {type(config).__name__} has layers of linear "
                "attention or convolutions, whose state is passed from token to token of a row. Give the devices to "
                "fsdp."
            )

    def check_labels(self, labels: Any, logits_to_keep: Any) -> None:
        """Raises a ValueError if a call asks for positions by their place in a row."""
        where = f"on a mesh with {self.size} devices along sequence={self.axis!r}"
        if labels is not None:
            raise ValueError(
                f"labels are given {where}, where a position's next label may be on another device. Pass the "
                "result of layout.place(batch), which has shifted labels, shift_labels."
            )
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            raise ValueError(
                f"logits_to_keep is given {where}, where rows are in another order. Instead, give the other positions "
                "the label -100, or loss weights of 0."
            )
