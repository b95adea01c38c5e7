"""Weights in 4 or 8 bits: codes, and one scale for each block of them.

    w = code_book[c]·s,   s = max |w| over the block

The code book of "nf4" is the 16 quantiles of a normal distribution, and a byte holds two codes. The code book of
"int8" is c/127 for c from −127 to 127. A value differs from its weight by s times half the code book's widest gap, at
most. A scale is rounded to bfloat16, which changes it by 2⁻⁸ of itself at most. It is not changed where weights are
bfloat16.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from liger_jax.ops.checks import check_choice, check_int, floating
from liger_jax.ops.layout import is_explicit

KINDS = ("nf4", "int8")
BLOCK_SIZE = 64  # values that share a scale, by default
# QLoRA's appendix E: the means of neighbouring quantiles, scaled to [−1, 1], with a zero. As bitsandbytes prints them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_STEPS = 127  # of int8, on each side of zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """A weight as codes and scales, which takes the place of an array; `astype` returns the dense array.

    Layers call `astype` where they use a weight, so that only one layer of a model is dense at a time. Codes and scales
    have the weight's rank. `w[i]` indexes the leading axes, along which there are no blocks.

    Attributes:
        codes: uint8 with two codes in a byte along the blocks' axis, the even one in the low bits; or int8.
        scales: one for each block, bfloat16 or, as in bitsandbytes' checkpoints, float32.
        kind: "nf4" or "int8".
        axis: the axis of the blocks, −2 of a kernel (in, out) or −1 of a head (V, D).
        dtype: dtype of the weight before it was quantised.
    """

    codes: Any  # arrays, or leaves in their place in a tree: types, specs, None
    scales: Any
    kind: str = dataclasses.field(metadata=dict(static=True))
    axis: int = dataclasses.field(metadata=dict(static=True))
    dtype: Any = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if self.kind == "nf4" else 1
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The weight's rank."""
        return self.codes.ndim

    @property
    def sharding(self) -> Any:
        """The sharding of the codes, and of the scales."""
        return self.codes.sharding

    def __getitem__(self, index: Any) -> "BlockQuantized":
        return self if index is Ellipsis else jax.tree.map(lambda x: x[index], self)

    def __jax_array__(self) -> Array:
        return self.astype(self.dtype)

    def astype(self, dtype: Any) -> Array:
        """The weight: code_book[codes]·scales, computed in float32 and rounded once.

        With float32 scales it is first rounded to the weight's own dtype, if that is not wider, as in bitsandbytes.

        Args:
            dtype: a float dtype.

        Returns:
            An array of the weight's shape.
        """
        values = _nf4_values(_unpacked(self.codes, self.axis)) if self.kind == "nf4" else _int8_values(self.codes)
        blocks = values.reshape(_blocked(self.shape, self.axis, self.scales.shape[self.axis]))
        scales = jnp.expand_dims(self.scales.astype(jnp.float32), _after(self.axis, self.ndim))
        is_rounded_first = self.scales.dtype == jnp.float32 and self.dtype.itemsize <= jnp.dtype(dtype).itemsize
        rounded = self.dtype if is_rounded_first else dtype
        # The barrier keeps XLA from fusing this into a product, where each tile of tokens would compute it again,
        # and from leaving out the rounding.
        return jax.lax.optimization_barrier((blocks * scales).reshape(self.shape).astype(rounded)).astype(dtype)


def block_quantized(
    weight: Float[Array, "..."], kind: str, *, block_size: int = BLOCK_SIZE, axis: int = -2
) -> BlockQuantized:
    """Quantises a weight by blocks along one axis.

    Args:
        weight: any float dtype.
        kind: "nf4" or "int8".
        block_size: the number of values that share a scale; it must be even and divide the axis.
        axis: −1 or −2.

    Returns:
        Codes and scales, which take 0.53 bytes per value for nf4 in blocks of 64, and 1.03 for int8.

    Example:
        >>> weight = block_quantized(jnp.linspace(-1, 1, 64)[:, None], "nf4")
        >>> weight.codes.shape, weight.scales.shape, weight.shape
        ((32, 1), (1, 1), (64, 1))
        >>> jnp.abs(weight.astype(jnp.float32)[:, 0] - jnp.linspace(-1, 1, 64)).max() < 0.152
        Array(True, dtype=bool)

    References:
        Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (arXiv:2305.14314).
    """
    check_choice("block_quantized", "kind", kind, KINDS)
    (weight,) = floating("block_quantized", weight=weight)
    check_choice("block_quantized", "axis", axis, (-1, -2))
    if weight.ndim < -axis or not weight.size:
        raise ValueError(
            f"block_quantized: weight has shape {weight.shape}, but must have values along axis {axis}; a vector has "
            "axis=-1 alone."
        )
    check_int("block_quantized", block_size=block_size)
    width = weight.shape[axis]
    if block_size < 2 or block_size % 2 or width % block_size:
        fitting = max((size for size in (2, 4, 8, 16, 32, 64, 128) if width % size == 0), default=None)
        raise ValueError(
            f"block_quantized: block_size={block_size} must be even and divide the {width} values along axis {axis} of "
            f"a weight {weight.shape}. " + (f"Pass block_size={fitting}." if fitting else "Leave this weight dense.")
        )
    shape = weight.shape
    blocks = weight.astype(jnp.float32).reshape(_blocked(shape, axis, width // block_size))
    within = _after(axis, len(shape))
    scales = jnp.max(jnp.abs(blocks), axis=within, keepdims=True).astype(jnp.bfloat16)
    divisors = scales.astype(jnp.float32)
    ratios = (blocks / jnp.where(divisors == 0, 1.0, divisors)).reshape(shape)
    if kind == "nf4":
        codes = _packed(_nf4_codes(ratios), axis)
    else:
        codes = jnp.clip(jnp.round(ratios * _STEPS), -_STEPS, _STEPS).astype(jnp.int8)
    return BlockQuantized(codes, jnp.squeeze(scales, within), kind, axis, jnp.dtype(weight.dtype))


def _after(axis: int, ndim: int) -> int:
    """The index of the axis within a block, once the negative `axis` is split in two."""
    return ndim + axis + 1


def _blocked(shape: tuple[int, ...], axis: int, num_blocks: int) -> tuple[int, ...]:
    """The shape with its axis as (blocks, values in a block)."""
    at = len(shape) + axis
    return (*shape[:at], num_blocks, shape[at] // num_blocks, *shape[at + 1 :])


def _packed(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Two codes to a byte along the axis."""
    within = _after(axis, codes.ndim)
    pairs = codes.reshape(_blocked(codes.shape, axis, codes.shape[axis] // 2))
    even, odd = (jax.lax.index_in_dim(pairs, i, within, keepdims=False) for i in (0, 1))
    return even | (odd << 4)


def _unpacked(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """One code to a byte."""
    within = _after(axis, codes.ndim)
    codes, shape = jnp.expand_dims(codes, within), [1] * (codes.ndim + 1)
    shape[within] = 2
    pairs = (codes >> np.array([0, 4], np.uint8).reshape(shape)) & np.uint8(15)
    return pairs.reshape(*pairs.shape[: within - 1], 2 * pairs.shape[within - 1], *pairs.shape[within + 1 :])


def _nf4_codes(ratios: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The nearest code's number: how many of the 15 midpoints are below the value."""
    codes = jnp.zeros(ratios.shape, jnp.uint8)
    for low, high in zip(NF4[:-1], NF4[1:], strict=True):
        codes += (ratios > np.float32((low + high) / 2)).astype(jnp.uint8)
    return codes


def _nf4_values(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """code_book[codes] in float32.

    It is a gather and not a tree of choices: JAX moves the choices' constants out of a scan, as arrays of the layer's
    size, 8 GiB for Llama-3-8B.
    """
    # On Explicit axes a gather has to be given the sharding of its result.
    place = jax.typeof(codes).sharding if is_explicit(codes) else None
    return jnp.asarray(NF4, jnp.float32).at[codes].get(mode="promise_in_bounds", out_sharding=place)


def _int8_values(codes: Array) -> Float[Array, "..."]:
    return codes.astype(jnp.float32) * np.float32(1 / _STEPS)
