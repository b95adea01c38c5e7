"""A normalisation's derivative, and which implementations run it: one its forward, and one its backward."""

import dataclasses
import functools
from typing import Any

import jax

from liger_jax.ops.kernels import Choice, Implementation, Kernel, Kernels
from liger_jax.ops.place import Place, place_of
from liger_jax.pallas_kernels.tiles import least_size

# With 2,048 rows or fewer, each of Hopper's teams has five rows at most. Triton is faster then, below 5,120 columns.
_FEW_ROWS = 2048
_LEAST_WIDTH_OF_FEW = 5120


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def normalised(arrays: tuple[jax.Array | None, ...], forward: Kernel, backward: Kernel) -> Any:
    """y of rows x (N, D), a scale (D,) and perhaps a bias; the backward also makes sums over rows."""
    return forward.run(*forward.guarded(*arrays))[0]


def _forward_rule(arrays, forward, backward):
    # x̂ is cheaper to recompute than to read. A bias is kept for its dtype.
    y, sums = forward.run(*forward.guarded(*arrays))
    return y, (*arrays, sums)


def _backward_rule(forward, backward, residuals, dy):
    return (backward.run(*backward.guarded(dy, *residuals)),)


normalised.defvjp(_forward_rule, _backward_rule)


def choose(
    kernels: Kernels,
    implementation: Implementation,
    *arrays: jax.Array | None,
    hopper_widths: tuple[int, int],
    place: Place | None = None,
) -> tuple[Choice, Choice]:
    """Chooses the implementations of a norm's forward and of its backward.

    `hopper_widths`: for each direction, the least D from which Hopper's copy engine is tried first, for many rows of 16
    bits.
    """
    place = place or place_of(*arrays)
    if implementation is not None:
        named = kernels.choose(implementation, *arrays, place=place)
        return named, named
    x = arrays[0]
    n, d = x.shape
    hopper_first = {**kernels.defaults, "gpu": ("mosaic_gpu", *kernels.defaults["gpu"])}

    def choose_from(least_width: int) -> Choice:
        least_width = least_width if least_size(n) > _FEW_ROWS else max(least_width, _LEAST_WIDTH_OF_FEW)
        is_wide = d >= least_width and x.dtype.itemsize == 2
        own = dataclasses.replace(kernels, defaults=hopper_first) if is_wide else kernels
        return own.choose(None, *arrays, place=place)

    forward, backward = map(choose_from, hopper_widths)
    return forward, backward
