"""A model on a mesh: ops run on their device's part of the batch, and parameters are gathered where they are used."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import HeadSplit, SplitHead


def with_auto_axes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a model's call run with Auto axes on a mesh whose axes are Explicit.

    Inside the call, `on_batch_shards` and `gathered` give the specs and the compiler propagates them. Outside, the type
    of every result and gradient says how it is sharded: like its parameter, or along the batch.

    Args:
        call: a method that takes arrays by name and returns a tree of scalars and of arrays with a leading batch axis.

    Returns:
        The method for every mesh.
    """

    @functools.wraps(call)
    def on_mesh(model: Any, input_ids: jax.Array, **arguments: Any) -> Any:
        axes = model.kernels.batch_axes
        if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
            if AxisType.Explicit in jax.typeof(input_ids).sharding.mesh.axis_types:
                raise ValueError(
                    "input_ids lie on a mesh with Explicit axes, but another mesh is in context. Call the model under "
                    "jax.set_mesh(mesh), with KernelOptions(batch_axes=…) for the axes that split the batch."
                )
            return call(model, input_ids, **arguments)
        _check_batch(jax.typeof(input_ids).sharding.spec, axes, arguments)
        graph, state = nnx.split(model)
        leaves_of = jax.tree.leaves
        is_array = lambda x: leaves_of(x) and all(isinstance(leaf, jax.Array) for leaf in leaves_of(x))
        arrays = {name: x for name, x in arguments.items() if is_array(x)}
        others = {name: x for name, x in arguments.items() if name not in arrays}
        structure: Any = None

        def run(state, input_ids, arrays):
            nonlocal structure
            leaves, tree = jax.tree.flatten(call(nnx.merge(graph, state), input_ids, **arrays, **others))
            is_number = [x.ndim == 0 for x in leaves]
            structure = tree, is_number
            return [
                [x for x, number in zip(leaves, is_number, strict=True) if number == kind] for kind in (True, False)
            ]

        on_auto_axes: Any = jax.sharding.auto_axes(run, out_sharding=[P(), P(axes)])
        numbers, of_batch = on_auto_axes(state, input_ids, arrays)
        tree, is_number = structure
        rest = {True: iter(numbers), False: iter(of_batch)}
        return jax.tree.unflatten(tree, [next(rest[number]) for number in is_number])

    return on_mesh


def _check_batch(spec: P, axes: tuple[str, ...] | None, arguments: dict[str, Any]) -> None:
    """Raises a ValueError unless input_ids lie on an Explicit mesh as the model's options say."""
    split = spec[0] if len(spec) else None
    if axes is None or ((split,) if isinstance(split, str) else split) != axes or any(spec[1:]):
        raise ValueError(
            f"input_ids lie on a mesh with Explicit axes as {spec}, and kernels.batch_axes={axes}. Pass "
            "KernelOptions(batch_axes=…) with the axes that split the batch, and split nothing else of input_ids."
        )
    if arguments.get("cache") is not None:
        raise ValueError("cache is given on a mesh with Explicit axes, which it cannot lie on. Make the axes Auto.")


def on_batch_shards(
    function: Callable[..., Any],
    batch_axes: tuple[str, ...] | None,
    batch: tuple[Any, ...],
    shared: tuple[Any, ...] = (),
    head: Any = None,
) -> Any:
    """Runs `function(*batch, *shared)` on every device's part of the batch; without axes, a plain call.

    The shard_map keeps kernels from the compiler's partitioner, which would gather their inputs.

    Args:
        function: returns arrays whose leading axis is the batch's.
        batch_axes: the axes of the mesh in context over which the batch is sharded.
        batch: arrays with a leading batch axis; `None` entries pass.
        shared: arrays that are whole inside the function; `None` entries pass. A matrix enters split along its first
            axis over the last of `batch_axes`, if that divides it, and its gradient leaves the same way.
        head: the function's last argument, if there is one, an array or quantised. A linear loss gathers an array as it
            needs it; a quantised head is whole.

    Returns:
        The function's results, sharded like the batch.
    """
    if not batch_axes:
        return function(*batch, *shared, *(() if head is None else (head,)))
    return _sharded(function, batch_axes, batch, shared, P(batch_axes), head)


def sum_over_batch_shards(
    function: Callable[..., tuple[jax.Array, Any]],
    batch_axes: tuple[str, ...],
    batch: tuple[Any, ...],
    shared: tuple[Any, ...] = (),
    head: Any = None,
) -> tuple[jax.Array, Any]:
    """Does what `on_batch_shards` does for a function that returns a sum over its tokens and arrays per token.

    Args:
        function: returns (sum, arrays whose leading axis is the batch's).
        batch_axes: the axes of the mesh in context over which the batch is sharded.
        batch: arrays with a leading batch axis; `None` entries pass.
        shared: arrays that are whole inside the function, as in `on_batch_shards`.
        head: the function's last argument, if there is one, as in `on_batch_shards`.

    Returns:
        (the sum over all tokens, the arrays).
    """

    def local(*arrays):
        total, others = function(*arrays)
        return jax.lax.psum(total, batch_axes), others

    return _sharded(local, batch_axes, batch, shared, (P(), P(batch_axes)), head)


def _sharded(function, batch_axes, batch, shared, out_specs, head=None):
    last, mesh = batch_axes[-1], jax.sharding.get_abstract_mesh()
    if missing := [axis for axis in batch_axes if axis not in mesh.axis_names]:
        raise ValueError(
            f"KernelOptions(batch_axes={batch_axes}): the mesh in context has the axes {mesh.axis_names}, and lacks "
            f"{missing}. Call the model under jax.set_mesh(mesh)."
        )
    size = mesh.shape[last]
    is_cut = [x is not None and x.ndim == 2 and x.shape[0] % size == 0 for x in shared]
    # A quantised head is small, and enters whole.
    split = _split_of(head, last, size) if isinstance(head, jax.Array) else None

    def local(own, others, head):
        whole = lambda x: jax.lax.all_gather(x, last, tiled=True)
        others = [whole(x) if cut else x for x, cut in zip(others, is_cut, strict=True)]
        head = head if split is None else SplitHead(head, split)
        return function(*own, *others, *(() if head is None else (head,)))

    of_shared = tuple(P(last) if cut else P() for cut in is_cut)
    specs = tuple(P(batch_axes) for _ in batch), of_shared, P() if split is None else split.spec
    # Without check_vma: JAX's own attention kernels do not declare the axes that they vary over, and Hopper's loss
    # kernels cannot write in place under it.
    mapped = jax.shard_map(local, in_specs=specs, out_specs=out_specs, check_vma=False)
    return mapped(tuple(batch), tuple(shared), head)


def _split_of(head: jax.Array, axis: str, size: int) -> HeadSplit | None:
    """How a mesh axis splits a head (V, D): its vocabulary, or else its width. None where it divides neither."""
    if size > 1 and head.shape[0] % size == 0:
        return HeadSplit(((axis,), ()), (size, 1))
    if size > 1 and head.shape[1] % size == 0:
        return HeadSplit(((), (axis,)), (1, size))
    return None


def gathered(parameters: Any, batch_axes: tuple[str, ...] | None, dtype: Any) -> Any:
    """Gathers a layer's parameters on every device just before their use, as FSDP does.

    Matrices are converted to the computation's dtype first: in bfloat16 half as many bytes are sent.

    Args:
        parameters: a tree of arrays.
        batch_axes: `None` without a mesh; the parameters are then returned unchanged.
        dtype: dtype of the computation.

    Returns:
        The tree of whole arrays.
    """
    if not batch_axes:
        return parameters

    def gather(x):
        # Codes of quantised weights are gathered as they are, in 4 or 8 bits.
        x = x.astype(dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x
        return jax.lax.with_sharding_constraint(x, P())

    return jax.tree.map(gather, parameters)
