"""Experts on a tensor axis: each one's gate and up by columns, its down by rows, and its router whole.

A device computes its F/devices columns of every expert, for all tokens of the devices that it shares them with, and its
summand of their results. With an expert axis it does so for its own experts alone, whose rows come from other devices.

Columns of gate stand before those of up, so that those of one device are not adjacent: like other joined
projections, gate and up are split by their inputs, and devices exchange columns where a layer uses them. An axis of
fsdp splits the experts, which are gathered as they are. XLA would transpose what it gathers along another axis, and it
does so with the parameters of all layers at once. Only where fsdp does not divide the experts does it split matrices.
"""

from typing import Any

import jax

from liger_jax.models.core.parallel.mesh_axes import does_not_divide
from liger_jax.models.core.parameters import ParameterInfo
from liger_jax.ops.layout import Names

EXPERTS = "experts"  # the kind of a layer whose feed-forward is `ExpertsFeedForward`


def entries_of_experts(shards: Any, info: ParameterInfo, shape: tuple[int, ...]) -> list[Names]:
    """How a parameter of a layer's experts is sharded over the mesh."""
    entries: list[Names] = [() for _ in shape]
    sizes = {}
    experts: Any = info.expert_axis
    if shards.expert is not None:
        entries[experts], sizes[experts] = (shards.expert,), shards.expert_size
    if info.tensor_axis is not None:
        entries[info.tensor_axis], sizes[info.tensor_axis] = (shards.axis,), shards.size
    other = _other_axis(shards, info, shape[experts], shape[-2])
    if other is not None and shards.others:
        entries[other], sizes[other] = (*entries[other], *shards.others), sizes.get(other, 1) * shards.others_size
    for axis, size in sizes.items():
        if shape[axis] % size:
            raise ValueError(does_not_divide("·".join(entries[axis]), size, axis, info, shape))
    return entries


def own_experts(shards: Any, x: jax.Array, info: ParameterInfo, config: Any) -> jax.Array:
    """A parameter of one layer's experts as this device uses it, inside `jax.shard_map`.

    Returns the parameter of this device's experts and columns. The bias of a sum over devices is this device's share.
    """
    experts, is_down = config.experts, any(name.startswith("down") for name in info.name.split("."))
    other = _other_axis(shards, info, experts.count, experts.width if is_down else config.hidden_size)
    if other is not None and shards.others:
        x = jax.lax.all_gather(x, shards.others, axis=other, tiled=True)
    if is_down:
        return x / shards.size if info.kind == "experts_bias" else x
    if info.kind == "experts_lora_a":
        return x
    x = shards.by_devices(x, ((experts.width, 1),) * 2)
    if info.tensor_axis is None:
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(shards.axis), x.ndim - 2, keepdims=False)
    x = jax.lax.all_to_all(x, shards.axis, split_axis=x.ndim - 2, concat_axis=x.ndim - 3, tiled=True)
    return x.squeeze(-2)


def width_field(config: Any) -> str:
    """The name of the config's field that is the width of an expert."""
    return "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"


def _other_axis(shards: Any, info: ParameterInfo, count: int, in_width: int) -> int | None:
    """The axis that fsdp splits, by the number of experts and the size of a weight's inputs; `None` for none."""
    if info.kind == "experts_bias":
        return None
    if count % (shards.expert_size * shards.others_size) == 0:
        return info.expert_axis
    if info.kind == "experts":
        return info.out_axis if in_width % (shards.size * shards.others_size) else info.in_axis
    return None if info.kind in ("experts_lora_a", "experts_lora_b") else info.out_axis  # blocks of codes stay whole
