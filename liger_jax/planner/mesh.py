"""Meshes by their text, and how planned runs lie on them: fully sharded, as FSDP and ZeRO-3 do."""

import math
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from liger_jax.models import Layout

AXES = ("data", "fsdp")
LAYOUT = Layout(batch=AXES, fsdp="fsdp")


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
