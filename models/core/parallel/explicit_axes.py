"""Models on Explicit meshes: axes are Auto inside of a call, and results' types have their sharding outside."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.layout import Layout
from liger_jax.models.core.parallel.mesh_axes import open_axes
from liger_jax.ops.layout import along, devices_along, full_spec, is_explicit, names
from liger_jax.ops.meshes import aligned_over_one_device


def with_auto_axes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a model's call run with Auto axes on a mesh whose axes are Explicit.

    Inside the call, the model's layout gives the specs and the compiler propagates them. Outside, the type of every
    result and gradient says how it is sharded: like its parameter, or along the batch.

    `call`: a method that takes arrays by name and returns a tree of scalars and of arrays with a leading batch axis. A
    result whose arrays of some fields have none names them, as `CausalLMOutput.sums_over_tokens` does.
    """

    @functools.wraps(call)
    def on_mesh(model: Any, input_ids: jax.Array, **arguments: Any) -> Any:
        layout = model.kernels.mesh_layout
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes:
            graph, state = nnx.split(model)
            model = nnx.merge(graph, aligned_over_one_device(state, input_ids))
        if not mesh.explicit_axes:
            if is_explicit(input_ids):
                raise ValueError(
                    "input_ids are sharded over a mesh with Explicit axes, but another mesh is in context. Call the "
                    "model under jax.set_mesh(mesh), with KernelOptions(layout=…) for the axes that split the batch."
                )
            _check_rows(input_ids, layout)
            return call(model, input_ids, **arguments)
        _check_batch(jax.typeof(input_ids).sharding.spec, layout, arguments)
        graph, state = nnx.split(model)
        leaves_of = jax.tree.leaves
        is_array = lambda x: leaves_of(x) and all(isinstance(leaf, jax.Array) for leaf in leaves_of(x))
        arrays = {name: x for name, x in arguments.items() if is_array(x)}
        others = {name: x for name, x in arguments.items() if name not in arrays}
        structure: Any = None

        def run(state, input_ids, arrays):
            nonlocal structure
            result = call(nnx.merge(graph, state), input_ids, **arrays, **others)
            sums = {name: getattr(result, name) for name in getattr(type(result), "sums_over_tokens", ())}
            leaves, tree = jax.tree.flatten(dataclasses.replace(result, **dict.fromkeys(sums)) if sums else result)
            is_number = [x.ndim == 0 for x in leaves]
            structure = tree, is_number
            numbers, of_batch = (
                [x for x, number in zip(leaves, is_number, strict=True) if number == kind] for kind in (True, False)
            )
            return sums, numbers, of_batch

        out = P(), P(), _of_tokens(layout)
        on_auto_axes: Any = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=out)
        if mesh.manual_axes and model.config.experts is not None and model.model.stack.scan:
            raise ValueError(
                f"a mixture of experts whose layers are scanned is called inside a jax.shard_map over "
                f"{tuple(mesh.manual_axes)}, and the mesh's other axes are Explicit, which JAX cannot compile. Pass "
                "scan_layers=False, or make the axes Auto."
            )
        if mesh.manual_axes:
            # Where the jax.shard_map around is differentiated, JAX cannot take residuals out that are sharded over Auto
            # axes. So there are none: the backward makes them again.
            on_auto_axes = jax.checkpoint(on_auto_axes, prevent_cse=False)
        sums, numbers, of_batch = on_auto_axes(state, input_ids, arrays)
        tree, is_number = structure
        rest = {True: iter(numbers), False: iter(of_batch)}
        result = jax.tree.unflatten(tree, [next(rest[number]) for number in is_number])
        return dataclasses.replace(result, **sums) if sums else result

    return on_mesh


def _check_rows(input_ids: Any, layout: Layout) -> None:
    """Raises a ValueError unless the devices over which the layout splits the batch divide its rows."""
    devices = devices_along(layout.batch, open_axes(layout))
    rows = input_ids.shape[0] if getattr(input_ids, "ndim", 0) else devices
    if rows % devices:
        raise ValueError(
            f"input_ids has {rows} {'row' if rows == 1 else 'rows'}, which the {devices} devices along "
            f"{'·'.join(layout.batch)} do not divide. Pass a multiple of {devices} rows, such as "
            f"jnp.repeat(input_ids, {devices}, axis=0); generate takes any number."
        )


def _check_batch(spec: P, layout: Layout, arguments: dict[str, Any]) -> None:
    """Raises a ValueError unless input_ids are sharded over an Explicit mesh as the model's layout says."""
    lie, wanted = ([names(entry) for entry in full_spec(x, 2)] for x in (spec, _of_tokens(layout)))
    if not layout.axes or lie != wanted:
        raise ValueError(
            f"input_ids are sharded over a mesh with Explicit axes as {spec}, but the layout shards the batch over "
            f"{layout.batch}. Pass KernelOptions(layout=Layout(batch=…)) with the axes that split input_ids, "
            "which must split only their rows, or place the batch by layout.place(batch)."
        )
    if arguments.get("cache") is not None:
        raise ValueError(
            "cache is given on a mesh with Explicit axes, over which it cannot be sharded. Make the axes Auto."
        )


def _of_tokens(layout: Layout) -> P:
    """How tokens and a model's results for them are sharded over the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = layout.of_rows if layout.sequence_shards() is None else layout.in_loss
    return along(spec, set(mesh.axis_names) - set(mesh.manual_axes))
