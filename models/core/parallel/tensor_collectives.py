"""The collectives of a tensor axis: they gather positions to whole rows, and sum the devices' summands.

Two collectives enclose each sublayer, and two the embedding and the head, where whole rows are needed:

    all tokens = `all_tokens`(own positions)           own positions = `summed_tokens`(this device's summand)
    whole rows = `all_positions`(own positions)        own positions = `summed`(this device's summand of whole rows)

"All tokens" are concatenated by device, which makes no difference to products: XLA would transpose arrays that it
gathers and scatters along an axis that is not the first. Only attention puts its heads `in_rows`.

JAX derives the backward: the derivative of one collective is the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import gathered, scattered


def all_positions(x: jax.Array, axis: str | None) -> jax.Array:
    """The rows (B, T, D) of the positions (B, own, D) that the devices of a mesh axis have."""
    return gathered(x, P(None, axis))


def summed(x: jax.Array, axis: str | None) -> jax.Array:
    """This device's positions (B, own, D) of the sum of rows (B, T, D) over the devices of a mesh axis."""
    return scattered(x, P(None, axis))


def all_tokens(x: jax.Array, axis: str | None) -> jax.Array:
    """The positions (B, own, D) of all devices of a mesh axis, as rows (devices·B, own, D).

    Returns device 0's rows, device 1's, …; the same on every device of the axis.
    """
    return gathered(x, P(axis))


def summed_tokens(x: jax.Array, axis: str | None) -> jax.Array:
    """This device's positions (B, own, D) of a sum over the devices of a mesh axis."""
    return scattered(x, P(axis))


def in_rows(x: jax.Array, axis: str | None) -> jax.Array:
    """Whole rows (B, T, W) from a result for `all_tokens`."""
    if axis is None:
        return x
    devices, width = jax.lax.axis_size(axis), x.shape[2]
    shards = x.reshape(devices, -1, *x.shape[1:])
    return jnp.swapaxes(shards, 0, 1).reshape(shards.shape[1], -1, width)


def by_device(x: jax.Array, axis: str | None) -> jax.Array:
    """The inverse of `in_rows`."""
    if axis is None:
        return x
    devices, width = jax.lax.axis_size(axis), x.shape[2]
    shards = x.reshape(x.shape[0], devices, -1, width)
    return jnp.swapaxes(shards, 0, 1).reshape(-1, *shards.shape[2:])


def product_of_shards(projection: Any, x: jax.Array, axis: str | None) -> jax.Array:
    """A sublayer's last projection, whose inputs a mesh axis splits."""
    if axis is not None and hasattr(type(projection), "magnitude"):  # DoRA's norms are those of whole columns
        return summed_tokens(projection(x, input_axis=axis), axis)
    return summed_tokens(projection(x), axis)


def axis_of_shard(axis: str | None, projection: Any) -> str | None:
    """The mesh axis whose devices have the other inputs of a projection."""
    return axis if projection.kernel.shape[-2] < projection.in_features else None
