"""Meshes by their axes' sizes, and how planned runs lie on them: fully sharded, and split by tensor parallelism."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from liger_jax.models import Layout

BATCH_AXES = ("data", "fsdp")
AXES = (*BATCH_AXES, "tensor")
LAYOUT = Layout(batch=BATCH_AXES, fsdp="fsdp")  # without a tensor axis


def layout_of(sizes: Mapping[str, int]) -> Layout:
    """How a run lies on a mesh.

    Args:
        sizes: the sizes of the mesh's axes.

    Returns:
        The layout, which names the axes that the mesh has.
    """
    return Layout(batch=BATCH_AXES, fsdp="fsdp", tensor="tensor" if "tensor" in sizes else None)


def mesh_sizes(given: Mapping[str, int] | None, num_devices: int) -> dict[str, int]:
    """The axes of a mesh, with what is not said.

    Args:
        given: sizes by the axes' names; `None` for all devices along "fsdp".
        num_devices: which the sizes must multiply to; an axis that is not named has 1.

    Returns:
        Sizes of "data", along which the batch is split; of "fsdp", along which the parameters are split as well; and,
        if it has several devices, of "tensor", along which heads, feed-forwards and the vocabulary are split.

    Raises:
        ValueError: an axis is unknown or has no size, or there are not that many devices.

    Example:
        >>> mesh_sizes({"fsdp": 4, "tensor": 2}, 8), mesh_sizes(None, 8)
        ({'data': 1, 'fsdp': 4, 'tensor': 2}, {'data': 1, 'fsdp': 8})
    """
    if given is None:
        return {"data": 1, "fsdp": num_devices}
    given = {name: size for name, size in given.items() if size != 1} or given
    text = in_words(given)
    for name, size in given.items():
        if name not in AXES and size != 1 or size < 1:
            raise ValueError(f"mesh={text!r} must be sizes of {', '.join(AXES)}, as in 'fsdp=4,tensor=2'.")
    if (product := math.prod(given.values())) != num_devices:
        raise ValueError(
            f"mesh={text!r} has {product} devices, and the target has {num_devices}. "
            f"Let the sizes multiply to {num_devices}, as fsdp={num_devices} does."
        )
    sizes = {name: given.get(name, 1) for name in AXES}
    return {name: size for name, size in sizes.items() if name in BATCH_AXES or size > 1}


def meshes(num_devices: int, most_tensor: int = 8) -> list[dict[str, int]]:
    """The meshes that are worth a try, the one that sends least first: fully sharded, with tensor axes of 1, 2, 4, ….

    Args:
        num_devices: how many there are.
        most_tensor: the most devices along "tensor", which send activations of every layer: those of a host.

    Returns:
        Sizes, as `mesh_sizes` returns them. Devices that do not all split parameters copy static memory, and such a
        mesh is no better than one in which they do.

    Example:
        >>> meshes(4)[1]
        {'data': 1, 'fsdp': 2, 'tensor': 2}
    """
    sizes = [2**i for i in range(most_tensor.bit_length()) if 2**i <= most_tensor and num_devices % 2**i == 0]
    return [mesh_sizes({"fsdp": num_devices // tensor, "tensor": tensor}, num_devices) for tensor in sizes]


def in_words(sizes: Mapping[str, int]) -> str:
    """A mesh as the command's option has it.

    Args:
        sizes: the sizes of its axes.

    Returns:
        Such as "fsdp=4,tensor=2".
    """
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def make_mesh(devices: list[Any], sizes: dict[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
    """The mesh of these devices.

    Args:
        devices: real ones, or a topology's.
        sizes: the sizes of its axes.
        axis_type: the type of all axes.

    Returns:
        The mesh.
    """
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(axis_type,) * len(sizes))
