"""Numbers in 8 bits: bitsandbytes' dynamic code, and blocks of numbers that share a scale.

A level is a decade: level i = 0 … 6 cuts 10^(i − 6)·[0.1, 1] into n equal cells, and its codes are their midpoints. The
signed code has n = 2^i with either sign, the unsigned one n = 2^(i + 1). 0 and 1 belong to both, and −1 to none. Codes
are bitsandbytes' own: places in the ascending table of 256 values.

Both directions take some twenty comparisons, products and sums per number, without a logarithm, so that XLA fuses them
into the update.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ZERO = 127  # the signed code's 0; the unsigned code's is 0
_SIGNED, _UNSIGNED = 64, 128  # cells of the level [0.1, 1]
_LEAST_SCALE = 1e-37  # its reciprocal is finite, and a smaller number is negligible beside every epsilon


# --- codes ------------------------------------------------------------------------------------------------------------


def encode_signed(x: jax.Array) -> jax.Array:
    """The nearest codes of float32 numbers in [−1, 1], as uint8."""
    place = jnp.maximum(jnp.minimum(_place(jnp.abs(x), _SIGNED), ZERO + 0.9), _end(x, _SIGNED))  # −1 has no code
    # The last bits of place + 1.5·2²³ have the integer part, too, for fewer instructions. But XLA turned all of them
    # into 255 (jax 0.11.2 on an H200).
    whole = place.astype(jnp.int32)
    return (ZERO + jnp.where(x < 0, -whole, whole)).astype(jnp.uint8)


def encode_unsigned(x: jax.Array) -> jax.Array:
    """The nearest codes above 0 of float32 numbers in [0, 1], as uint8; 0 is 0.

    If a second moment were rounded to 0, its first moment would be divided by epsilon.
    """
    place = jnp.maximum(_place(x, _UNSIGNED), _end(x, _UNSIGNED))
    return jnp.where(x > 0, jnp.maximum(place.astype(jnp.int32) - 1, 1), 0).astype(jnp.uint8)


def decode_signed(codes: jax.Array) -> jax.Array:
    """The numbers of signed codes, in float32."""
    place = codes.astype(jnp.float32) - ZERO
    value = _value(jnp.abs(place), _SIGNED)
    return jnp.where(place < 0, -value, value)


def decode_unsigned(codes: jax.Array) -> jax.Array:
    """The numbers of unsigned codes, in float32."""
    return _value(codes.astype(jnp.float32), _UNSIGNED)


def looked_up(decode: Callable[[jax.Array], jax.Array], place: Any = None) -> Callable[[jax.Array], jax.Array]:
    """A decoder that looks numbers up in a table of `decode`'s 256. `place`: the sharding of codes on Explicit axes."""
    numbers = jax.lax.optimization_barrier(decode(jnp.arange(256, dtype=jnp.uint8)))  # else XLA decodes every code
    return lambda codes: numbers.at[codes].get(mode="promise_in_bounds", out_sharding=place)


def _place(x, top):
    """A number of integer part n + k where x ≥ 0 is nearest to cell k of a level of n; below 1, x is nearest to 0.

    Within a level it is n·(x / 0.9 / 10^(i − 6) + 8/9), a straight line from n to 2n. Lines of higher levels are less
    steep and meet the level at its ends, so the result is the minimum of all lines.
    """
    levels = [(top * 2.0**-down, 10.0**-down) for down in range(7)]  # cells and largest number
    lines = [(n / (0.9 * largest), n * 8 / 9) for n, largest in levels]
    if top == _SIGNED:  # from 1.2 at the border to 0, which is half of the lowest code, to 2 at the level's end
        lines[-1] = (slope := 0.8 / (1e-6 - 2.75e-7)), 2 - slope * 1e-6
    place = functools.reduce(jnp.minimum, (x * slope + start for slope, start in lines))
    # Cells of the level below have a twentieth of this one's width, so the border to them is at a fifth of the first
    # cell. A steeper line through n there is above all of the rest.
    n = _bits_as(jnp.float32, _bits_as(jnp.uint32, place) & jnp.uint32(0x7F800000))
    return jnp.minimum(place, 2 * place - 0.4 - n)


def _end(x, top):
    """Equal to `_place` where x is nearest to 1, and less elsewhere."""
    slope = 2 * top / 0.9
    return x * slope + (2 * top - slope * (1 - 0.225 / top))


def _bits_as(dtype, x):
    return jax.lax.bitcast_convert_type(x, dtype)


def _value(place, top):
    """The numbers of codes from 0 upwards, which are whole numbers in float32."""
    cell = place + 0.5 if top == _SIGNED else place + 1.5  # level i has [2^i, 2^(i + 1)), or the next such interval
    power = jnp.full_like(cell, 10 if top == _SIGNED else 1)
    for digits in (4, 2, 1):
        large = cell >= 2.0**digits
        cell, power = jnp.where(large, cell * 2.0**-digits, cell), jnp.where(large, power, power * 10.0**-digits)
    value = power * (0.9 * cell - 0.8)  # the cell's middle is in [1, 2)
    return jnp.where(place == 0, 0.0, jnp.where(place == 2 * top - (top == _UNSIGNED), 1.0, value))


# --- blocks -----------------------------------------------------------------------------------------------------------


def scale_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """The shape of the scales of an array: one for each block of its last axis, of which the last may be short."""
    return *shape[:-1], -(-shape[-1] // block_size)


def block_maxima(x: jax.Array, block_size: int) -> jax.Array:
    """The largest number of each block: x (…, D), not below 0 → (…, ⌈D / block_size⌉)."""
    missing = -x.shape[-1] % block_size
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return jnp.max(padded.reshape(*x.shape[:-1], -1, block_size), axis=-1)


def spread(scales: jax.Array, width: int, block_size: int) -> jax.Array:
    """Each block's scale for each of its numbers: (…, ⌈D / block_size⌉) → (…, D)."""
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, block_size))
    return wide.reshape(*scales.shape[:-1], -1)[..., :width]


def reciprocals(scales: jax.Array) -> jax.Array:
    """What a block's numbers are multiplied by before they are encoded; NaN for NaN."""
    return 1 / jnp.maximum(scales, _LEAST_SCALE)
