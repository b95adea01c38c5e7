"""Meshes by their text, and how parameters and optimizer state lie on them: fully sharded, as FSDP and ZeRO-3 do."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")
# By a parameter's last name, the axis of the layer's own array that is split over "fsdp". All families name their
# parameters alike. Vectors are small: where the mesh does not divide them, every device has them whole. The codes and
# scales of quantised kernels are split along the output, so that blocks stay whole. A quantised head is split like any.
SPLIT_AXIS = {"embed_tokens": 0, "lm_head": 0, "kernel": 0, "bias": 0, "scale": 0, "codes": 1, "scales": 1}
STACKED = "layers"  # parameters under this name have an axis of layers in front, unless a layer's number follows


def parse_mesh(text: str | None, num_devices: int) -> dict[str, int]:
    """A mesh by text such as "data=2,fsdp=8".

    Args:
        text: names and sizes; `None` for all devices along "fsdp".
        num_devices: which the sizes must multiply to; an axis that is not named has 1.

    Returns:
        Sizes of "data", along which the batch is split, and of "fsdp", along which the parameters are split as well.

    Raises:
        ValueError: the text is no mesh, or does not have that many devices.

    Example:
        >>> parse_mesh("data=2,fsdp=4", 8)
        {'data': 2, 'fsdp': 4}
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    if text is None:
        return sizes | {"fsdp": num_devices}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh={text!r} must be sizes of {' and '.join(AXES)}, as in 'data=2,fsdp=8'.")
        sizes[name] = int(size)
    if math.prod(sizes.values()) != num_devices:
        raise ValueError(
            f"mesh={text!r} has {math.prod(sizes.values())} devices, and the target has {num_devices}. "
            f"Let the sizes multiply to {num_devices}, as fsdp={num_devices} does."
        )
    return sizes


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


def split(path: tuple[Any, ...], shape: tuple[int, ...], fsdp: int) -> P:
    """How one parameter, or what an optimizer holds for it, lies on the mesh.

    Args:
        path: the parameter's path in its tree, or in the optimizer's.
        shape: the parameter's shape.
        fsdp: devices along "fsdp".

    Returns:
        The partition.

    Raises:
        ValueError: the mesh does not divide a matrix.
    """
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    names = [name for name in names if name != "value"]
    if fsdp == 1 or not shape or names[-1] not in SPLIT_AXIS:
        return P()
    stacked = STACKED in names and not any(name.isdigit() for name in names[names.index(STACKED) :])
    layer_axes = 1 if stacked else 0
    axis = layer_axes + (SPLIT_AXIS["lm_head"] if "lm_head" in names else SPLIT_AXIS[names[-1]])
    if shape[axis] % fsdp == 0:
        return P(*[None] * axis, "fsdp")
    if len(shape) - layer_axes > 1:
        raise ValueError(
            f"fsdp={fsdp} does not divide axis {axis} of {'.'.join(names)}, whose shape is {shape}. "
            f"Choose a size that divides {shape[axis]}, and give the other devices to data."
        )
    return P()


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The shardings of parameters, or of an optimizer's state.

    Args:
        tree: a tree of arrays or their types.
        mesh: with an axis "fsdp".

    Returns:
        A tree of `NamedSharding`.
    """

    def sharding(path, x):
        return NamedSharding(mesh, split(path, x.shape, mesh.shape["fsdp"]))

    return jax.tree_util.tree_map_with_path(sharding, tree)
