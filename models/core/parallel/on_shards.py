"""Runs a function on every device's shard of its operands, and gathers parameters that are split there."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import gathered
from liger_jax.ops.linear.split_head import HeadSplit, SplitHead, head_split
from liger_jax.ops.meshes import on_devices


def on_shards(
    function: Callable[..., Any],
    split: tuple[Any, ...],
    whole: tuple[Any, ...],
    head: Any,
    spec: P | tuple[P, ...],
    out: Any,
    fsdp: Mapping[str, int],
    axes: tuple[str, ...],
) -> Any:
    """`function(*split, *whole, head)` on every device of the mesh in context, as `Layout.run` promises it.

    `whole`: arrays that are whole inside the function. A matrix enters split over `fsdp` if that divides its rows.
    `axes`: the mesh's axes that are not Manual yet. Inside the function all are.
    """
    names, shards = tuple(fsdp), math.prod(fsdp.values())
    is_cut = [bool(names) and x is not None and x.ndim == 2 and x.shape[0] % shards == 0 for x in whole]
    # A quantised head is small, and enters whole.
    split_of_head = _split_of(head, fsdp) if isinstance(head, jax.Array) else None

    def local(own, others, head):
        others = [gathered(x, P(names)) if cut else x for x, cut in zip(others, is_cut, strict=True)]
        head = head if split_of_head is None else SplitHead(head, split_of_head)
        return function(*own, *others, *(() if head is None else (head,)))

    of_whole = tuple(P(names) if cut else P() for cut in is_cut)
    of_split = spec if isinstance(spec, tuple) else tuple(spec for _ in split)
    specs = of_split, of_whole, P() if split_of_head is None else split_of_head.spec
    return mapped(local, specs, out, axes)(tuple(split), tuple(whole), head)


def mapped(function: Callable[..., Any], specs: Any, out: Any, axes: tuple[str, ...]) -> Callable[..., Any]:
    """The function in a `jax.shard_map` over the mesh in context, in which all axes are Manual."""
    has_manual_axes = len(axes) < len(jax.sharding.get_abstract_mesh().axis_names)
    return on_devices(function, in_specs=specs, out_specs=out, axis_names=axes if has_manual_axes else ())


def _split_of(head: jax.Array, fsdp: Mapping[str, int]) -> HeadSplit | None:
    """How mesh axes split a head (V, D): its vocabulary, or else its width. None where they divide neither."""
    names, shards = tuple(fsdp), math.prod(fsdp.values())
    if head.shape[0] % shards == 0:
        return head_split(P(names), fsdp)
    return head_split(P(None, names), fsdp) if head.shape[1] % shards == 0 else None
