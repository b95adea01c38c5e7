"""Helpers that all Pallas kernels share: tile sizes, masks, output types."""

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.devices import TPUS

_MOST_BITS = 40  # of the lower bound of a symbolic dimension
TPU_LEAST_VMEM_BYTES = TPUS["v4"].vmem_bytes


def cdiv(a: int, b: int) -> int:
    """Divides and rounds up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1: Triton's arrays come in such sizes only."""
    return 1 << (n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    """The largest power of two that is at most n; 1 if n is less."""
    return 1 << max(0, n.bit_length() - 1)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return cdiv(n, multiple) * multiple


def is_symbolic(size: Any) -> bool:
    """Whether a dimension is symbolic: a batch that `jax.export` leaves open."""
    return not isinstance(size, int)


def least_size(size: Any) -> int:
    """The dimension, or the lower bound of a symbolic one: a plan for it must hold for every size.

    JAX reports the bounds of a symbolic dimension by comparisons only.
    """
    if not is_symbolic(size):
        return size

    def is_at_least(number: int) -> bool:
        try:
            return bool(size >= number)
        except jax.errors.InconclusiveDimensionOperation:
            return False

    power = next((i for i in range(_MOST_BITS) if not is_at_least(1 << i)), _MOST_BITS)
    return bisect.bisect_left(range(1, 1 << power), True, key=lambda number: not is_at_least(number + 1)) + 1


def promoted(*dtypes: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The dtype that JAX promotes these to by default, under strict promotion too."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def in_float32(x: jax.Array) -> jax.Array:
    """x in float32; in float64 if it is float64."""
    return x.astype(promoted(x.dtype, jnp.float32))


def in_bounds(start: jax.Array | int, size: int, bound: jax.Array | int, axis: int, rank: int = 2) -> jax.Array:
    """Mask of the given rank, of length `size` along `axis`, 1 elsewhere: True where start + i < bound."""
    shape = [1] * rank
    shape[axis] = size
    return start + jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis) < bound


def mask_of_tile(starts: Sequence[jax.Array | int], sizes: Sequence[int], bounds: Sequence[int]) -> jax.Array | None:
    """True inside of `bounds`, for a tile of `sizes`. None if all tiles are full: Triton cannot find that out."""
    axes = [axis for axis, (size, bound) in enumerate(zip(sizes, bounds, strict=True)) if bound % size]
    masks = [in_bounds(starts[axis], sizes[axis], bounds[axis], axis, len(sizes)) for axis in axes]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def out_like(x: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output: it varies over the manual mesh axes that `x` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def full_like(x: jax.Array, shape: tuple[int, ...], value: int | float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A constant array that varies over the manual mesh axes that `x` varies over, as a scan's carry must."""
    constant = jnp.full(shape, value, dtype)
    axes = jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(constant, tuple(sorted(axes)), to="varying") if axes else constant


def tpu_interpreter(interpret: bool) -> "pltpu.InterpretParams | bool":
    """The value of `pallas_call(interpret=...)`: the TPU interpreter at its strictest, or False."""
    if not interpret:
        return False
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def tpu_params(
    interpret: bool, *dimension_semantics: str, vmem_limit_bytes: int | None = None
) -> "pltpu.CompilerParams":
    """The compiler's parameters. The interpreter gets no semantics: JAX's fails with them where vmap adds an axis."""
    return pltpu.CompilerParams(
        dimension_semantics=None if interpret else dimension_semantics, vmem_limit_bytes=vmem_limit_bytes
    )


def vmem_bytes() -> int:
    """VMEM of a core of the target: from 16 MiB (v4) to 128 (v5e, v6e); 16 if it is no TPU (the interpreter)."""
    return pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else TPU_LEAST_VMEM_BYTES


def vmem_limit(capacity: int) -> int:
    """The VMEM that a kernel may use: seven eighths of what there is, or the default of 16 MiB if that is more."""
    return max(TPU_LEAST_VMEM_BYTES, capacity * 7 // 8)


def with_absent(refs: Iterable[Any], present: Iterable[bool]) -> list[Any]:
    """A kernel's refs, with None for each optional operand that was not passed."""
    refs = iter(refs)
    return [next(refs) if there else None for there in present]


def split(values: Sequence[Any], counts: Iterable[int]) -> list[Sequence[Any]]:
    """Cuts values into consecutive pieces of these lengths, and the rest."""
    ends = [0, *itertools.accumulate(counts)]
    return [*(values[start:end] for start, end in itertools.pairwise(ends)), values[ends[-1] :]]
