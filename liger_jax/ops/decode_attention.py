"""Attention of one query of each row to a key-value cache. `liger_jax.models` decodes by it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from liger_jax.ops import meshes
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.pallas_kernels.attention import triton_decode, xla_decode

_OP = "decode_attention"
DECODERS = ("xla", "triton", "triton:interpret")  # the names that `implementation` has
_KERNELS = Kernels(_OP, {"xla": xla_decode, "triton": triton_decode}, defaults={"gpu": ("triton",)})


def decode_attention(
    q: Float[Array, "B Q H"],
    keys: Float[Array, "L B S K H"],
    values: Float[Array, "L B S K H"],
    positions: Int[Array, "B S"],
    layer: Int[Array, ""],
    filled: Int[Array, ""],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Q H"]:
    """softmax(softcap·tanh(scale·q·kᵀ/softcap))·v over a layer's keys that the last token of each row sees.

    `q` are the queries of the tokens in slot `filled` − 1, `keys` and `values` the whole cache's, and `positions` the
    numbers of the slots' tokens among their row's, ascending, −1 where there is none. Nothing of the cache is copied,
    and no more of it is read than is written, up to a block of slots. There are no derivatives. For a query in a slot
    without a token the numbers are finite and mean nothing.
    """
    first = None if window is None else _first_seen(positions, filled, window)
    arrays: Any = q, keys, values, positions, layer, filled, first, sinks
    choice = _KERNELS.choose(implementation, *arrays)
    kernel = choice.kernel("attend", softcap=softcap, scale=scale)
    return kernel.run(*kernel.guarded(*meshes.align_varying(*arrays)))


def _first_seen(positions, filled, window):
    """The first slot (B,) that the token in slot `filled` − 1 sees; S if it is padding.

    Tokens' numbers ascend with the slots, so what it sees are the tokens from there on.
    """
    own = jnp.take(positions, filled - 1, axis=1, mode="clip")[:, None]
    number = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    is_seen = (positions >= 0) & (positions > own - window) & (number < filled) & (own >= 0)
    return jnp.min(jnp.where(is_seen, number, positions.shape[1]), axis=1)
