"""A pass over rows in Pallas Mosaic GPU (Hopper), for rows so wide that registers hold no second one.

Memory passes: each row is read once, by the copy engine into shared memory, where the next ones arrive while one is
computed. One block a core walks over rows; its warpgroups share a row, each with columns of its own: it fetches them,
keeps their sums over rows in registers as float32, and meets the others only where a row's sums are added up. The
(blocks, D) partial sums are added up outside.
A forward pass saves its rows' sums: with them a backward has one stage left.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from liger_jax.pallas_kernels._hopper import NUM_CORES, launch, load
from liger_jax.pallas_kernels._rows.xla import RowPass, Terms
from liger_jax.pallas_kernels._tiles import cdiv, out_like, split, with_absent

_SHARED_BYTES = 226 * 2**10  # of 227 KiB: barriers and sums take the rest
_MOST_STAGES = 4
_WARPS = 4  # of a warpgroup
# Warpgroups × elements of a piece for each thread, best first: accesses of 16 bytes, and then of 8.
_SHARES = (4, 8), (3, 8), (4, 4), (3, 4), (2, 8), (2, 4)
_MOST_SUMS = {4: 64, 3: 96, 2: 128}  # registers of a thread for sums over rows, of 128, 168 and 255


@dataclasses.dataclass(frozen=True)
class Share:
    """How a block deals out a row: to warpgroups in pieces of (4, lane_size) columns, a piece's rows to warps.

    stages: of each matrix, how many rows are in shared memory.
    """

    num_warpgroups: int
    vec_size: int
    num_pieces: int  # of a warpgroup
    stages: tuple[int, ...]

    @property
    def warp_size(self) -> int:
        """Columns of a piece for one warp."""
        return 32 * self.vec_size

    @property
    def height(self) -> int:
        """Of a warpgroup's columns as an array (height, warp_size)."""
        return _WARPS * self.num_pieces

    @property
    def layout(self) -> Any:
        """How registers hold a piece: a row is within a warp, so that its sum needs no other."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((_WARPS, self.warp_size), (self.vec_size,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )


def _share(d: int, row_bytes: Sequence[int], column_bytes: int, num_sums: int) -> Share | str:
    """How rows of d columns are dealt out, or the reason why they are not.

    row_bytes: an element's, of each matrix. column_bytes: an element's, of all arrays of columns together.
    """
    dealt = [
        (warpgroups, vec_size)
        for warpgroups, vec_size in _SHARES
        if d % (128 * warpgroups * vec_size) == 0 and vec_size * max(row_bytes) <= 16
        if d * num_sums <= 128 * warpgroups * _MOST_SUMS[warpgroups]
    ]
    if not dealt:
        return f"D={d} cannot be dealt out to warpgroups whose registers hold {num_sums} sums over rows"
    left = _SHARED_BYTES - d * column_bytes
    stages = min(_MOST_STAGES, left // (d * sum(row_bytes)))
    counts = (stages,) * len(row_bytes)
    if stages < 2:  # the last matrix may wait for its place: meanwhile the others' rows arrive
        counts = (2,) * (len(row_bytes) - 1) + (1,)
        if len(row_bytes) == 1 or left < d * sum(map(operator.mul, counts, row_bytes)):
            return f"two rows of D={d} exceed a core's shared memory"
    warpgroups, vec_size = dealt[0]
    return Share(warpgroups, vec_size, d // (128 * warpgroups * vec_size), counts)


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """16- and 32-bit arrays, in widths that warpgroups share evenly and of which shared memory holds two rows."""
    present = [array for array in (x, *arrays) if array is not None]
    for array in present:
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the kernel takes 16- and 32-bit floats, and an array is {array.dtype}; use 'xla'."
    d = x.shape[-1]
    if d % 1024:
        return f"the copy engine moves pieces of 1024 columns, and D={d} is no multiple of it; use 'triton' or 'xla'."
    row_bytes = [array.dtype.itemsize for array in present if array.ndim > 1]
    column_bytes = [array.dtype.itemsize for array in present if array.ndim == 1]
    backward_bytes = [*row_bytes, row_bytes[-1]]  # a backward also reads a cotangent
    shares = (
        _share(d, row_bytes, sum(column_bytes), 0),
        _share(d, backward_bytes, sum(column_bytes[:1]), len(column_bytes)),
    )
    reason = next((share for share in shares if isinstance(share, str)), None)
    return None if reason is None else f"{reason}; use 'triton' or 'xla'."


class _Shared(NamedTuple):
    """What a block keeps in shared memory, and the barriers of what arrives there."""

    rows: Sequence[Any]  # (stages, warpgroups, height, warp_size)
    columns: Sequence[Any]  # (warpgroups, height, warp_size)
    sums: Any  # (2, sums of a row, warpgroups · warps): of rows in turn
    rows_filled: Sequence[Any]
    columns_filled: Any
    sums_made: Any

    @classmethod
    def scratch(cls, share: Share, rows: Sequence[Any], columns: Sequence[Any], num_sums: int) -> "_Shared":
        shape = share.num_warpgroups, share.height, share.warp_size
        return cls(
            [plgpu.SMEM((stages, *shape), x.dtype) for stages, x in zip(share.stages, rows, strict=True)],
            [plgpu.SMEM(shape, x.dtype) for x in columns],
            plgpu.SMEM((2, num_sums, share.num_warpgroups * _WARPS), jnp.float32),
            [plgpu.Barrier(num_barriers=stages * share.num_warpgroups) for stages in share.stages],
            plgpu.Barrier(num_arrivals=max(1, len(columns)), num_barriers=share.num_warpgroups),
            plgpu.Barrier(num_arrivals=share.num_warpgroups),
        )


def _statistics(row_pass: RowPass, along: Callable[..., Terms]) -> Terms:
    """The sums that a forward pass saves; `along` makes a stage's, whose first is the row's i-th."""
    if not row_pass.statistics:
        return ()
    before: Terms = ()
    for i, stage in enumerate(row_pass.statistics[:-1]):
        before += along(stage, before, i)
    i = len(before)
    last = along(row_pass.statistics[-1], before, i)
    if row_pass.rescue is None:
        return before + last
    rescue = row_pass.rescue
    rescued = jax.lax.cond(
        last[0] == jnp.inf, lambda: along(rescue, before, i + 1)[0], lambda: jnp.zeros((), jnp.float32)
    )
    return before + last + (rescued,)


def _kernel(*refs, row_pass: RowPass, n: int, num_blocks: int, share: Share, counts, has_column):
    """refs: rows, known sums, columns, row outputs, saved sums, partial sums, and what is shared."""
    row_refs, known_refs, column_refs, out_refs, saved_refs, total_refs, shared = split(refs, counts)
    shared = _Shared(*shared)
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    num_rows = jax.lax.div(n - 1 - block, num_blocks) + 1
    own = pl.ds(warpgroup * share.height, share.height)
    pieces = [pl.ds(_WARPS * i, _WARPS) for i in range(share.num_pieces)]

    def place(stages, i):
        """Where the i-th row of this block is, and its barrier."""
        slot = jax.lax.rem(i, stages)
        return slot, slot * share.num_warpgroups + warpgroup

    def fetch(ref, stage, filled, i):
        slot, barrier = place(stage.shape[0], i)
        source = ref.at[block + i * num_blocks, own]
        pl.when(i < num_rows)(
            lambda: plgpu.copy_gmem_to_smem(source, stage.at[slot, warpgroup], filled.at[barrier])
        )

    def load_known(i):
        row = block + jnp.minimum(i, num_rows - 1) * num_blocks
        return [ref[row] for ref in known_refs]

    def step(i, carry):
        known, totals = carry
        following = load_known(i + 1)
        slots = []
        for stage, filled in zip(shared.rows, shared.rows_filled, strict=True):
            slot, barrier = place(stage.shape[0], i)
            plgpu.barrier_wait(filled.at[barrier])
            slots.append(slot)

        def load_piece(piece):
            rows = [load(x, (slot, warpgroup, piece), share.layout) for x, slot in zip(shared.rows, slots, strict=True)]
            columns = [load(x, (warpgroup, piece), share.layout) for x in shared.columns]
            return *rows, *with_absent(columns, has_column)

        def along(stage, sums, first):
            terms = [stage(sums, *load_piece(piece)) for piece in pieces]
            of_row = shared.sums.at[jax.lax.rem(i, 2)]
            for j, term in enumerate(zip(*terms, strict=True)):
                in_warps = jnp.sum(functools.reduce(operator.add, term), axis=1)
                of_row[first + j, pl.ds(warpgroup * _WARPS, _WARPS)] = in_warps
            plgpu.barrier_arrive(shared.sums_made)
            plgpu.barrier_wait(shared.sums_made)
            parts = range(share.num_warpgroups * _WARPS)
            return tuple(sum(of_row[first + j, part] for part in parts) for j in range(len(terms[0])))

        sums: Terms = tuple(known)
        if not known:
            sums = _statistics(row_pass, along)

            @pl.when(warpgroup == 0)
            def _():
                for ref, x in zip(saved_refs, sums, strict=True):
                    ref[block + i * num_blocks] = x

        for stage in row_pass.stages:
            sums += along(stage, sums, len(sums))
        at = block + i * num_blocks, 
        new_totals = []
        for j, (piece, total) in enumerate(zip(pieces, totals, strict=True)):
            outputs, terms = row_pass.outputs(sums, *load_piece(piece))
            for ref, y in zip(out_refs, outputs, strict=True):
                ref[block + i * num_blocks, pl.ds(warpgroup * share.height + _WARPS * j, _WARPS)] = y.astype(ref.dtype)
            new_totals.append([x + y for x, y in zip(total, terms, strict=True)])
        plgpu.commit_smem()  # all have read this row
        for ref, stage, filled in zip(row_refs, shared.rows, shared.rows_filled, strict=True):
            fetch(ref, stage, filled, i + stage.shape[0])
        return following, new_totals

    for ref, stage, filled in zip(row_refs, shared.rows, shared.rows_filled, strict=True):
        for i in range(stage.shape[0]):
            fetch(ref, stage, filled, i)
    for ref, stage in zip(column_refs, shared.columns, strict=True):
        plgpu.copy_gmem_to_smem(ref.at[own], stage.at[warpgroup], shared.columns_filled.at[warpgroup])
    if column_refs:
        plgpu.barrier_wait(shared.columns_filled.at[warpgroup])
    zeros = plgpu.layout_cast(jnp.zeros((_WARPS, share.warp_size), jnp.float32), share.layout)
    _, totals = jax.lax.fori_loop(0, num_rows, step, (load_known(0), [[zeros] * len(total_refs)] * len(pieces)))
    for j, total in enumerate(totals):
        for ref, x in zip(total_refs, total, strict=True):
            ref[block, pl.ds(warpgroup * share.height + _WARPS * j, _WARPS)] = x


def run(
    row_pass: RowPass, rows: Sequence[jax.Array], columns: Sequence[jax.Array | None], known: Terms = ()
) -> tuple[Terms, Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,) float32, and sums to save (N, 1).

    The sums are those of `statistics` and the rescue, unless these are `known`: what an earlier pass saved.
    """
    n, d = rows[0].shape
    present = [x for x in columns if x is not None]
    num_totals, itemsize = row_pass.num_column_outputs, lambda x: x.dtype.itemsize
    share = _share(d, [itemsize(x) for x in rows], sum(map(itemsize, present)), num_totals)
    assert isinstance(share, Share), share
    num_blocks, num_saved = min(NUM_CORES, n), 0 if known else row_pass.num_statistics
    width = d // share.warp_size, share.warp_size
    counts = len(rows), len(known), len(present), len(row_pass.dtypes), num_saved, num_totals
    scratch = _Shared.scratch(share, rows, present, row_pass.num_statistics + 2 * len(row_pass.stages))

    def body(*refs):
        _kernel(*refs, row_pass=row_pass, n=n, num_blocks=num_blocks, share=share, counts=counts, has_column=tuple(x is not None for x in columns))

    like = functools.partial(out_like, rows[0])
    results = launch(
        body,
        *(x.reshape(n, *width) for x in rows),
        *(x.reshape(n) for x in known),
        *(x.reshape(width) for x in present),
        num_blocks=num_blocks,
        num_warpgroups=share.num_warpgroups,
        out_types=[like((n, *width), dtype) for dtype in row_pass.dtypes]
        + [like((n,), jnp.float32)] * num_saved
        + [like((num_blocks, *width), jnp.float32)] * num_totals,
        scratch=scratch,
        name=row_pass.name,
    )
    outputs, saved, partials = split(results, (len(row_pass.dtypes), num_saved))
    return (
        tuple(x.reshape(n, d) for x in outputs),
        tuple(jnp.sum(x.reshape(num_blocks, d), axis=0) for x in partials),
        tuple(x.reshape(n, 1) for x in saved),
    )
