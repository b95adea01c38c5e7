"""Partitions of arrays over mesh axes, and arrays that are put on a mesh by them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import Names


def partition(*entries: str | Names | None) -> P:
    """A partition without its last empty entries.

    >>> partition(("data", "fsdp"), None, ()) == P(("data", "fsdp"))
    True
    """
    filled = [i for i, entry in enumerate(entries) if entry]
    return P(*(entry or None for entry in entries[: filled[-1] + 1])) if filled else P()


def placed(batch: Any, mesh: Mesh, rows: Names, positions: str | None, length: int | None) -> Any:
    """A batch on a mesh, as `Layout.place` promises it."""
    rows_of = lambda x: jnp.shape(x)[0] if jnp.ndim(x) else 0
    shards, number = math.prod(mesh.shape[name] for name in rows), max(map(rows_of, jax.tree.leaves(batch)), default=0)
    if number % shards:
        raise ValueError(
            f"place: the batch has {number} rows, which {'·'.join(rows)}={shards} does not divide. Pass a "
            f"multiple of {shards} rows."
        )

    def spec_for(x):
        is_split = length is not None and jnp.shape(x)[1:2] == (length,)
        return partition(rows if rows_of(x) == number else None, positions if is_split else None)

    return jax.tree.map(lambda x: _put(x, NamedSharding(mesh, spec_for(x))), batch)


def is_placed(batch: Any, positions: str) -> bool:
    """Whether a batch's rows are split already, by an earlier `Layout.place`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    spec = getattr(getattr(ids, "sharding", None), "spec", ())
    return len(spec) > 1 and spec[1] == positions


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """The array on its devices; of several processes each puts its own shard there."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
