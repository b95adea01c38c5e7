"""The axes of a mesh that a layout may split arrays by: those that are not Manual."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh


def open_axes(layout: Any) -> dict[str, int]:
    """The axes of the mesh in context that are not Manual, and the devices along them."""
    mesh = jax.sharding.get_abstract_mesh()
    if layout.axes and mesh.empty:
        raise ValueError(f"{layout}: no mesh is in context. Call the model under jax.set_mesh(mesh).")
    return sizes_of(mesh, layout) if layout.axes else {}


def check_takes_all_axes(caller: str, layout: Any) -> None:
    """Raises a ValueError inside of a jax.shard_map that leaves axes to the layout."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and open_axes(layout):
        raise ValueError(
            f"{caller} is called inside a jax.shard_map over {tuple(manual)} alone, and the layout takes other axes of "
            "the mesh. Leave that jax.shard_map out, and let the layout split the batch over all axes."
        )


def sizes_of(mesh: Mesh | AbstractMesh, layout: Any) -> dict[str, int]:
    """The devices along each axis of a mesh, but for axes that are Manual."""
    if missing := [name for name in layout.axes if name not in mesh.axis_names]:
        raise ValueError(
            f"{layout}: the mesh has the axes {mesh.axis_names}, and lacks {missing}. Name the axes that it has: "
            "KernelOptions(layout=Layout(batch=…, fsdp=…))."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    sizes = {name: size for name, size in mesh.shape.items() if kinds[name] != AxisType.Manual}
    for name, size in sizes.items():
        if size > 1 and name not in layout.axes:
            raise ValueError(
                f"{layout}: the mesh has {size} devices along {name!r}, which the layout does not name, so that all "
                f"of them would compute the same. Let it split the batch, Layout(batch={(*layout.batch, name)}, …), "
                "or make a mesh without it."
            )
    return sizes
