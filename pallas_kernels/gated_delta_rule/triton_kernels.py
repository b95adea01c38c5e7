"""The bodies of the Triton kernels of the gated delta rule, for one chunk of C tokens of one value head.

With G the sum of the gates of a chunk up to a token, S the state before the chunk (D, E), and decays of 0 between
documents:

    decay_ts = exp(G_t − G_s)    kept_t = exp(G_t)    end_s = decay_Cs    L_ts = beta_t decay_ts (k_t · k_s), s < t
    W = (I + L)⁻¹ (beta kept k)    U = (I + L)⁻¹ (beta v)    u = U − W S    A_ts = scale · decay_ts (q_t · k_s), s ≤ t
    o = scale · kept (q S) + A u                             S' = kept_C S + (end k)ᵀ u

and backwards, with dS' the gradient by the state after the chunk:

    du = Aᵀ do + (end k) dS'                                 dS = kept_C dS' + scale · (kept q)ᵀ do − Wᵀ du
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels.gated_delta_rule.config import CHUNK
from liger_jax.pallas_kernels.tiles import with_absent


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtype to which operands of products are rounded, and the algorithms of products of float32 operands."""

    dtype: Any  # bfloat16 or float32
    of_products: Any = None  # of operands in `dtype`
    of_inverse: Any = None  # of the triangular inverse, whose operands are float32

    def product(self, a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        """The float32 product of two tiles over one axis of each."""
        return _dot(a.astype(self.dtype), b.astype(self.dtype), contracted, self.of_products)


def _dot(a, b, contracted, precision):
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _rows_and_columns():
    """The numbers of rows (C, 1) and of columns (1, C)."""
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0), jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)


def _exact_sums(chosen: jax.Array, x: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """chosen · x in float32, for booleans `chosen`: x is the sum of three numbers in bfloat16, to its last bit."""
    chosen, total = chosen.astype(jnp.bfloat16), 0.0
    for _ in range(3):
        rounded = x.astype(jnp.bfloat16)
        total += _dot(chosen, rounded, contracted, None)
        x = x - rounded.astype(jnp.float32)
    return jnp.asarray(total)


def _unit_inverse(lower: jax.Array, precision: Any) -> jax.Array:
    """(I + L)⁻¹ of strictly lower triangular L (C, C), from blocks that double, as in xla.py."""
    rows, columns = _rows_and_columns()

    def corner(block):
        row, column = rows // block, columns // block
        return jnp.where((row == column + 1) & (row % 2 == 1), lower, 0.0)

    inverse, block = jnp.where(rows == columns, 1.0, -corner(1)), 2
    while block < CHUNK:
        inverse -= _dot(_dot(inverse, corner(block), (1, 0), precision), inverse, (1, 0), precision)
        block *= 2
    return inverse


class _Chunk:
    """A chunk of one value head, and how its arrays are read. Arrays (B, T, heads, …) are the op's, and arrays
    (B, H, T, …) the kernels' own.
    """

    def __init__(self, batch: Any, head: Any, number: Any, group: int):
        self.batch, self.head, self.number = batch, head, number
        self.key_head = jax.lax.div(head, group)
        self.rows = pl.ds(number * CHUNK, CHUNK)

    @classmethod
    def of_program(cls, heads: int, chunks: int, group: int) -> "_Chunk":
        """Programs of the heads that share a key follow each other, so that they find it in the cache."""
        number = pl.program_id(0)
        of_row = jax.lax.div(number, heads)
        batch, chunk = jax.lax.div(of_row, chunks), jax.lax.rem(of_row, chunks)
        return cls(batch, jax.lax.rem(number, heads), chunk, group)

    def of_key(self, ref):
        """(C, D) of an array (B, T, K, D)."""
        return ref[self.batch, self.rows, self.key_head, :]

    def of_value(self, ref):
        """(C, E) of an array (B, T, H, E), or (C,) of an array (B, T, H) in float32."""
        if len(ref.shape) == 3:
            return ref[self.batch, self.rows, self.head].astype(jnp.float32)
        return ref[self.batch, self.rows, self.head, :]

    def store(self, ref, value):
        """Writes rows of an array (B, T, H, …)."""
        if len(ref.shape) == 3:
            ref[self.batch, self.rows, self.head] = value.astype(ref.dtype)
        else:
            ref[self.batch, self.rows, self.head, :] = value.astype(ref.dtype)

    def own(self, ref):
        """Rows of an array (B, H, T, …)."""
        if len(ref.shape) == 3:
            return ref[self.batch, self.head, self.rows]
        return ref[self.batch, self.head, self.rows, :]

    def store_own(self, ref, value):
        """Writes rows of an array (B, H, T, …)."""
        if len(ref.shape) == 3:
            ref[self.batch, self.head, self.rows] = value.astype(ref.dtype)
        else:
            ref[self.batch, self.head, self.rows, :] = value.astype(ref.dtype)

    def state(self, ref):
        """(D, E) of an array (B, H, N, D, E)."""
        return ref[self.batch, self.head, self.number, :, :]

    def columns(self, ref, i, size, *, is_own: bool = True):
        """The i-th `size` columns of an array (B, H, T, E), (B, H, N, D, E) or, not the kernels' own, (B, T, H, E)."""
        own = pl.ds(i * size, size)
        if len(ref.shape) == 5:
            return ref[self.batch, self.head, self.number, :, own]
        return ref[self.batch, self.head, self.rows, own] if is_own else ref[self.batch, self.rows, self.head, own]

    def documents(self, ref):
        """The documents of the tokens, (C,), and the one of the state before them."""
        first = self.number * CHUNK
        before = jnp.where(self.number == 0, 0, ref[self.batch, jnp.maximum(first - 1, 0)])
        return ref[self.batch, self.rows], before


def _decay(gate: jax.Array, document: jax.Array) -> jax.Array:
    """exp(G_t − G_s) for s ≤ t of one document, else 0. Each exponent is a sum of gates by itself, exact however far
    the gates reach.
    """
    rows, columns = _rows_and_columns()
    steps = jnp.where(rows > columns, gate[:, None], 0.0)  # [u, s]: the gate of u for what s wrote
    sums = _exact_sums(columns <= rows, steps, (1, 0))
    return jnp.where((document[:, None] == document[None, :]) & (columns <= rows), jnp.exp(sums), 0.0)


def _kept_and_end(gate: jax.Array, document: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a token sees of the state before the chunk, and what the state after it has of a token's write; (C,)."""
    rows, columns = _rows_and_columns()
    until = jnp.sum(jnp.where(columns <= rows, gate[None, :], 0.0), axis=1)
    after = jnp.sum(jnp.where(columns > rows, gate[None, :], 0.0), axis=1)
    last = jnp.max(document)  # documents are counted
    return jnp.where(document == before, jnp.exp(until), 0.0), jnp.where(document == last, jnp.exp(after), 0.0)


def _system(keys: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
    rows, columns = _rows_and_columns()
    return jnp.where(rows > columns, beta[:, None] * decay * keys, 0.0)


def prepare(*refs, group, heads, chunks, arithmetic, scale, is_backward):
    """W and U, and kept and end; for the backward (I + L)⁻¹ and Aᵀ do, too."""
    chunk = _Chunk.of_program(heads, chunks, group)
    present = [is_backward] * 2 + [True] * 9 + [is_backward] * 2
    q_ref, do_ref, k_ref, v_ref, gate_ref, beta_ref, document_ref, *out = with_absent(refs, present)
    w_ref, u_ref, kept_ref, end_ref, inverse_ref, local_ref = out
    k, v = chunk.of_key(k_ref), chunk.of_value(v_ref)
    gate, beta = chunk.of_value(gate_ref), chunk.of_value(beta_ref)
    document, before = chunk.documents(document_ref)
    decay = _decay(gate, document)
    kept, end = _kept_and_end(gate, document, before)
    chunk.store_own(kept_ref, kept)
    chunk.store_own(end_ref, end)
    if is_backward:
        seen = scale * decay * arithmetic.product(chunk.of_key(q_ref), k, (1, 1))
        chunk.store_own(local_ref, arithmetic.product(seen, chunk.of_value(do_ref), (0, 0)))
    inverse = _unit_inverse(_system(arithmetic.product(k, k, (1, 1)), beta, decay), arithmetic.of_inverse)
    if is_backward:
        chunk.store_own(inverse_ref, inverse)
    chunk.store_own(w_ref, arithmetic.product(inverse, (beta * kept)[:, None] * k.astype(jnp.float32), (1, 0)))
    chunk.store_own(u_ref, arithmetic.product(inverse, beta[:, None] * v.astype(jnp.float32), (1, 0)))


def _columns(state_ref, columns: int) -> tuple[Any, Any, Any]:
    """The row, the head and the columns of a state (B, H, D, E) that a program has."""
    _, heads, _, width = state_ref.shape
    of_head, first = jax.lax.div(pl.program_id(0), width // columns), jax.lax.rem(pl.program_id(0), width // columns)
    return jax.lax.div(of_head, heads), jax.lax.rem(of_head, heads), pl.ds(first * columns, columns)


def scan_states(
    k_ref, w_ref, u_ref, kept_ref, end_ref, state_ref, states_ref, writes_ref, last_ref, *, group, chunks, columns,
    arithmetic
):  # fmt: skip
    """Chunk by chunk, the state before each, and the writes u; for `columns` of the state."""
    batch, head, own = _columns(state_ref, columns)

    def step(n, state):
        chunk = _Chunk(batch, head, n, group)
        states_ref[batch, head, n, :, own] = state.astype(states_ref.dtype)
        w, u = chunk.own(w_ref), u_ref[batch, head, chunk.rows, own]
        writes = (u.astype(jnp.float32) - arithmetic.product(w, state, (1, 0))).astype(writes_ref.dtype)
        writes_ref[batch, head, chunk.rows, own] = writes
        left = chunk.own(end_ref)[:, None] * writes.astype(jnp.float32)
        kept = kept_ref[batch, head, n * CHUNK + CHUNK - 1]
        return kept * state + arithmetic.product(chunk.of_key(k_ref), left, (0, 0))

    state = jax.lax.fori_loop(0, chunks, step, state_ref[batch, head, :, own])
    last_ref[batch, head, :, own] = state


def output(
    q_ref, k_ref, gate_ref, document_ref, states_ref, writes_ref, kept_ref, out_ref, *, group, heads, chunks, columns,
    arithmetic, scale
):  # fmt: skip
    """o of a chunk, `columns` of E at a time."""
    chunk = _Chunk.of_program(heads, chunks, group)
    decay = _decay(chunk.of_value(gate_ref), chunk.documents(document_ref)[0])
    seen = scale * decay * arithmetic.product(chunk.of_key(q_ref), chunk.of_key(k_ref), (1, 1))
    seen, kept = seen.astype(arithmetic.dtype), scale * chunk.own(kept_ref)

    def step(i, _):
        state, writes = (chunk.columns(ref, i, columns) for ref in (states_ref, writes_ref))
        out = kept[:, None] * arithmetic.product(chunk.of_key(q_ref), state, (1, 0))
        out += arithmetic.product(seen, writes, (1, 0))
        out_ref[chunk.batch, chunk.rows, chunk.head, pl.ds(i * columns, columns)] = out.astype(out_ref.dtype)

    jax.lax.fori_loop(0, out_ref.shape[3] // columns, step, None)


def scan_gradients(
    q_ref, k_ref, w_ref, do_ref, local_ref, kept_ref, end_ref, dlast_ref, dstates_ref, dwrites_ref, dstate_ref, *,
    group, chunks, columns, arithmetic, scale
):  # fmt: skip
    """From the last chunk to the first, the gradient by the state after each, and du; for `columns` of the state."""
    batch, head, own = _columns(dstate_ref, columns)

    def step(i, dstate):
        n = chunks - 1 - i
        chunk = _Chunk(batch, head, n, group)
        dstates_ref[batch, head, n, :, own] = dstate.astype(dstates_ref.dtype)
        local = local_ref[batch, head, chunk.rows, own].astype(jnp.float32)
        dwrites = local + chunk.own(end_ref)[:, None] * arithmetic.product(chunk.of_key(k_ref), dstate, (1, 0))
        dwrites = dwrites.astype(dwrites_ref.dtype)
        dwrites_ref[batch, head, chunk.rows, own] = dwrites
        do = (scale * chunk.own(kept_ref))[:, None] * do_ref[batch, chunk.rows, head, own].astype(jnp.float32)
        through = arithmetic.product(chunk.of_key(q_ref), do, (0, 0))
        through -= arithmetic.product(chunk.own(w_ref), dwrites, (0, 0))
        return kept_ref[batch, head, n * CHUNK + CHUNK - 1] * dstate + through

    dstate_ref[batch, head, :, own] = jax.lax.fori_loop(0, chunks, step, dlast_ref[batch, head, :, own])


def output_gradients(
    q_ref, k_ref, gate_ref, document_ref, do_ref, states_ref, writes_ref, dstates_ref, kept_ref, end_ref, dq_ref,
    dk_ref, dgate_ref, *, group, heads, chunks, columns, arithmetic, scale
):  # fmt: skip
    """dq, and dk and dgate as far as a chunk's output and the state after it go, from `columns` of E at a time.

    In one loop the sums of dq and dk, and what they need, are too much for the registers of a thread.
    """
    chunk = _Chunk.of_program(heads, chunks, group)
    product = arithmetic.product
    steps = do_ref.shape[3] // columns
    kept, end = chunk.own(kept_ref), chunk.own(end_ref)

    def of_output(i, sums):
        dseen, dq = sums
        do = chunk.columns(do_ref, i, columns, is_own=False)
        dseen += product(do, chunk.columns(writes_ref, i, columns), (1, 1))
        return dseen, dq + product(do, chunk.columns(states_ref, i, columns), (1, 1))

    square, of_keys, numbers = _zeros(k_ref)
    dseen, dq = jax.lax.fori_loop(0, steps, of_output, (square, of_keys))
    q, k = chunk.of_key(q_ref), chunk.of_key(k_ref)
    dq = (scale * kept)[:, None] * dq
    dkept = jnp.sum(q.astype(jnp.float32) * dq, axis=1)
    # A = scale decay (q kᵀ).
    dseen = scale * _decay(chunk.of_value(gate_ref), chunk.documents(document_ref)[0]) * dseen
    chunk.store(dq_ref, dq + product(dseen, k, (1, 0)))
    dgate = _gate_gradient(dseen * product(q, k, (1, 1)), dkept)

    def of_state(i, sums):
        dk, dend, last = sums
        writes, state, dstate = (chunk.columns(ref, i, columns) for ref in (writes_ref, states_ref, dstates_ref))
        left = end[:, None] * writes.astype(jnp.float32)
        dk += product(left, dstate, (1, 1))
        dend += jnp.sum(left * product(chunk.of_key(k_ref), dstate, (1, 0)), axis=1)
        last += jnp.sum(jnp.sum(dstate.astype(jnp.float32) * state.astype(jnp.float32), axis=1), axis=0)
        return dk, dend, last

    start = product(dseen, q, (0, 0)), numbers, jnp.float32(0)
    dk, dend, last = jax.lax.fori_loop(0, steps, of_state, start)
    chunk.store(dk_ref, dk)
    # What is left of a step's writing by the end of the chunk decays by the gates after it, and the state by all gates.
    rows, others = _rows_and_columns()
    dgate += jnp.sum(jnp.where(others < rows, dend[None, :], 0.0), axis=1)
    dgate += jnp.sum(jnp.where(jax.lax.iota(jnp.int32, CHUNK) == CHUNK - 1, kept, 0.0)) * last
    chunk.store(dgate_ref, dgate)


def system_gradients(
    k_ref, v_ref, gate_ref, beta_ref, document_ref, inverse_ref, states_ref, writes_ref, dwrites_ref, kept_ref, dk_ref,
    dgate_ref, all_dk_ref, dv_ref, all_dgate_ref, dbeta_ref, *, group, heads, chunks, columns, arithmetic
):  # fmt: skip
    """dv, dbeta, and what a chunk's system adds to dk and dgate, from `columns` of E at a time.

    y = beta (v − kept k S) is the system's right side: u = (I + L)⁻¹ y, dy = (I + L)⁻ᵀ du and dL = −dy uᵀ.
    """
    chunk = _Chunk.of_program(heads, chunks, group)
    product = arithmetic.product
    beta, kept = chunk.of_value(beta_ref), chunk.own(kept_ref)

    def step(i, sums):
        dsystem, dk, dbeta, dkept = sums
        writes, dwrites, state = (chunk.columns(ref, i, columns) for ref in (writes_ref, dwrites_ref, states_ref))
        dy = product(chunk.own(inverse_ref), dwrites, (0, 0))
        read = kept[:, None] * product(chunk.of_key(k_ref), state, (1, 0))
        v = chunk.columns(v_ref, i, columns, is_own=False).astype(jnp.float32)
        dbeta += jnp.sum(dy * (v - read), axis=1)
        dsystem -= product(dy, writes, (1, 1))
        dv = beta[:, None] * dy
        dv_ref[chunk.batch, chunk.rows, chunk.head, pl.ds(i * columns, columns)] = dv.astype(dv_ref.dtype)
        dkept -= jnp.sum(dv * read, axis=1)
        dk -= product(kept[:, None] * dv, state, (1, 1))
        return dsystem, dk, dbeta, dkept

    square, of_keys, numbers = _zeros(k_ref)
    start = square, of_keys, numbers, numbers
    dsystem, dk, dbeta, dkept = jax.lax.fori_loop(0, v_ref.shape[3] // columns, step, start)
    # L = beta decay (k kᵀ).
    rows, columns = _rows_and_columns()
    k, decay = chunk.of_key(k_ref), _decay(chunk.of_value(gate_ref), chunk.documents(document_ref)[0])
    dsystem = jnp.where(rows > columns, dsystem, 0.0) * decay
    dsums = dsystem * product(k, k, (1, 1))  # the gradient by each exponent G_t − G_s
    chunk.store(dbeta_ref, dbeta + jnp.sum(dsums, axis=1))
    dsystem = beta[:, None] * dsystem
    dk += product(dsystem, k, (1, 0)) + product(dsystem, k, (0, 0))
    chunk.store(all_dk_ref, chunk.of_value(dk_ref).astype(jnp.float32) + dk)
    chunk.store(all_dgate_ref, chunk.of_value(dgate_ref) + _gate_gradient(beta[:, None] * dsums, dkept))


def _zeros(k_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(C, C), (C, D) and (C,) in float32."""
    of = functools.partial(jnp.zeros, dtype=jnp.float32)
    return of((CHUNK, CHUNK)), of((CHUNK, k_ref.shape[3])), of((CHUNK,))


def _gate_gradient(dsums: jax.Array, dkept: jax.Array) -> jax.Array:
    """The gate of u is in the exponents G_t − G_s for s < u ≤ t, and in G_t for u ≤ t. `dkept`: times kept."""
    rows, columns = _rows_and_columns()
    through = jnp.where(columns < rows, _exact_sums(columns <= rows, dsums, (0, 0)), 0.0)
    return jnp.sum(through, axis=1) + jnp.sum(jnp.where(rows <= columns, dkept[None, :], 0.0), axis=1)
