"""A model on a mesh: each op on its device's part of the batch, each parameter gathered where it is used."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


def on_batch_shards(
    function: Callable[..., Any],
    batch_axes: tuple[str, ...] | None,
    batch: tuple[Any, ...],
    shared: tuple[Any, ...] = (),
) -> Any:
    """`function(*batch, *shared)` on every device's part of the batch; without axes, a plain call.

    Inside, every op knows how much it computes: no kernel is partitioned by the compiler, which would gather its
    inputs.

    Args:
        function: returns arrays whose leading axis is the batch's.
        batch_axes: the axes, of the mesh in context, over which the batch is sharded.
        batch: arrays with a leading batch axis; `None` entries pass.
        shared: arrays that every device has whole, inside; `None` entries pass. A matrix comes in split along its
            first axis over the last of `batch_axes`, where that divides it, and so does its gradient go out.

    Returns:
        What `function` returns, sharded like the batch.
    """
    if not batch_axes:
        return function(*batch, *shared)
    return _sharded(function, batch_axes, batch, shared, P(batch_axes))


def sum_over_batch_shards(
    function: Callable[..., tuple[jax.Array, Any]],
    batch_axes: tuple[str, ...],
    batch: tuple[Any, ...],
    shared: tuple[Any, ...],
) -> tuple[jax.Array, Any]:
    """As `on_batch_shards`, for a function that returns a sum over its tokens and something else per token.

    Args:
        function: returns (sum, arrays whose leading axis is the batch's).
        batch_axes: as there.
        batch: as there.
        shared: as there.

    Returns:
        (the sum over all tokens, the arrays).
    """

    def local(*arrays):
        total, others = function(*arrays)
        return jax.lax.psum(total, batch_axes), others

    return _sharded(local, batch_axes, batch, shared, (P(), P(batch_axes)))


def _sharded(function, batch_axes, batch, shared, out_specs):
    last = batch_axes[-1]
    size = jax.sharding.get_abstract_mesh().shape[last]
    is_cut = [x is not None and x.ndim == 2 and x.shape[0] % size == 0 for x in shared]

    def local(*arrays):
        own, others = arrays[: len(batch)], arrays[len(batch) :]
        whole = lambda x: jax.lax.all_gather(x, last, tiled=True)
        return function(*own, *(whole(x) if cut else x for x, cut in zip(others, is_cut, strict=True)))

    specs = (*(P(batch_axes) for _ in batch), *(P(last) if cut else P() for cut in is_cut))
    # Without check_vma: JAX's own attention kernels do not tell how they vary, and where that is checked, Hopper's
    # kernels of the loss cannot write in place.
    return jax.shard_map(local, in_specs=specs, out_specs=out_specs, check_vma=False)(*batch, *shared)


def gathered(parameters: Any, batch_axes: tuple[str, ...] | None, dtype: Any) -> Any:
    """A layer's parameters, whole on every device: FSDP gathers them just before their use.

    Matrices take the computation's dtype first, in which they are half as much to send.

    Args:
        parameters: a tree of arrays.
        batch_axes: `None` where there is no mesh; the parameters are returned as they are.
        dtype: of the computation.

    Returns:
        The tree.
    """
    if not batch_axes:
        return parameters

    def gather(x):
        x = x.astype(dtype) if x.ndim > 1 else x
        return jax.lax.with_sharding_constraint(x, P())

    return jax.tree.map(gather, parameters)
