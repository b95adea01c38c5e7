"""The bodies of the TPU kernels of the gated delta rule, in triton_kernels.py's notation.

A program has one chunk of C tokens of a few heads. With S and all else of a chunk in VMEM,

    u = (I + L)⁻¹ y    y = beta (v − kept (k S))    dy = (I + L)⁻ᵀ du    dL = −dy uᵀ    dS = … − (beta kept k)ᵀ dy

so that W and U are not needed. Numbers of tokens are rows (1, C) in memory, and columns (C, 1) where they scale rows.
The loops over heads are unrolled, so that the compiler schedules the products of one head while another's wait.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels.tiles import with_absent


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of a program: `keys` of queries and keys, each with `members` of values."""

    keys: int
    members: int
    depth: int
    width: int

    def of_key(self, ref: Any, key: int) -> jax.Array:
        """(C, D) of a block (C, keys · D)."""
        return ref[:, pl.ds(key * self.depth, self.depth)]

    def of_value(self, ref: Any, head: int) -> jax.Array:
        """(C, E) of a block (C, heads · E)."""
        return ref[:, pl.ds(head * self.width, self.width)]

    def members_of(self, key: int) -> range:
        return range(key * self.members, (key + 1) * self.members)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The products, float32: of operands in `dtype`, which is bfloat16 or float32."""

    dtype: Any

    def product(self, a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        """The product of two tiles over one axis of each."""
        return _dot(a.astype(self.dtype), b.astype(self.dtype), contracted)

    def of_inverse(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a · b of float32 operands: for bfloat16's inverse to 16 bits, which three products give."""
        if self.dtype == jnp.float32:
            return _dot(a, b, (1, 0))
        rounded, b = b, b.astype(jnp.bfloat16)
        b_rest = (rounded - b.astype(jnp.float32)).astype(jnp.bfloat16)
        ahead = a.astype(jnp.bfloat16)
        both = jnp.concatenate([ahead.astype(jnp.float32), a - ahead.astype(jnp.float32)]).astype(jnp.bfloat16)
        both = _dot(both, b, (1, 0))  # a matrix unit takes b once
        return both[: a.shape[0]] + (both[a.shape[0] :] + _dot(ahead, b_rest, (1, 0)))


def _dot(a, b, contracted):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _exact_sums(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """x · chosen in float32, for booleans `chosen`: x is the sum of three numbers in bfloat16, to its last bit."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16).astype(jnp.float32))
        x = x - parts[-1]
    chosen = chosen.astype(jnp.float32).astype(jnp.bfloat16)
    total = _dot(jnp.concatenate(parts).astype(jnp.bfloat16), chosen, (1, 0))  # a matrix unit takes it once
    return total[: x.shape[0]] + total[x.shape[0] : -x.shape[0]] + total[-x.shape[0] :]


def _sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(x, axis=axis, keepdims=True)


class _Chunk:
    """A chunk's masks, and what its heads have in common."""

    def __init__(self, document_ref: Any):
        size = document_ref.shape[1]
        self.rows, self.columns = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        self.until, self.before = self.columns <= self.rows, self.columns < self.rows
        numbers, before = document_ref[pl.ds(0, 1), :], self.column(document_ref[pl.ds(1, 1), :])
        own = self.column(numbers)
        self.same = (own == numbers) & self.until
        self.continues, self.lasts = own == before, own == jnp.max(numbers, axis=1, keepdims=True)

    def column(self, row: jax.Array) -> jax.Array:
        """(C, 1) of (1, C)."""
        return _sum(jnp.where(self.rows == self.columns, row, 0.0), 1)

    def row(self, column: jax.Array) -> jax.Array:
        """(1, C) of (C, 1)."""
        return _sum(jnp.where(self.rows == self.columns, column, 0.0), 0)

    def decay(self, gate: jax.Array) -> jax.Array:
        """decay (C, C) of gates (1, C). Each exponent is a sum of gates by itself, exact however far they reach."""
        sums = _exact_sums(jnp.where(self.until, gate, 0.0), self.columns < self.rows)
        return jnp.where(self.same, jnp.exp(sums), 0.0)

    def kept_and_end(self, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        """kept and end, (C, 1)."""
        until, after = (_sum(jnp.where(mask, gate, 0.0), 1) for mask in (self.until, self.columns > self.rows))
        return jnp.where(self.continues, jnp.exp(until), 0.0), jnp.where(self.lasts, jnp.exp(after), 0.0)

    def unit_inverses(self, lowers: list[jax.Array], arithmetic: Arithmetic) -> list[jax.Array]:
        """(I + L)⁻¹ of each strictly lower triangular L, from blocks that double, as in xla.py.

        Blocks of a diagonal lie beside each other in left operands and in results, which so have few rows. Each step
        is that of all heads, since the products of one head wait for each other.
        """
        size, product = self.rows.shape[0], arithmetic.of_inverse
        differ = self.rows ^ self.columns  # less than `block`: in the same block
        inverses = [jnp.where(self.rows == self.columns, 1.0, jnp.where(differ == 1, -lower, 0.0)) for lower in lowers]
        block = 2
        while block < size:
            height = max(block, 8)  # of the rows that are computed: those of every second block, or all
            first = range(block if block >= 8 else 0, size, 2 * block if block >= 8 else 8)
            is_corner, is_whole = (differ >= block) & (differ < 2 * block), differ < max(2 * block, 8)
            empty = [jnp.zeros((height, size), jnp.float32)] if block >= 8 else []
            packed = [sum((x[i : i + height] for i in first[1:]), x[first[0] : first[0] + height]) for x in inverses]
            packed = [product(x, jnp.where(is_corner, y, 0.0)) for x, y in zip(packed, lowers, strict=True)]
            packed = [product(x, y) for x, y in zip(packed, inverses, strict=True)]
            whole = [jnp.concatenate([*empty, x] * (size // height // (1 + len(empty)))) for x in packed]
            inverses = [x - jnp.where(is_whole, y, 0.0) for x, y in zip(inverses, whole, strict=True)]
            block *= 2
        return inverses

    def gate_gradient(self, dsums: jax.Array, dkept: jax.Array, dend: jax.Array) -> jax.Array:
        """(1, C), from the gradients by exponents, (C, C) and (C, 1).

        The gate of u is in the exponents of decay_ts for s < u ≤ t, of kept_t for u ≤ t and of end_s for s < u.
        """
        through = _exact_sums(dsums, self.rows < self.columns)
        return _sum(jnp.where(self.until, through + dkept, dend), 0)


def scan(*refs: Any, heads: Heads, arithmetic: Arithmetic, scale: float, has_output: bool) -> None:
    """The output, and the last state in the block that carries it; or the states before chunks, and (I + L)⁻¹."""
    present = [has_output, *[True] * 7, not has_output, True]
    q_ref, k_ref, v_ref, gate_ref, beta_ref, document_ref, state_ref, result_ref, inverse_ref, carry_ref = with_absent(
        refs, present
    )

    @pl.when(pl.program_id(2) == 0)
    def _():
        carry_ref[...] = state_ref[...]

    chunk, product = _Chunk(document_ref), arithmetic.product
    size = document_ref.shape[1]
    gates, betas, decays, systems = [], [], [], []
    for key in range(heads.keys):
        k = heads.of_key(k_ref, key)
        keys = product(k, k, (1, 1))
        for head in heads.members_of(key):
            gates.append(gate_ref[pl.ds(head, 1), :])
            betas.append(chunk.column(beta_ref[pl.ds(head, 1), :]))
            decays.append(chunk.decay(gates[-1]))
            systems.append(jnp.where(chunk.before, betas[-1] * decays[-1] * keys, 0.0))
    inverses = chunk.unit_inverses(systems, arithmetic)
    for head in range(heads.keys * heads.members):
        k, v = heads.of_key(k_ref, head // heads.members), heads.of_value(v_ref, head).astype(jnp.float32)
        (kept, end), state = chunk.kept_and_end(gates[head]), carry_ref[head]
        writes = product(inverses[head], betas[head] * (v - kept * product(k, state, (1, 0))), (1, 0))
        carry_ref[head] = kept[size - 1 :] * state + product(k, end * writes, (0, 0))
        if has_output:
            q = heads.of_key(q_ref, head // heads.members)
            out = kept * product(q, state, (1, 0)) + product(decays[head] * product(q, k, (1, 1)), writes, (1, 0))
            result_ref[:, pl.ds(head * heads.width, heads.width)] = (scale * out).astype(result_ref.dtype)
        else:
            result_ref[head] = state.astype(result_ref.dtype)
            inverse_ref[head] = inverses[head].astype(inverse_ref.dtype)


def gradients(
    q_ref, k_ref, v_ref, gate_ref, beta_ref, document_ref, do_ref, states_ref, inverse_ref, dlast_ref, dq_ref, dk_ref,
    dv_ref, dgate_ref, dbeta_ref, carry_ref, *, heads: Heads, arithmetic: Arithmetic, scale: float
):  # fmt: skip
    """All gradients of a chunk, from the last one to the first; the block that carries dS is that of dstate."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        carry_ref[...] = dlast_ref[...]

    chunk, product = _Chunk(document_ref), arithmetic.product
    size = document_ref.shape[1]
    for key in range(heads.keys):
        q, k = heads.of_key(q_ref, key), heads.of_key(k_ref, key)
        keys, seen = product(k, k, (1, 1)), product(q, k, (1, 1))
        dq, dk = jnp.zeros(q.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
        for head in heads.members_of(key):
            gate, beta = gate_ref[pl.ds(head, 1), :], chunk.column(beta_ref[pl.ds(head, 1), :])
            decay, (kept, end) = chunk.decay(gate), chunk.kept_and_end(gate)
            state, dstate, inverse = states_ref[head], carry_ref[head], inverse_ref[head]
            v, do = heads.of_value(v_ref, head).astype(jnp.float32), heads.of_value(do_ref, head)
            read = kept * product(k, state, (1, 0))
            writes = product(inverse, beta * (v - read), (1, 0))
            from_state = product(k, dstate, (1, 0))
            dy = product(inverse, product(scale * decay * seen, do, (0, 0)) + end * from_state, (0, 0))
            dv = beta * dy
            dv_ref[:, pl.ds(head * heads.width, heads.width)] = dv.astype(dv_ref.dtype)
            # The output: A = scale decay (q kᵀ).
            dseen = scale * decay * product(do, writes, (1, 1))
            dq_state = scale * kept * product(do, state, (1, 1))
            dq += dq_state + product(dseen, k, (1, 0))
            left = end * writes
            dk += product(dseen, q, (0, 0)) + product(left, dstate, (1, 1))
            # The system: L = beta decay (k kᵀ).
            dsystem = -jnp.where(chunk.before, decay * product(dy, writes, (1, 1)), 0.0)
            dkeys = beta * dsystem
            dk += product(dkeys, k, (1, 0)) + product(dkeys, k, (0, 0)) - product(kept * dv, state, (1, 1))
            dbeta_ref[pl.ds(head, 1), :] = chunk.row(_sum(dy * (v - read), 1) + _sum(dsystem * keys, 1))
            of_state = _sum(_sum(dstate * state.astype(jnp.float32), 0), 1)
            dkept = _sum(q.astype(jnp.float32) * dq_state, 1) - _sum(dv * read, 1)
            dkept += jnp.where(chunk.rows[:, :1] == size - 1, kept * of_state, 0.0)
            dend = _sum(left * from_state, 1)
            dgate_ref[pl.ds(head, 1), :] = chunk.gate_gradient(dseen * seen + dkeys * keys, dkept, dend)
            do = do.astype(jnp.float32)
            through = product(q, scale * kept * do, (0, 0)) - product(k, kept * dv, (0, 0))
            carry_ref[head] = kept[size - 1 :] * dstate + through
        for ref, value in ((dq_ref, dq), (dk_ref, dk)):
            ref[:, pl.ds(key * heads.depth, heads.depth)] = value.astype(ref.dtype)
