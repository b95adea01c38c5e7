"""How arrays are sharded over a mesh, and how a sharded matrix is gathered and scattered.

A spec is a `jax.sharding.PartitionSpec`. It has an entry for each dimension of an array: the mesh axes that split it.
Inside `jax.shard_map` a device has its own shard of the array:

    whole = gathered(shard, spec)        shard = scattered(whole, spec), summed over the devices
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Names = tuple[str, ...]

# --- how an array is sharded over a mesh ------------------------------------------------------------------------------


def names(entry: Any) -> Names:
    """The mesh axes of one or several entries of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(name for each in entry for name in names(each))


def devices_along(entry: Any, sizes: Mapping[str, int]) -> int:
    """The number of devices over which entries of a spec shard an array; one along axes that `sizes` lacks."""
    return math.prod(sizes.get(name, 1) for name in names(entry))


def is_explicit(x: jax.Array) -> bool:
    """Whether the type of an array has its sharding over a mesh, on Explicit axes."""
    return bool(jax.typeof(x).sharding.mesh.explicit_axes)


def named_sharding(x: Any) -> NamedSharding | None:
    """How a concrete array is sharded over a mesh; `None` for one that is on no mesh, and for a tracer."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def mesh_of(x: jax.Array) -> Any | None:
    """The mesh on which an array is seen to be sharded.

    Returns the mesh in its type, if that has Explicit axes. Else the mesh of Auto axes over which a concrete array is
    sharded, also where `jax.grad` differentiates it outside of jit. None where nothing can be seen, as under jit;
    inside `jax.shard_map`; or on a mesh of one device.
    """
    if is_explicit(x):
        return jax.typeof(x).sharding.mesh
    sharding = _sharding_of(x)
    return None if sharding is None else sharding.mesh


def are_seen(*arrays: jax.Array) -> bool:
    """Whether all arrays are known to be sharded over one mesh; on Explicit axes it is enough that the first is.

    Returns whether a `jax.shard_map` around them needs no further arguments.
    """
    first = mesh_of(arrays[0])
    return first is not None and (is_explicit(arrays[0]) or all(mesh_of(x) == first for x in arrays[1:]))


def _sharding_of(x: Any) -> NamedSharding | None:
    """How a concrete array is sharded over several devices of a mesh of Auto axes, or None."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    while isinstance(x, Tracer):  # outside of jit, tracers of derivatives hold the array
        x = getattr(x, "primal", None)
    sharding = named_sharding(x)
    if sharding is None or sharding.mesh.size == 1:
        return None
    return sharding if set(sharding.mesh.axis_types) == {AxisType.Auto} else None


def spec_of(x: jax.Array) -> P:
    """How an array is sharded over its mesh.

    `x`: an array or a tracer. Auto axes are known only where `mesh_of` sees them: elsewhere nothing is split.
    """
    sharding = None if is_explicit(x) else _sharding_of(x)
    return full_spec((jax.typeof(x).sharding if sharding is None else sharding).spec, x.ndim)


def full_spec(spec: P, ndim: int) -> P:
    """A spec with an entry for each dimension: one may be shorter than its array has dimensions."""
    return P(*spec, *[None] * (ndim - len(spec)))


def partition(*entries: str | Names | None) -> P:
    """A spec without its last empty entries."""
    filled = [i for i, entry in enumerate(entries) if entry]
    return P(*(entry or None for entry in entries[: filled[-1] + 1])) if filled else P()


def along(spec: P, axes: Collection[str]) -> P:
    """The entries of a spec, restricted to some mesh axes."""
    return partition(*(tuple(name for name in names(entry) if name in axes) for entry in spec))


# --- shards and the whole, inside `jax.shard_map` ---------------------------------------------------------------------


def gathered(shard: jax.Array, spec: P) -> jax.Array:
    """The shards of all devices in one array, inside `jax.shard_map`; its derivative is `scattered`."""
    for dim, entry in enumerate(spec):
        shard = jax.lax.all_gather(shard, names(entry), axis=dim, tiled=True) if names(entry) else shard
    return shard


def scattered(whole: jax.Array, spec: P) -> jax.Array:
    """This device's shard of the sum over all devices, inside `jax.shard_map`. Its derivative is `gathered`."""
    for dim, entry in enumerate(spec):
        if names(entry):
            whole = jax.lax.psum_scatter(whole, names(entry), scatter_dimension=dim, tiled=True)
    return whole


def sent_dtype(param_dtype: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike) -> Any:
    """The dtype in which devices send a matrix and its gradient.

    Returns the computation's dtype, or the matrix's if that is smaller.
    """
    return min(jnp.dtype(dtype), jnp.dtype(param_dtype), key=lambda dtype: dtype.itemsize)


# --- rows that are split ----------------------------------------------------------------------------------------------


# Every device gets two pairs of chunks of a long row, unless a chunk would be shorter than this. A kernel gets a chunk
# at a time: 2,048 queries of 8 heads are 128 tiles, about one for each multiprocessor of a GPU. More chunks would be
# balanced better still, but each call sums the gradients of all keys (benchmarks/results/row_division.md).
LEAST_CHUNK = 2048


def pairs_of_chunks(length: int, devices: int) -> int:
    """How many pairs of chunks each device gets of a row.

    A whole document is even work with one pair. Of packed documents a long one is in some chunks only, and the
    shorter the chunks, the more devices share it (benchmarks/results/row_division.md).

    Returns 2 if that divides the row into chunks of 2,048 positions or more, else 1.
    """
    return 2 if length % (4 * devices) == 0 and length >= 4 * devices * LEAST_CHUNK else 1


def in_chunks(whole: jax.Array, axis: int, devices: int) -> jax.Array:
    """Rows in the order in which devices get them: device i of c has the chunks i and 2c − 1 − i of 2c.

    Early positions see few keys and late ones many, so that all devices do the same work in causal attention. A row
    that is long has 4c chunks, and devices get them to and fro, 0, 1, …, 1, 0, 0, 1, …, 1, 0 (`pairs_of_chunks`).

    Returns the array with its chunks in this order. One split along `axis` then gives each device its own.
    """
    return _reordered(whole, axis, _order(whole.shape[axis], devices))


def from_chunks(chunks: jax.Array, axis: int, devices: int) -> jax.Array:
    """Rows in their original order: the inverse of `in_chunks`."""
    order = _order(chunks.shape[axis], devices)
    return _reordered(chunks, axis, sorted(range(len(order)), key=order.__getitem__))


def chunk_starts(axis: str, positions: int) -> list[jax.Array]:
    """Where this device's chunks begin in their rows, inside `jax.shard_map`."""
    device, devices = jax.lax.axis_index(axis).astype(jnp.int32), jax.lax.axis_size(axis)
    number = pairs_of_chunks(positions * devices, devices)
    size = positions // (2 * number)
    pairs = [(2 * devices * i + device, 2 * devices * (i + 1) - 1 - device) for i in range(number)]
    return [chunk * size for pair in pairs for chunk in pair]


def _order(length: int, devices: int) -> list[int]:
    """The chunks of a row in the order of the devices that have them."""
    starts = [2 * devices * i for i in range(pairs_of_chunks(length, devices))]
    return [
        start + chunk for device in range(devices) for start in starts for chunk in (device, 2 * devices - 1 - device)
    ]


def _reordered(x: jax.Array, axis: int, order: list[int]) -> jax.Array:
    if order == sorted(order):  # one device
        return x
    if x.shape[axis] % len(order):
        raise ValueError(
            f"{len(order) // 2} devices share rows of {x.shape[axis]} positions, in {len(order)} chunks, which do not "
            f"divide them. Pad the rows to a multiple of {len(order)}."
        )
    pieces = jnp.split(x, len(order), axis)
    return jnp.concatenate([pieces[chunk] for chunk in order], axis)
