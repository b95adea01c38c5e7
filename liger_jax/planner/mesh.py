"""Meshes by their axes' sizes, and which of them are worth a try."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from liger_jax.training.meshes import AXES, BATCH_AXES, in_words

# The least positions of a row for each device along "sequence" that are worth a try. With fewer, a tensor axis of as
# many devices sends less: a layer of LLaMA-3-8B then gathers and scatters fewer parameters, 1.3 GB without it. It sends
# 88 KiB for each token that devices share, and a sequence axis 12. So they are even at 4,200 tokens a device for two
# devices, and at 1,850 for eight.
LEAST_POSITIONS = 2048


def mesh_sizes(given: Mapping[str, int] | None, num_devices: int) -> dict[str, int]:
    """Sizes of all axes of a mesh: `given` by name, or all devices along "fsdp"; an axis that is not named has 1."""
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


def meshes(num_devices: int, seq: int, most_tensor: int = 8) -> list[list[dict[str, int]]]:
    """The meshes that are worth a try, by the devices along "tensor": 1, 2, 4, …, the one that sends least first. For
    each of them: fully sharded, then with rows split over 2, 4, … devices, as long as each has `LEAST_POSITIONS` of a
    row. Split rows need no less memory than as many whole ones, so the first mesh that divides the batch is the one to
    take. Devices that do not all split parameters copy static memory, and such a mesh is no better than one in which
    they do.
    """

    def sizes(most: int, among: int) -> list[int]:
        return [size for i in range(among.bit_length()) if among % (size := 2**i) == 0 and (i == 0 or size <= most)]

    def on(sequence: int, tensor: int) -> dict[str, int]:
        fsdp = num_devices // (sequence * tensor)
        return mesh_sizes(dict(fsdp=fsdp, sequence=sequence, tensor=tensor), num_devices)

    most = seq // LEAST_POSITIONS
    return [
        [on(sequence, tensor) for sequence in sizes(most, num_devices // tensor)]
        for tensor in sizes(most_tensor, num_devices)
    ]


def make_mesh(devices: list[Any], sizes: dict[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
    """The mesh of these devices."""
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(axis_type,) * len(sizes))
