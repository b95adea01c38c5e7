"""Which kernels run a normalisation: one forward, and one backward, which keeps sums over rows as well."""

from collections.abc import Mapping
from typing import Any

import jax

from liger_jax.ops import _dispatch

_FEW_ROWS = 2048  # of these Hopper's teams have five each,
_LEAST_OF_FEW = 5120  # and below this width Triton is faster


def choose(
    op: str,
    kernels: Mapping[str, Any],
    defaults: Mapping[str, tuple[str, ...]],
    implementation: _dispatch.Implementation,
    *arrays: jax.Array | None,
    wide: tuple[int, int],
) -> tuple[str, str]:
    """Chooses the kernels of `op` for its forward and its backward.

    Args:
        op: as `_dispatch.choose` takes it, and so the three that follow.
        kernels: the op's kernels by name.
        defaults: for a platform, the names to try.
        implementation: the user's choice.
        *arrays: rows (N, D) first.
        wide: for each direction, the least D from which Hopper's copy engine is tried first, on many rows of 16 bits.

    Returns:
        Two names for `_dispatch.bind`.
    """
    choose = lambda defaults: _dispatch.choose(op, kernels, defaults, implementation, *arrays)
    if implementation is not None:
        named = choose(defaults)
        return named, named
    x = arrays[0]
    n, d = x.shape
    is_wide = lambda least: d >= (least if n > _FEW_ROWS else max(least, _LEAST_OF_FEW)) and x.dtype.itemsize == 2
    hopper = {**defaults, "gpu": ("mosaic_gpu", *defaults["gpu"])}
    forward, backward = (choose(hopper if is_wide(least) else defaults) for least in wide)
    return forward, backward
