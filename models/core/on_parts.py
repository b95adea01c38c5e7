"""Runs a function on every device's part of its operands, and gathers parameters that are split there."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import HeadSplit, SplitHead


def on_parts(
    function: Callable[..., Any],
    split: tuple[Any, ...],
    whole: tuple[Any, ...],
    head: Any,
    spec: P,
    out: Any,
    fsdp: Mapping[str, int],
    axes: tuple[str, ...],
) -> Any:
    """`function(*split, *whole, head)` on every device of the mesh in context, as `Layout.run` promises it.

    Args:
        function: takes one device's parts.
        split: trees of arrays that lie as `spec` says.
        whole: arrays that are whole inside the function. A matrix enters split over `fsdp` if that divides its rows.
        head: the last argument, or `None`.
        spec: how each of `split` lies.
        out: how the results lie.
        fsdp: the axes that split parameters, and their sizes.
        axes: the mesh's axes that are not Manual yet. Inside the function all are.

    Returns:
        The function's results.
    """
    names, parts = tuple(fsdp), math.prod(fsdp.values())
    is_cut = [bool(names) and x is not None and x.ndim == 2 and x.shape[0] % parts == 0 for x in whole]
    # A quantised head is small, and enters whole.
    head_split = _split_of(head, names, parts) if isinstance(head, jax.Array) else None

    def local(own, others, head):
        gather = lambda x: jax.lax.all_gather(x, names, tiled=True)
        others = [gather(x) if cut else x for x, cut in zip(others, is_cut, strict=True)]
        head = head if head_split is None else SplitHead(head, head_split)
        return function(*own, *others, *(() if head is None else (head,)))

    of_whole = tuple(P(names) if cut else P() for cut in is_cut)
    specs = tuple(spec for _ in split), of_whole, P() if head_split is None else head_split.spec
    has_manual_axes = len(axes) < len(jax.sharding.get_abstract_mesh().axis_names)
    left: dict[str, Any] = dict(axis_names=set(axes)) if has_manual_axes else {}
    # Without check_vma: JAX's own attention kernels do not declare the axes that they vary over, and Hopper's loss
    # kernels cannot write in place under it.
    mapped = jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False, **left)
    return mapped(tuple(split), tuple(whole), head)


def _split_of(head: jax.Array, names: tuple[str, ...], parts: int) -> HeadSplit | None:
    """How mesh axes split a head (V, D): its vocabulary, or else its width. None where they divide neither."""
    if parts > 1 and head.shape[0] % parts == 0:
        return HeadSplit((names, ()), (parts, 1))
    if parts > 1 and head.shape[1] % parts == 0:
        return HeadSplit(((), names), (1, parts))
    return None
