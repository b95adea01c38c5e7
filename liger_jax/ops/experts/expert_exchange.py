"""Exchange of tokens' rows with the devices of their experts along a mesh axis, inside `jax.shard_map`.

Every device sorts its rows by expert, so that those for one device are side by side. The devices first report
how many rows they have for each expert; then each sends its rows. A device has a buffer with room for all rows that
each other one may have for it: no row is dropped, whatever the routers choose. The gradients of rows go the same ways
in the other direction.

The whole buffers are sent, on every platform. `jax.lax.ragged_all_to_all` would send only the rows that exist, but XLA
has it on GPUs alone, where it took 16 ms in place of these buffers' 5.7 ms on four H200s, or 1.2 ms if each device's
rows are sent in 32 messages. And its gradients are reported to be wrong at times
(github.com/marin-community/marin/issues/8077).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Exchange(NamedTuple):
    """How many rows each device of the axis sends to each other one; arrays are int32."""

    starts: jax.Array  # (devices,), the first of this device's rows for each
    sent: jax.Array  # (devices,), its rows for each
    # (devices, room), the expert, among this device's, of each row of the buffer; their number where it has no row.
    experts: jax.Array

    @property
    def room(self) -> int:
        """The most rows that a device sends to another."""
        return self.experts.shape[1]


def room_for(tokens: int, per_token: int, own_experts: int) -> int:
    """The most rows that a device can have for the experts of another, since the experts of a token differ."""
    return tokens * min(per_token, own_experts)


def plan(sizes: jax.Array, room: int, axis: str) -> Exchange:
    """Exchanges how many rows each device has for each expert; `sizes` (E,) are those of this device."""
    number = jax.lax.axis_index(axis)
    counts = jax.lax.all_gather(sizes.reshape(jax.lax.axis_size(axis), -1), axis)  # (from, to, expert)
    rows = counts.sum(2, dtype=jnp.int32)
    starts = jnp.cumsum(rows, axis=1, dtype=jnp.int32) - rows
    ends = jnp.cumsum(counts[:, number], axis=1, dtype=jnp.int32)  # (from, expert)
    within = jnp.arange(room, dtype=jnp.int32)
    experts = jax.vmap(functools.partial(jnp.searchsorted, side="right", method="compare_all"), (0, None))(ends, within)
    return Exchange(starts[number], rows[number], experts.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sent(rows: jax.Array, exchange: Exchange, axis: str) -> jax.Array:
    """rows (M, D), sorted by expert → (devices · room, D): the rows of all devices for this one's experts.

    Places of the buffer without a row are zero.
    """
    return _sent(rows, exchange, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def returned(buffer: jax.Array, exchange: Exchange, axis: str, m: int) -> jax.Array:
    """buffer (devices · room, D) → (M, D): the results of this device's rows, where the rows were; zero after them."""
    return _returned(buffer, exchange, axis, m)


def _sent(rows, exchange, axis):
    room, width = exchange.room, rows.shape[1]
    within = jnp.arange(room, dtype=jnp.int32)[None]
    places = jnp.minimum(exchange.starts[:, None] + within, rows.shape[0] - 1)
    own = jnp.where((within < exchange.sent[:, None])[..., None], rows[places], jnp.zeros((), rows.dtype))
    return jax.lax.all_to_all(own, axis, 0, 0).reshape(-1, width)


def _returned(buffer, exchange, axis, m):
    devices, room, width = exchange.sent.shape[0], exchange.room, buffer.shape[1]
    back = jax.lax.all_to_all(buffer.reshape(devices, room, width), axis, 0, 0).reshape(-1, width)
    row = jnp.arange(m, dtype=jnp.int32)
    ends = exchange.starts + exchange.sent
    device = jnp.searchsorted(ends, row, side="right", method="compare_all").astype(jnp.int32)
    is_sent, device = device < devices, jnp.minimum(device, devices - 1)
    rows = back[device * room + jnp.clip(row - exchange.starts[device], 0, room - 1)]
    return jnp.where(is_sent[:, None], rows, jnp.zeros((), buffer.dtype))


def _sent_forward(rows, exchange, axis):
    return _sent(rows, exchange, axis), (exchange, jnp.zeros((rows.shape[0], 0), jnp.bool_))


def _sent_backward(axis, residuals, dbuffer):
    exchange, like = residuals
    return _returned(dbuffer, exchange, axis, like.shape[0]), None


def _returned_backward(axis, m, exchange, drows):
    return _sent(drows, exchange, axis), None


sent.defvjp(_sent_forward, _sent_backward)
returned.defvjp(lambda buffer, exchange, axis, m: (_returned(buffer, exchange, axis, m), exchange), _returned_backward)
