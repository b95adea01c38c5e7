"""The axes of a mesh that a layout takes, and how arrays are put on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from liger_jax.models.core.parameters import ParameterInfo
from liger_jax.ops.layout import Names, devices_along, partition


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
            f"{caller} is called inside a jax.shard_map over {tuple(manual)} only, and the layout uses other axes of "
            "the mesh. Remove that jax.shard_map, and let the layout split the batch over all axes."
        )


def sizes_of(mesh: Mesh | AbstractMesh, layout: Any) -> dict[str, int]:
    """The devices along each axis of a mesh, but for axes that are Manual."""
    if missing := [name for name in layout.axes if name not in mesh.axis_names]:
        raise ValueError(
            f"{layout}: the mesh has the axes {mesh.axis_names}, and lacks {missing}. Name the axes that it has: "
            "KernelOptions(layout=Layout(batch=…, fsdp=…))."
        )
    sizes = {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}
    for name, size in sizes.items():
        if size > 1 and name not in layout.axes:
            raise ValueError(
                f"{layout}: the mesh has {size} devices along {name!r}, which the layout does not name, so that all "
                f"of them would compute the same. Let it split the batch, Layout(batch={(*layout.batch, name)}, …), "
                "or make a mesh without it."
            )
    return sizes


def placed(batch: Any, mesh: Mesh, rows: Names, positions: str | None, length: int | None) -> Any:
    """A batch on a mesh, as `Layout.place` promises it."""
    rows_of = lambda x: jnp.shape(x)[0] if jnp.ndim(x) else 0
    shards, number = devices_along(rows, mesh.shape), max(map(rows_of, jax.tree.leaves(batch)), default=0)
    if number % shards:
        raise ValueError(
            f"place: the batch has {number} rows, which {'·'.join(rows)}={shards} does not divide. Pass a "
            f"multiple of {shards} rows."
        )

    def spec_for(x):
        is_split = length is not None and jnp.shape(x)[1:2] == (length,)
        return partition(rows if jnp.ndim(x) and rows_of(x) == number else None, positions if is_split else None)

    return jax.tree.map(lambda x: put(x, NamedSharding(mesh, spec_for(x))), batch)


def put(x: Any, sharding: NamedSharding | None) -> Any:
    """An array, or its type, on the devices of its process; `None` for the default device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def does_not_divide(
    names: str, shards: int, axis: int, info: ParameterInfo, shape: tuple[int, ...], cure: str = ""
) -> str:
    """The sentence that says that so many devices do not divide an axis of a parameter of this shape."""
    cure = cure or f"; the nearest to {shards} is {nearest_divisor(shape[axis], shards)}."
    return (
        f"{names}={shards} does not divide axis {axis} of {info.name}, whose shape is {tuple(shape)}. Choose a size "
        f"that divides {shape[axis]}{cure}"
    )


def nearest_divisor(number: int, size: int) -> int:
    """The divisor of a number that is nearest to a size; of two, the smaller one."""
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - size), n))
