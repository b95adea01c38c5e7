"""Numbers in 8 bits: bitsandbytes' dynamic code, and blocks of numbers that share a scale.

A level is a decade: level i = 0 … 6 cuts 10^(i − 6)·[0.1, 1] into n equal cells, and its codes are their midpoints. The
signed code has n = 2^i with either sign, the unsigned one n = 2^(i + 1). 0 and 1 belong to both, and −1 to none. Codes
are bitsandbytes' own: places in the ascending table of 256 values.

Both directions are a dozen comparisons and products a number, so that XLA fuses them into the update around them. There
is no table to look up, which a TPU does slowly, and no logarithm.
"""

import jax
import jax.numpy as jnp

ZERO = 127  # the signed code's 0; the unsigned code's is 0
_SIGNED, _UNSIGNED = 64, 128  # cells of the level [0.1, 1]
_LEAST_SCALE = 1e-37  # its reciprocal is finite, and what is smaller is 0 beside every epsilon


# --- codes ------------------------------------------------------------------------------------------------------------


def encode_signed(x: jax.Array) -> jax.Array:
    """The nearest codes of float32 numbers in [−1, 1], as uint8."""
    place = _nearest_place(jnp.abs(x), _SIGNED)
    return (ZERO + jnp.where(x < 0, -jnp.minimum(place, ZERO), place)).astype(jnp.uint8)


def encode_unsigned(x: jax.Array) -> jax.Array:
    """The nearest codes above 0 of float32 numbers in [0, 1], as uint8; 0 is 0.

    Rounded to 0, a second moment would leave its first moment to be divided by epsilon.
    """
    return jnp.where(x > 0, jnp.maximum(_nearest_place(x, _UNSIGNED), 1), 0).astype(jnp.uint8)


def decode_signed(codes: jax.Array) -> jax.Array:
    """The numbers of signed codes, in float32."""
    place = codes.astype(jnp.float32) - ZERO
    value = _value(jnp.abs(place), _SIGNED)
    return jnp.where(place < 0, -value, value)


def decode_unsigned(codes: jax.Array) -> jax.Array:
    """The numbers of unsigned codes, in float32."""
    return _value(codes.astype(jnp.float32), _UNSIGNED)


def _first_place(n, top):
    """How many codes are below a level of n cells: 0 and the cells of all levels below."""
    return n if top == _SIGNED else n - 1


def _nearest_place(x, top):
    """Which of the codes from 0 upwards is nearest to x in [0, 1]: an int32 of at most 2·top."""
    within, n = x, jnp.full_like(x, top)  # the level's cells, and x as it lies in [0.1, 1]
    for digits in (4, 2, 1):
        small = within < 10.0**-digits
        within, n = jnp.where(small, within * 10.0**digits, within), jnp.where(small, n * 2.0**-digits, n)
    cells = (within - 0.1) * (n / 0.9)
    place = _first_place(n, top) + jnp.minimum(jnp.floor(cells), n - 1)
    # The level below has cells of a twentieth of this one's width, so the border is at a fifth of the first cell. The
    # border to 0 is half of the lowest code, 0.55.
    border = jnp.where(n == 1, 0.175 / 0.9, 0.2) if top == _SIGNED else 0.2
    place = place - jnp.where(cells < border, 1, 0) + jnp.where(x >= 1 - 0.225 / top, 1, 0)
    return jnp.maximum(place, 0).astype(jnp.int32)


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
