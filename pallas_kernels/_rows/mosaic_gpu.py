"""A pass over rows in Pallas Mosaic GPU (Hopper).

Memory passes: each row is read once, by the copy engine into shared memory, where the next ones arrive while one is
computed. One block a core walks over rows. Its warpgroups form teams, of one or more, and a team has a row: each of its
warpgroups fetches its own columns, keeps their sums over rows in registers as float32, and meets the team's others only
where the row's own sums are added up. At the end a block's teams add theirs up one after the other, and the (blocks, D)
partial sums are added up outside.
A forward pass saves its rows' sums: with them a backward has one stage left.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import NUM_CORES, launch, load, store
from liger_jax.pallas_kernels._rows import config
from liger_jax.pallas_kernels._rows.config import MosaicGpuConfig
from liger_jax.pallas_kernels._rows.xla import RowPass, Terms
from liger_jax.pallas_kernels._tiles import cdiv, out_like, split, with_absent

_WARPS = 4  # of a warpgroup
_MOST_SUMS = 8  # of a row


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """16- and 32-bit arrays, in widths that warpgroups share evenly and of which shared memory holds two rows."""
    present = [array for array in (x, *arrays) if array is not None]
    for array in present:
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the kernel takes floats of 16 and 32 bits, and an array is {array.dtype}; use 'xla'."
    d = x.shape[-1]
    if d % 256:
        return f"the kernel deals out pieces of 256 columns, and {d} is no multiple of it; use 'triton' or 'xla'."
    rows = [array.dtype.itemsize for array in present if array.ndim > 1]
    columns = [array.dtype.itemsize for array in present if array.ndim == 1]
    directions = (rows, sum(columns), 0), ([*rows, rows[-1]], sum(columns[:1]), len(columns))  # a backward has dy too
    for direction in directions:
        reason = config.mosaic_gpu_config(d, *direction)
        if isinstance(reason, str):
            return f"{reason}; use 'triton' or 'xla'."
    return None


class _Shared(NamedTuple):
    """What a block keeps in shared memory, and the barriers of what arrives there."""

    rows: Sequence[Any]  # of each matrix (stages, warpgroups, height, warp_size)
    columns: Sequence[Any]  # (warpgroups of a team, height, warp_size)
    sums: Any  # (teams, 2, sums of a row, warps): a row's, while its predecessor's may still be read
    rows_filled: Sequence[Any]  # of each matrix: stages · warpgroups
    columns_filled: Any  # warpgroups of a team
    sums_made: Any  # teams
    totals_made: Any  # warpgroups

    @classmethod
    def scratch(cls, tiles: MosaicGpuConfig, rows: Sequence[Any], columns: Sequence[Any]) -> "_Shared":
        shape = tiles.height, tiles.warp_size
        return cls(
            [
                plgpu.SMEM((stages, tiles.num_warpgroups, *shape), x.dtype)
                for stages, x in zip(tiles.stages, rows, strict=True)
            ],
            [plgpu.SMEM((tiles.team_size, *shape), x.dtype) for x in columns],
            plgpu.SMEM((tiles.num_teams, 2, _MOST_SUMS, tiles.team_size * _WARPS), jnp.float32),
            [plgpu.Barrier(num_barriers=stages * tiles.num_warpgroups) for stages in tiles.stages],
            plgpu.Barrier(num_arrivals=max(1, len(columns)), num_barriers=tiles.team_size),
            plgpu.Barrier(num_arrivals=tiles.team_size, num_barriers=tiles.num_teams),
            plgpu.Barrier(num_barriers=tiles.num_warpgroups),
        )


class _Queue(NamedTuple):
    """One warpgroup's columns of one matrix, on their way through shared memory."""

    source: Any  # (rows, height, warp_size)
    stage: Any  # (stages, warpgroups, height, warp_size)
    filled: Any
    warpgroup: Any

    def place(self, i: Any) -> tuple[Any, Any]:
        """Where the block's i-th row comes to, and its barrier."""
        num_stages, num_warpgroups, *_ = self.stage.shape
        slot = jax.lax.rem(i, num_stages)
        return self.stage.at[slot, self.warpgroup], self.filled.at[slot * num_warpgroups + self.warpgroup]

    def fetch(self, i: Any, row: Any) -> None:
        stage, barrier = self.place(i)
        plgpu.copy_gmem_to_smem(self.source.at[row], stage, barrier)

    def wait(self, i: Any) -> Any:
        stage, barrier = self.place(i)
        plgpu.barrier_wait(barrier)
        return stage


def _place(tiles: MosaicGpuConfig) -> tuple[Any, Any]:
    """A warpgroup's team, and its number there."""
    warpgroup = jax.lax.axis_index("warpgroup")
    if tiles.num_teams == 1:  # 0 takes no register
        return 0, warpgroup
    return jax.lax.div(warpgroup, tiles.team_size), jax.lax.rem(warpgroup, tiles.team_size)


def _statistics(row_pass: RowPass, along: Callable[..., Terms]) -> Terms:
    """The sums that a forward pass saves; `along(stage, sums, number)` makes a stage's, the row's from `number` on."""
    if not row_pass.statistics:
        return ()
    before: Terms = ()
    for stage in row_pass.statistics[:-1]:
        before += along(stage, before, len(before))
    last = along(row_pass.statistics[-1], before, len(before))
    if row_pass.rescue is None:
        return before + last
    rescue = functools.partial(along, row_pass.rescue, before, len(before) + 1)
    return before + last + jax.lax.cond(last[0] == jnp.inf, rescue, lambda: (jnp.zeros((), jnp.float32),))


def _write_totals(
    totals: Sequence[Sequence[jax.Array]], refs: Sequence[Any], shared: _Shared, tiles: MosaicGpuConfig, layout: Any
):
    """A warpgroup's pieces of the sums over rows: each team adds its own to what its predecessors have written.

    The refs are a block's, (height of a row, warp_size).
    """
    if not refs:
        return
    warpgroup, (team, member) = jax.lax.axis_index("warpgroup"), _place(tiles)
    places = [(pl.ds(member * tiles.height + j * _WARPS, _WARPS),) for j in range(tiles.num_pieces)]

    def write(totals):
        for at, total in zip(places, totals, strict=True):
            for ref, x in zip(refs, total, strict=True):
                store(ref, at, x)

    def add():
        plgpu.barrier_wait(shared.totals_made.at[warpgroup - tiles.team_size])
        before = [[load(ref, at, layout, optimized=False) for ref in refs] for at in places]
        write([[x + y for x, y in zip(*both, strict=True)] for both in zip(totals, before, strict=True)])

    if tiles.num_teams == 1:
        write(totals)
        return
    pl.when(team == 0)(lambda: write(totals))
    pl.when(team > 0)(add)
    pl.when(team < tiles.num_teams - 1)(lambda: plgpu.barrier_arrive(shared.totals_made.at[warpgroup]))


def _kernel(*refs, row_pass: RowPass, n: int, num_blocks: int, tiles: MosaicGpuConfig, counts, has_column):
    row_refs, known_refs, column_refs, out_refs, saved_refs, total_refs, scratch = split(refs, counts)
    shared = _Shared(*scratch)
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    team, member = _place(tiles)
    worker, num_workers = block * tiles.num_teams + team, num_blocks * tiles.num_teams
    num_rows = jax.lax.div(n - 1 - worker + num_workers, num_workers)
    first, own = member * tiles.height, pl.ds(member * tiles.height, tiles.height)
    queues = [
        _Queue(ref.at[:, own], stage, filled, warpgroup)
        for ref, stage, filled in zip(row_refs, shared.rows, shared.rows_filled, strict=True)
    ]
    # A piece's rows are warps', so that its sums along them need no other warp.
    tiling = plgpu.Tiling(((_WARPS, tiles.warp_size), (tiles.vec_size,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    row_of = lambda i: worker + i * num_workers
    load_known = lambda i: [ref[jnp.minimum(row_of(i), n - 1)] for ref in known_refs]

    def fetch(queue, i):
        pl.when(i < num_rows)(lambda: queue.fetch(i, row_of(i)))

    def step(i, carry):
        known, totals = carry
        following = load_known(i + 1)
        # Here and not behind the row before, which is read by now: there the compiler moves the additions to `totals`
        # past the branch, and spills.
        plgpu.commit_smem()
        for queue, stages in zip(queues, tiles.stages, strict=True):
            fetch(queue, i + stages - 1)
        stages = [queue.wait(i) for queue in queues]

        # A thread's columns, which may be wider than its rows' 16 bytes, are one load then no more.
        in_one = lambda stage: tiles.vec_size * stage.dtype.itemsize <= 16

        def load_piece(j):
            at = pl.ds(j * _WARPS, _WARPS)
            columns = [load(stage, (member, at), layout, optimized=in_one(stage)) for stage in shared.columns]
            return *(load(stage, (at,), layout) for stage in stages), *with_absent(columns, has_column)

        def along(stage, sums, number):
            add = lambda j, terms: tuple(map(operator.add, terms, stage(sums, *load_piece(j))))
            terms = jax.lax.fori_loop(1, tiles.num_pieces, add, tuple(stage(sums, *load_piece(0))))
            of_row = shared.sums.at[team, jax.lax.rem(i, 2)]
            for k, term in enumerate(terms):
                of_row[number + k, pl.ds(member * _WARPS, _WARPS)] = jnp.sum(term, axis=1)
            plgpu.barrier_arrive(shared.sums_made.at[team])
            plgpu.barrier_wait(shared.sums_made.at[team])
            warps = range(tiles.team_size * _WARPS)
            return tuple(sum(of_row[number + k, warp] for warp in warps) for k in range(len(terms)))

        sums = tuple(known) or _statistics(row_pass, along)
        for ref, x in zip(saved_refs, sums if saved_refs else (), strict=True):
            pl.when(member == 0)(functools.partial(ref.__setitem__, row_of(i), x))
        for stage in row_pass.stages:
            sums += along(stage, sums, len(sums))
        new_totals = []
        for j, total in enumerate(totals):
            outputs, terms = row_pass.outputs(sums, *load_piece(j))
            for ref, y in zip(out_refs, outputs, strict=True):
                ref[row_of(i), pl.ds(first + j * _WARPS, _WARPS)] = y.astype(ref.dtype)
            new_totals.append([x + y for x, y in zip(total, terms, strict=True)])
        return following, new_totals

    for queue, stages in zip(queues, tiles.stages, strict=True):
        for i in range(stages - 1):
            fetch(queue, i)

    @pl.when(team == 0)
    def _():
        for ref, stage in zip(column_refs, shared.columns, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[own], stage.at[member], shared.columns_filled.at[member])

    if column_refs:
        plgpu.barrier_wait(shared.columns_filled.at[member])
    zeros = plgpu.layout_cast(jnp.zeros((_WARPS, tiles.warp_size), jnp.float32), layout)
    totals = [[zeros] * len(total_refs)] * tiles.num_pieces
    _, totals = jax.lax.fori_loop(0, num_rows, step, (load_known(0), totals))
    _write_totals(totals, [ref.at[block] for ref in total_refs], shared, tiles, layout)


def run(
    row_pass: RowPass, rows: Sequence[jax.Array], columns: Sequence[jax.Array | None], known: Terms = ()
) -> tuple[Terms, Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,) float32, and sums to save (N, 1).

    The sums are those of `statistics` and the rescue, unless these are `known`: what an earlier pass saved.
    """
    (n, d), present = rows[0].shape, [x for x in columns if x is not None]
    num_totals, num_saved = row_pass.num_column_outputs, 0 if known else row_pass.num_statistics
    row_bytes, column_bytes = ([x.dtype.itemsize for x in arrays] for arrays in (rows, present))
    tiles = config.mosaic_gpu_config(d, row_bytes, sum(column_bytes), num_totals)
    if isinstance(tiles, str):
        raise ValueError(tiles)
    num_blocks = min(NUM_CORES, cdiv(n, tiles.num_teams))
    width = d // tiles.warp_size, tiles.warp_size
    kernel = functools.partial(
        _kernel,
        row_pass=row_pass,
        n=n,
        num_blocks=num_blocks,
        tiles=tiles,
        counts=(len(rows), len(known), len(present), len(row_pass.dtypes), num_saved, num_totals),
        has_column=tuple(x is not None for x in columns),
    )
    like = functools.partial(out_like, rows[0])
    results = launch(
        kernel,
        *(x.reshape(n, *width) for x in rows),
        *(x.reshape(n) for x in known),
        *(x.reshape(width) for x in present),
        num_blocks=num_blocks,
        num_warpgroups=tiles.num_warpgroups,
        # All threads arrive at `sums_made` between a write of the sums and its reads, and again before the next one.
        auto_barriers=False,
        out_types=[like((n, *width), dtype) for dtype in row_pass.dtypes]
        + [like((n,), jnp.float32)] * num_saved
        + [like((num_blocks, *width), jnp.float32)] * num_totals,
        scratch=_Shared.scratch(tiles, rows, present),
        name=row_pass.name,
    )
    outputs, saved, partials = split(results, (len(row_pass.dtypes), num_saved))
    return (
        tuple(x.reshape(n, d) for x in outputs),
        tuple(jnp.sum(x, axis=0).reshape(d) for x in partials),
        tuple(x.reshape(n, 1) for x in saved),
    )
