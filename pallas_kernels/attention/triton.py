"""Causal attention in Pallas-Triton (NVIDIA, Ampere and newer), with segments and windows.

One program computes a block of rows of one head. Forward and dq: a block of queries walks over blocks of keys. dk and
dv: a block of keys walks over blocks of the queries of all heads that share it, and sums them in float32. Blocks that
no row sees are neither loaded nor multiplied, and blocks that every row sees are not masked (intervals.py).
Scores are computed three times, so there are seven products, no sums in memory, and the same bits in every run.
Rounding: scores, softmax, sums and accumulators are float32; weights and scores' gradients are rounded to q's dtype for
their products.
Why this backend: Pallas's Mosaic GPU has no Ampere kernels before JAX 0.11.2. Pallas-Triton is deprecated; when it
goes, a Mosaic GPU kernel for Ampere (`plgpu.mma`) takes this one's place. Hopper has its own, in mosaic_gpu.py.
These kernels were compiled ahead of time for an A100, an L4 and an H200 (benchmarks/results/attention_triton.md). They
were never timed on an Ampere GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.config import TritonBlocks
from liger_jax.pallas_kernels.attention.config import unsupported as unsupported
from liger_jax.pallas_kernels.attention.formulas import LOG2_E, NO_SCORE, Scores, product
from liger_jax.pallas_kernels.attention.intervals import Bounds, Segments, Tile, intervals, table, whole_blocks
from liger_jax.pallas_kernels.tiles import in_bounds, out_like, round_up, with_absent

_ROWS = 128  # a multiple of every block size; log-sum-exps, bounds and ids are padded to a multiple of it


class _Program:
    """A tile of rows of one head, the columns that they see, and how both are read.

    `refs` belong to the table, then to the fields of `Bounds` (None for absent ids), then to the kernel's own arrays.
    """

    def __init__(self, refs: Any, *, blocks: TritonBlocks, heads: int, has_ids: bool, lengths: tuple[int, int]):
        bounds = [True, True, True, has_ids, has_ids]
        refs = with_absent(refs, [*bounds, *[True] * (len(refs) - sum(bounds))])
        table_ref, self.low_ref, self.high_ref, self.row_ids_ref, self.column_ids_ref, *self.refs = refs
        # Programs of an entry's heads follow each other, so that they find its keys in the cache.
        number = pl.program_id(0)
        self.tile = Tile.read(table_ref, jax.lax.div(number, heads), jax.lax.rem(number, heads))
        self.blocks, (self.row_length, self.column_length) = blocks, lengths
        self.row = self.tile.rows * blocks.rows
        self.own = pl.ds(self.row, blocks.rows)

    def _rows_exist(self) -> jax.Array | None:
        """Which rows of the tile are in the array, as a column; None if all are."""
        rows = self.blocks.rows
        return None if self.row_length % rows == 0 else in_bounds(self.row, rows, self.row_length, axis=0)

    def load_rows(self, ref: Any) -> jax.Array:
        """The tile's rows of an array (B, T, heads, H); zeros after the last position."""
        exist = self._rows_exist()
        tile = ref.at[self.tile.batch, self.own, self.tile.head, :]
        return pltriton.load(tile, mask=exist, other=None if exist is None else 0.0)

    def store_rows(self, ref: Any, value: jax.Array) -> None:
        """Writes the tile's rows that exist, rounded to the array's dtype."""
        tile = ref.at[self.tile.batch, self.own, self.tile.head, :]
        pltriton.store(tile, value.astype(ref.dtype), mask=self._rows_exist())

    def numbers_of_rows(self, ref: Any) -> jax.Array:
        """A column of the numbers that an array (B, heads, T) has for the tile's rows."""
        return ref[self.tile.batch, self.tile.head, self.own][:, None]

    def load_columns(self, ref: Any, n: Any, head: Any, *, is_masked: bool) -> jax.Array:
        """The n-th block of columns of an array (B, T, heads, H); zeros after the last position.

        Columns that all rows see exist, so a block that is not masked is whole.
        """
        begin, columns = self.columns_at(n)
        tile = ref.at[self.tile.batch, pl.ds(begin, columns), head, :]
        if not is_masked or self.column_length % columns == 0:
            return pltriton.load(tile)
        return pltriton.load(tile, mask=in_bounds(begin, columns, self.column_length, axis=0), other=0.0)

    def columns_at(self, n: Any) -> tuple[Any, int]:
        """Where the n-th block of columns begins, and its size."""
        return self.tile.column_block(n) * self.blocks.columns, self.blocks.columns

    def only_seen(self, scores: jax.Array, n: Any, unseen: float) -> jax.Array:
        """Scores (rows, columns) of the n-th block, with `unseen` where a row does not see a column."""
        begin, columns = self.columns_at(n)
        bound = lambda ref: ref[0 if ref.shape[0] == 1 else self.tile.batch, self.own][:, None]
        column = begin + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        is_seen = (column >= bound(self.low_ref)) & (column <= bound(self.high_ref))
        if self.row_ids_ref is not None:
            row_ids = self.row_ids_ref[self.tile.batch, self.own][:, None]
            is_seen &= row_ids == self.column_ids_ref[self.tile.batch, pl.ds(begin, columns)][None, :]
        return jnp.where(is_seen, scores, unseen)


def _forward_kernel(*refs, scores, group, **how):
    program = _Program(refs, **how)
    q_ref, k_ref, v_ref, out_ref, lse_ref = program.refs
    q, rows = program.load_rows(q_ref), program.blocks.rows
    kv_head = jax.lax.div(program.tile.head, group)

    def step(n, carry, *, is_masked):
        accumulator, maximum, total = carry
        k, v = (program.load_columns(ref, n, kv_head, is_masked=is_masked) for ref in (k_ref, v_ref))
        s = scores.capped(product(q, k, (1, 1)))
        if is_masked:
            s = program.only_seen(s, n, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(s, axis=1) * scores.factor)
        shrink = jnp.exp2(maximum - new_maximum)
        p = jnp.exp2(s * scores.factor - new_maximum[:, None])
        total = total * shrink + jnp.sum(p, axis=1)
        accumulator = accumulator * shrink[:, None] + product(p.astype(q.dtype), v, (1, 0))
        return accumulator, new_maximum, total

    start = (
        jnp.zeros((rows, q.shape[1]), jnp.float32),
        jnp.full((rows,), NO_SCORE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    accumulator, maximum, total = program.tile.over_columns(step, start)
    weight = jnp.where(total > 0.0, 1.0 / total, 0.0)  # a row that sees nothing gets zeros
    program.store_rows(out_ref, accumulator * weight[:, None])
    lse_ref[program.tile.batch, program.tile.head, program.own] = maximum + jnp.log(total) * LOG2_E


def _query_gradient_kernel(*refs, scores, group, **how):
    program = _Program(refs, **how)
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref = program.refs
    q, do = (program.load_rows(ref) for ref in (q_ref, do_ref))
    lse, delta = (program.numbers_of_rows(ref) for ref in (lse_ref, delta_ref))
    kv_head = jax.lax.div(program.tile.head, group)

    def step(n, dq, *, is_masked):
        k, v = (program.load_columns(ref, n, kv_head, is_masked=is_masked) for ref in (k_ref, v_ref))
        capped = scores.capped(product(q, k, (1, 1)))
        p = jnp.exp2(capped * scores.factor - lse)
        if is_masked:
            p = program.only_seen(p, n, 0.0)
        ds = scores.slope(p * (product(do, v, (1, 1)) - delta), capped)
        return dq + product(ds.astype(q.dtype), k, (1, 0))

    dq = program.tile.over_columns(step, jnp.zeros(q.shape, jnp.float32))
    program.store_rows(dq_ref, dq * scores.scale)


def _key_gradients_kernel(*refs, scores, group, **how):
    """A tile's rows are keys here, and its columns queries."""
    program = _Program(refs, **how)
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref = program.refs
    k, v = (program.load_rows(ref) for ref in (k_ref, v_ref))

    def of_head(g, carry):
        head = program.tile.head * group + g

        def step(n, carry, *, is_masked):
            dk, dv = carry
            queries = pl.ds(*program.columns_at(n))
            q, do = (program.load_columns(ref, n, head, is_masked=is_masked) for ref in (q_ref, do_ref))
            lse, delta = (ref[program.tile.batch, head, queries][None, :] for ref in (lse_ref, delta_ref))
            capped = scores.capped(product(k, q, (1, 1)))
            p = jnp.exp2(capped * scores.factor - lse)
            if is_masked:
                p = program.only_seen(p, n, 0.0)
            dv += product(p.astype(q.dtype), do, (1, 0))
            ds = scores.slope(p * (product(v, do, (1, 1)) - delta), capped)
            return dk + product(ds.astype(q.dtype), q, (1, 0)), dv

        return program.tile.over_columns(step, carry)

    nothing = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, group, of_head, (nothing, nothing))
    program.store_rows(dk_ref, dk * scores.scale)
    program.store_rows(dv_ref, dv)


def _launch(
    kernel: Any,
    bounds: Bounds,
    *arrays: jax.Array,
    blocks: TritonBlocks,
    rows_like: jax.Array,
    columns_like: jax.Array,
    out_shape: list[jax.ShapeDtypeStruct],
    interpret: bool,
    name: str,
    **options: Any,
) -> Any:
    """Launches one program for each head and block of rows, those with the most work first."""
    batch, row_length, heads, _ = rows_like.shape
    entries = table(*bounds[:3], batch, blocks.rows, blocks.columns)
    inputs = [jnp.asarray(entries).reshape(-1)]
    inputs += [jnp.asarray(whole_blocks(x, _ROWS)) for x in (*bounds[:2], *bounds[3:]) if x is not None]
    inputs += arrays
    how: dict[str, Any] = dict(
        blocks=blocks, heads=heads, has_ids=bounds.row_ids is not None, lengths=(row_length, columns_like.shape[1])
    )
    return pl.pallas_call(
        functools.partial(kernel, **how, **options),
        grid=(entries.shape[0] * heads,),
        in_specs=[_whole(x) for x in inputs],
        out_specs=[_whole(x) for x in out_shape],
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name=name,
    )(*inputs)


def _whole(x: Any) -> pl.BlockSpec:
    """An array as one block. An array (B, T, heads, H) has whole tiles of positions, masked past the end."""
    shape = list(x.shape)
    if len(shape) == 4:
        shape[1] = round_up(shape[1], _ROWS)
    return pl.BlockSpec(tuple(shape), lambda _: (0,) * len(shape))


def _wider(*arrays: jax.Array) -> list[jax.Array]:
    """(..., H) → H padded with zeros to the next of `config.WIDTHS`."""
    width = arrays[0].shape[3]
    missing = next(size for size in config.WIDTHS if size >= width) - width
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x for x in arrays]


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    q_offset: jax.Array | int | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q (B, Tq, Q, H), k and v (B, Tk, K, H) → out (B, Tq, Q, H), and log2 Σ exp2 of the scores (B, Q, Tq or more).

    The queries are at positions `q_offset` and after in the row of keys, or, with None, from the first on. `segments`
    are those of the keys.
    """
    batch, q_length, query_heads, width = q.shape
    bounds = intervals(k.shape[1], segments, window, q_length=q_length, q_offset=q_offset)
    q, k, v = _wider(q, k, v)
    log_sums = out_like(q, (batch, query_heads, round_up(q_length, _ROWS)), jnp.float32)
    out, lse = _launch(
        _forward_kernel, bounds.of_queries, q, k, v,
        rows_like=q, columns_like=k, group=query_heads // k.shape[2],
        scores=Scores(softcap, width**-0.5 if scale is None else scale), blocks=config.TRITON_FORWARD[q.shape[3]],
        out_shape=[out_like(q, q.shape, q.dtype), log_sums], interpret=interpret, name="causal_attention_forward",
    )  # fmt: skip
    return out[..., :width], lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    q_offset: jax.Array | int | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v, the forward's out and lse, and do, the gradient by out → dq, dk, dv in the shapes of q, k and v."""
    _, q_length, query_heads, width = q.shape
    bounds = intervals(k.shape[1], segments, window, q_length=q_length, q_offset=q_offset)
    delta = jnp.einsum("btqh,btqh->bqt", out.astype(jnp.float32), do.astype(jnp.float32))
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, lse.shape[2] - q_length)))
    q, k, v, do = _wider(q, k, v, do)
    scores = Scores(softcap, width**-0.5 if scale is None else scale)
    options: dict[str, Any] = dict(scores=scores, group=query_heads // k.shape[2], interpret=interpret)
    like_q, like_k = (out_like(x, x.shape, x.dtype) for x in (q, k))
    (dq,) = _launch(
        _query_gradient_kernel, bounds.of_queries, q, k, v, do, lse, delta, rows_like=q, columns_like=k,
        blocks=config.TRITON_QUERY_GRADIENT[q.shape[3]], out_shape=[like_q], name="causal_attention_query_gradient",
        **options,
    )  # fmt: skip
    dk, dv = _launch(
        _key_gradients_kernel, bounds.of_keys, q, k, v, do, lse, delta, rows_like=k, columns_like=q,
        blocks=config.TRITON_KEY_GRADIENTS[q.shape[3]], out_shape=[like_k] * 2, name="causal_attention_key_gradients",
        **options,
    )  # fmt: skip
    return dq[..., :width], dk[..., :width], dv[..., :width]
