"""The bodies of the Triton kernels of the gated delta rule, for one chunk of C tokens.

With G the sum of the gates of a chunk up to a token, S the state before the chunk (D, E), and a gate of a document's
first token that erases the state:

    decay_ts = exp(G_t − G_s)    kept_t = exp(G_t)    end_s = decay_Cs    L_ts = beta_t decay_ts (k_t · k_s), s < t
    u = (I + L)⁻¹ beta (v − kept k S)                 A_ts = scale · decay_ts (q_t · k_s), s ≤ t
    o = scale · kept (q S) + A u                      S' = kept_C S + (end k)ᵀ u

and backwards, with dS' the gradient by the state after the chunk:

    du = Aᵀ do + (end k) dS'    y = (I + L)⁻ᵀ du      dS = kept_C dS' + scale · (kept q)ᵀ do − (beta kept k)ᵀ y
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels.gated_delta_rule.config import CHUNK


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtype to which operands of products are rounded, and the algorithm of the products."""

    dtype: Any  # bfloat16 or float32
    of_inverse: Any  # the dtype for the triangular inverse: float16 or float32
    precision: Any = None

    def product(self, a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        """The float32 product of two tiles over one axis of each."""
        return _dot(a.astype(self.dtype), b.astype(self.dtype), contracted, self.precision)

    def fine_product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The float32 product of two tiles for the triangular inverse."""
        return _dot(a.astype(self.of_inverse), b.astype(self.of_inverse), (1, 0), self.precision)


def _dot(a, b, contracted, precision):
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _rows_and_columns():
    """The numbers of rows (C, 1) and of columns (1, C)."""
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0), jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)


def _unit_inverse(lower: jax.Array, product: Any) -> jax.Array:
    """(I + L)⁻¹ of strictly lower triangular L (C, C), from blocks that double, as in xla.py."""
    rows, columns = _rows_and_columns()
    apart = rows ^ columns
    # A pair of blocks has L's entries in its lower rows and left columns.
    corner = lambda block: jnp.where((apart >= block) & (apart < 2 * block), lower, jnp.zeros((), lower.dtype))
    inverse, block = jnp.where(rows == columns, 1.0, -corner(1).astype(jnp.float32)), 2
    while block < CHUNK:
        inverse -= product(product(inverse, corner(block)), inverse)
        block *= 2
    return inverse


class _Chunk:
    """A chunk of one head, and how its arrays are read. Arrays (B, T, heads, …) are the op's, and arrays
    (B, H, T, …) the kernels' own.
    """

    def __init__(self, batch: Any, head: Any, number: Any, key_head: Any):
        self.batch, self.head, self.number, self.key_head = batch, head, number, key_head
        self.rows = pl.ds(number * CHUNK, CHUNK)

    @classmethod
    def of_program(cls, key_heads: int, chunks: int) -> "_Chunk":
        """The chunk of a head of keys; programs of the heads of a chunk follow each other."""
        number = pl.program_id(0)
        of_row = jax.lax.div(number, key_heads)
        batch, chunk = jax.lax.div(of_row, chunks), jax.lax.rem(of_row, chunks)
        return cls(batch, None, chunk, jax.lax.rem(number, key_heads))

    def of_head(self, head: Any) -> "_Chunk":
        """The same chunk of a head of values."""
        return _Chunk(self.batch, head, self.number, self.key_head)

    def of_key(self, ref):
        """(C, D) of an array (B, T, K, D)."""
        return ref[self.batch, self.rows, self.key_head, :]

    def store_of_key(self, ref, value):
        """Writes rows of an array (B, T, K, D)."""
        ref[self.batch, self.rows, self.key_head, :] = value.astype(ref.dtype)

    def mark(self, ref):
        """(C,) of an array (B, T, H)."""
        return ref[self.batch, self.rows, self.head]

    def own(self, ref):
        """(C,) of an array (B, H, T), or (C, …) of an array (B, H, T, …)."""
        if len(ref.shape) == 3:
            return ref[self.batch, self.head, self.rows]
        return ref[self.batch, self.head, self.rows, :]

    def store_own(self, ref, value):
        """Writes rows of an array (B, H, T, …)."""
        if len(ref.shape) == 3:
            ref[self.batch, self.head, self.rows] = value.astype(ref.dtype)
        else:
            ref[self.batch, self.head, self.rows, :] = value.astype(ref.dtype)

    def columns(self, ref, own, *, is_own: bool = True):
        """Columns of an array (B, H, T, E), (B, H, N, D, E) or, not the kernels' own, (B, T, H, E)."""
        if len(ref.shape) == 5:
            return ref[self.batch, self.head, self.number, :, own]
        return ref[self.batch, self.head, self.rows, own] if is_own else ref[self.batch, self.rows, self.head, own]

    def store_columns(self, ref, own, value, *, is_own: bool = True):
        """Writes columns, as `columns` reads them."""
        if len(ref.shape) == 5:
            ref[self.batch, self.head, self.number, :, own] = value.astype(ref.dtype)
        elif is_own:
            ref[self.batch, self.head, self.rows, own] = value.astype(ref.dtype)
        else:
            ref[self.batch, self.rows, self.head, own] = value.astype(ref.dtype)

    def decay(self, high_ref, low_ref):
        """exp(G_t − G_s) for s ≤ t, else 0."""
        return _decay(self.own(high_ref), self.own(low_ref))

    def last(self, ref):
        """The last of the chunk, of an array (B, H, T)."""
        return ref[self.batch, self.head, self.number * CHUNK + CHUNK - 1]


def _decay(high: jax.Array, low: jax.Array) -> jax.Array:
    """exp(G_t − G_s) for s ≤ t, else 0, of G as the sum of two numbers; the differences of `high` are exact."""
    rows, columns = _rows_and_columns()
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return jnp.where(columns <= rows, jnp.exp(apart), 0.0)


def _finite(x):
    """Of the output's gradient, whose other entries count as 0."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def _heads(chunk: _Chunk, group: int, body: Any, start: Any = None) -> Any:
    """A loop over the heads of values of a head of keys: `body(chunk of a head, carry)`."""
    step = lambda g, carry: body(chunk.of_head(chunk.key_head * group + g), carry)
    return step(0, start) if group == 1 else jax.lax.fori_loop(0, group, step, start)


def _by_columns(width: int, columns: int, body: Any, start: Any = None) -> Any:
    """A loop over `columns` of E at a time: `body(columns, carry)`."""
    if width == columns:
        return body(pl.ds(0, columns), start)
    return jax.lax.fori_loop(0, width // columns, lambda i, carry: body(pl.ds(i * columns, columns), carry), start)


def prepare(
    k_ref, gate_ref, beta_ref, inverse_ref, high_ref, low_ref, kept_ref, end_ref, *, group, heads, chunks, arithmetic
):  # fmt: skip
    """(I + L)⁻¹, G as the sum of two numbers, kept and end."""
    chunk = _Chunk.of_program(heads, chunks)
    chunk = _Chunk(chunk.batch, chunk.key_head, chunk.number, jax.lax.div(chunk.key_head, group))
    gate = chunk.own(gate_ref)
    # Sums of 64 multiples of 1/1024 up to 128 are exact, and so are their differences.
    coarse = jnp.floor(gate * 1024 + 0.5) * (1 / 1024)
    high, low = jnp.cumsum(coarse), jnp.cumsum(gate - coarse)
    chunk.store_own(high_ref, high)
    chunk.store_own(low_ref, low)
    chunk.store_own(kept_ref, jnp.exp(high + low))
    chunk.store_own(end_ref, jnp.exp((jnp.sum(coarse) - high) + (jnp.sum(gate - coarse) - low)))
    keys = arithmetic.product(chunk.of_key(k_ref), chunk.of_key(k_ref), (1, 1))
    rows, columns = _rows_and_columns()
    system = jnp.where(rows > columns, chunk.own(beta_ref)[:, None] * _decay(high, low) * keys, 0.0)
    system = system.astype(arithmetic.of_inverse)
    chunk.store_own(inverse_ref, _unit_inverse(system, arithmetic.fine_product))


def _columns(state_ref, columns: int, group: int) -> tuple[Any, Any]:
    """The chunk number 0 of the row and the head of a program, and its columns of a state (B, H, D, E)."""
    _, heads, _, width = state_ref.shape
    of_head, first = jax.lax.div(pl.program_id(0), width // columns), jax.lax.rem(pl.program_id(0), width // columns)
    batch, head = jax.lax.div(of_head, heads), jax.lax.rem(of_head, heads)
    return (batch, head, jax.lax.div(head, group)), pl.ds(first * columns, columns)


def scan_states(
    k_ref, v_ref, inverse_ref, beta_ref, kept_ref, end_ref, state_ref, states_ref, writes_ref, last_ref, *, group,
    chunks, columns, arithmetic
):  # fmt: skip
    """Chunk by chunk, the state before each, and the writes u; for `columns` of the state."""
    (batch, head, key_head), own = _columns(state_ref, columns, group)
    product = arithmetic.product

    def step(n, state):
        chunk = _Chunk(batch, head, n, key_head)
        chunk.store_columns(states_ref, own, state)
        read = chunk.own(kept_ref)[:, None] * product(chunk.of_key(k_ref), state, (1, 0))
        v = chunk.columns(v_ref, own, is_own=False).astype(jnp.float32)
        writes = product(chunk.own(inverse_ref), chunk.own(beta_ref)[:, None] * (v - read), (1, 0))
        writes = writes.astype(writes_ref.dtype)
        chunk.store_columns(writes_ref, own, writes)
        left = chunk.own(end_ref)[:, None] * writes.astype(jnp.float32)
        return chunk.last(kept_ref) * state + product(chunk.of_key(k_ref), left, (0, 0))

    last_ref[batch, head, :, own] = jax.lax.fori_loop(0, chunks, step, state_ref[batch, head, :, own])


def output(
    q_ref, k_ref, high_ref, low_ref, kept_ref, mark_ref, states_ref, writes_ref, out_ref, *, group, key_heads, chunks,
    columns, arithmetic, scale
):  # fmt: skip
    """o of a chunk, `columns` of E at a time."""
    chunk = _Chunk.of_program(key_heads, chunks)
    product = arithmetic.product
    pairs = scale * product(chunk.of_key(q_ref), chunk.of_key(k_ref), (1, 1))

    def of_head(chunk, _):
        seen = (chunk.decay(high_ref, low_ref) * pairs).astype(arithmetic.dtype)
        kept, mark = scale * chunk.own(kept_ref), chunk.mark(mark_ref)

        def of_columns(own, _):
            out = kept[:, None] * product(chunk.of_key(q_ref), chunk.columns(states_ref, own), (1, 0))
            out += product(seen, chunk.columns(writes_ref, own), (1, 0))
            chunk.store_columns(out_ref, own, out + mark[:, None], is_own=False)

        _by_columns(out_ref.shape[3], columns, of_columns)

    _heads(chunk, group, of_head)


def local_gradients(
    q_ref, k_ref, high_ref, low_ref, do_ref, local_ref, *, group, key_heads, chunks, columns, arithmetic, scale
):  # fmt: skip
    """Aᵀ do."""
    chunk = _Chunk.of_program(key_heads, chunks)
    product = arithmetic.product
    pairs = scale * product(chunk.of_key(q_ref), chunk.of_key(k_ref), (1, 1))

    def of_head(chunk, _):
        seen = (chunk.decay(high_ref, low_ref) * pairs).astype(arithmetic.dtype)

        def of_columns(own, _):
            do = _finite(chunk.columns(do_ref, own, is_own=False))
            chunk.store_columns(local_ref, own, product(seen, do, (0, 0)))

        _by_columns(do_ref.shape[3], columns, of_columns)

    _heads(chunk, group, of_head)


def scan_gradients(
    q_ref, k_ref, inverse_ref, do_ref, local_ref, beta_ref, kept_ref, end_ref, dlast_ref, dstates_ref, dy_ref,
    dstate_ref, *, group, chunks, columns, arithmetic, scale
):  # fmt: skip
    """From the last chunk to the first, the gradient by the state after each, and y; for `columns` of the state."""
    (batch, head, key_head), own = _columns(dstate_ref, columns, group)
    product = arithmetic.product

    def step(i, dstate):
        chunk = _Chunk(batch, head, chunks - 1 - i, key_head)
        chunk.store_columns(dstates_ref, own, dstate)
        dwrites = chunk.own(end_ref)[:, None] * product(chunk.of_key(k_ref), dstate, (1, 0))
        dwrites += chunk.columns(local_ref, own).astype(jnp.float32)
        dy = product(chunk.own(inverse_ref), dwrites, (0, 0)).astype(dy_ref.dtype)
        chunk.store_columns(dy_ref, own, dy)
        kept = chunk.own(kept_ref)
        do = (scale * kept)[:, None] * _finite(chunk.columns(do_ref, own, is_own=False).astype(jnp.float32))
        dread = (-chunk.own(beta_ref) * kept)[:, None] * dy.astype(jnp.float32)
        dstate = chunk.last(kept_ref) * dstate + product(chunk.of_key(q_ref), do, (0, 0))
        return dstate + product(chunk.of_key(k_ref), dread, (0, 0))

    dstate_ref[batch, head, :, own] = jax.lax.fori_loop(0, chunks, step, dlast_ref[batch, head, :, own])


def _gate_gradient(dsums: jax.Array) -> jax.Array:
    """The gate of a token is in the sums G of all after it."""
    return jnp.sum(dsums) - jnp.cumsum(dsums) + dsums


def _row_sums(a: jax.Array, b: jax.Array) -> jax.Array:
    """The dot product of each row of two tiles."""
    return jnp.sum(a.astype(jnp.float32) * b, axis=1)


def pair_gradients(
    q_ref, k_ref, v_ref, high_ref, low_ref, beta_ref, mark_ref, do_ref, writes_ref, dy_ref, dv_ref, dseen_ref,
    dsystem_ref, dgate_ref, dbeta_ref, *, group, key_heads, chunks, columns, arithmetic, scale
):  # fmt: skip
    """dv, the gradients by q kᵀ and k kᵀ, of all heads of a key's, and what these add to dgate and dbeta."""
    chunk = _Chunk.of_program(key_heads, chunks)
    product, width = arithmetic.product, v_ref.shape[3]
    rows, others = _rows_and_columns()
    square = jnp.zeros((CHUNK, CHUNK), jnp.float32)

    def of_head(chunk, sums):
        of_queries, of_keys = sums
        beta, mark = chunk.own(beta_ref), chunk.mark(mark_ref)

        def of_columns(own, sums):
            dseen, dsystem, dbeta = sums
            writes, dy = chunk.columns(writes_ref, own), chunk.columns(dy_ref, own)
            dseen += product(_finite(chunk.columns(do_ref, own, is_own=False)), writes, (1, 1))
            dsystem += product(dy, writes, (1, 1))
            dy = dy.astype(jnp.float32)
            chunk.store_columns(dv_ref, own, beta[:, None] * dy + mark[:, None], is_own=False)
            v = chunk.columns(v_ref, own, is_own=False).astype(jnp.float32)
            return dseen, dsystem, dbeta + _row_sums(dy, v)

        start = square, square, jnp.zeros(CHUNK, jnp.float32)
        dseen, dsystem, dbeta = _by_columns(width, columns, of_columns, start)
        decay = chunk.decay(high_ref, low_ref)
        dseen *= scale * decay
        dsums = dseen * product(chunk.of_key(q_ref), chunk.of_key(k_ref), (1, 1))  # the gradient by G_t − G_s
        # u is the solution of the system, so that the gradient by L is −y uᵀ.
        dsystem = jnp.where(rows > others, -dsystem * decay, 0.0)
        of_beta = dsystem * product(chunk.of_key(k_ref), chunk.of_key(k_ref), (1, 1))
        chunk.store_own(dbeta_ref, dbeta + jnp.sum(of_beta, axis=1))
        dsums += beta[:, None] * of_beta
        chunk.store_own(dgate_ref, _gate_gradient(jnp.sum(dsums, axis=1) - jnp.sum(dsums, axis=0)))
        return of_queries + dseen, of_keys + beta[:, None] * dsystem

    of_queries, of_keys = _heads(chunk, group, of_head, (square, square))
    chunk = chunk.of_head(chunk.key_head)
    chunk.store_own(dseen_ref, of_queries)
    chunk.store_own(dsystem_ref, of_keys)


def key_gradients(
    q_ref, k_ref, beta_ref, kept_ref, end_ref, mark_ref, do_ref, states_ref, writes_ref, dstates_ref, dy_ref, dseen_ref,
    dsystem_ref, dq_ref, dk_ref, of_read_ref, of_states_ref, dbeta_ref, *, group, key_heads, chunks, columns,
    arithmetic, scale
):  # fmt: skip
    """dq and dk, of all heads of a key's, and what the states add to dgate, in two parts, and to dbeta.

    What a head adds comes in loops of its own, so that the sums of each fit into the registers.
    """
    chunk = of_key = _Chunk.of_program(key_heads, chunks)
    product, width = arithmetic.product, do_ref.shape[3]
    start = jnp.zeros((CHUNK, k_ref.shape[3]), jnp.float32)

    def of_read(chunk, sums):
        """do Sᵀ."""
        dq, before, mark = sums
        kept = scale * chunk.own(kept_ref)

        def of_columns(own, dq):
            do = kept[:, None] * _finite(chunk.columns(do_ref, own, is_own=False).astype(jnp.float32))
            return dq + product(do, chunk.columns(states_ref, own), (1, 1))

        dq = _by_columns(width, columns, of_columns, dq)
        total = _row_sums(chunk.of_key(q_ref), dq)
        chunk.store_own(of_read_ref, _gate_gradient(total - before))
        return dq, total, mark + chunk.mark(mark_ref)

    no_number = jnp.zeros(CHUNK, jnp.float32)
    dq, _, mark = _heads(chunk, group, of_read, (start, no_number, no_number))
    of_key = chunk.of_head(chunk.key_head)
    dq += product(of_key.own(dseen_ref), chunk.of_key(k_ref), (1, 0))
    chunk.store_of_key(dq_ref, dq + mark[:, None])

    def of_states(chunk, dk):
        """y Sᵀ and u dS'ᵀ."""
        beta, kept, end = chunk.own(beta_ref), chunk.own(kept_ref), chunk.own(end_ref)

        def of_system(own, dread):
            return dread + product(chunk.columns(dy_ref, own), chunk.columns(states_ref, own), (1, 1))

        dread = -kept[:, None] * _by_columns(width, columns, of_system, start)
        dbeta = _row_sums(chunk.of_key(k_ref), dread)
        chunk.store_own(dbeta_ref, dbeta)
        dk += beta[:, None] * dread

        def of_left(own, dleft):
            return dleft + product(chunk.columns(writes_ref, own), chunk.columns(dstates_ref, own), (1, 1))

        dleft = end[:, None] * _by_columns(width, columns, of_left, start)
        dend = _row_sums(chunk.of_key(k_ref), dleft)
        dk += dleft

        def of_kept(own, dkept):
            states, dstates = (chunk.columns(ref, own).astype(jnp.float32) for ref in (states_ref, dstates_ref))
            return dkept + jnp.sum(_row_sums(states, dstates))

        of_last = jnp.sum(dend) + chunk.last(kept_ref) * _by_columns(width, columns, of_kept, jnp.float32(0))
        of_last = jnp.where(jax.lax.iota(jnp.int32, CHUNK) == CHUNK - 1, of_last, 0.0)
        chunk.store_own(of_states_ref, _gate_gradient(of_last - dend + beta * dbeta))
        return dk

    dk = _heads(chunk, group, of_states, start)
    dk += product(of_key.own(dseen_ref), chunk.of_key(q_ref), (0, 0))
    dsystem = of_key.own(dsystem_ref)
    dk += product(dsystem, chunk.of_key(k_ref), (1, 0)) + product(dsystem, chunk.of_key(k_ref), (0, 0))
    chunk.store_of_key(dk_ref, dk + mark[:, None])
