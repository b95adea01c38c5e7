"""A row pass in Pallas Mosaic GPU (Hopper).

Memory passes: each row is read once, by the copy engine into shared memory, where the next rows arrive while one is
computed. There is one block a core, which walks over rows. Its warpgroups form teams of one or more, and each team has
a row at a time. A warpgroup fetches its own columns of the row, and keeps their totals in registers as float32; it
meets its team's other warpgroups only where the row's sums are added up. At the end a block's teams add up their totals
one after the other. Each block writes its own, (blocks, D), and XLA adds these up.
The rows' sums are saved by a forward pass: with them a backward pass has one stage left.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels.hopper import NUM_CORES, cores_here, launch, load, store
from liger_jax.pallas_kernels.norms import tiles_mosaic_gpu
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Signature, statistic_sums
from liger_jax.pallas_kernels.norms.tiles_mosaic_gpu import MosaicGpuTiles
from liger_jax.pallas_kernels.tiles import cdiv, out_like, with_absent

_WARPS = 4  # of a warpgroup
_MOST_SUMS = 8  # along a row


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """16- and 32-bit arrays, whose width warpgroups share evenly, and two rows of which fit shared memory."""
    present = [array for array in (x, *arrays) if array is not None]
    for array in present:
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the kernel supports floats of 16 and 32 bits, and an array is {array.dtype}; use 'xla'."
    d = x.shape[-1]
    if d % 256:
        return f"the kernel divides rows into tiles of 256 columns, and {d} is not a multiple; use 'triton' or 'xla'."
    matrices = [array.dtype.itemsize for array in present if array.ndim > 1]
    vectors = [array.dtype.itemsize for array in present if array.ndim == 1]
    forward = matrices, sum(vectors), 0
    backward = [*matrices, matrices[-1]], sum(vectors[:1]), len(vectors)  # it reads dy too, and no bias
    for direction in (forward, backward):
        reason = tiles_mosaic_gpu.mosaic_gpu_tiles(d, *direction)
        if isinstance(reason, str):
            return f"{reason}; use 'triton' or 'xla'."
    return None


class _Shared(NamedTuple):
    """What a block keeps in shared memory, and the barriers of what arrives there."""

    matrices: Sequence[Any]  # for each matrix (stages, warpgroups, height, warp_size)
    vectors: Sequence[Any]  # (warpgroups of a team, height, warp_size)
    sums: Any  # (teams, 2, sums of a row, warps): one row's, while the previous row's may still be read
    matrices_filled: Sequence[Any]  # for each matrix stages · warpgroups barriers
    vectors_filled: Any  # a barrier for each warpgroup of a team
    sums_made: Any  # a barrier for each team
    totals_made: Any  # a barrier for each warpgroup

    @classmethod
    def scratch(cls, tiles: MosaicGpuTiles, matrices: Sequence[Any], vectors: Sequence[Any]) -> "_Shared":
        shape = tiles.height, tiles.warp_size
        return cls(
            [
                plgpu.SMEM((stages, tiles.num_warpgroups, *shape), x.dtype)
                for stages, x in zip(tiles.stages, matrices, strict=True)
            ],
            [plgpu.SMEM((tiles.team_size, *shape), x.dtype) for x in vectors],
            plgpu.SMEM((tiles.num_teams, 2, _MOST_SUMS, tiles.team_size * _WARPS), jnp.float32),
            [plgpu.Barrier(num_barriers=stages * tiles.num_warpgroups) for stages in tiles.stages],
            plgpu.Barrier(num_arrivals=max(1, len(vectors)), num_barriers=tiles.team_size),
            plgpu.Barrier(num_arrivals=tiles.team_size, num_barriers=tiles.num_teams),
            plgpu.Barrier(num_barriers=tiles.num_warpgroups),
        )


class _Queue(NamedTuple):
    """One warpgroup's columns of one matrix, on their way through shared memory."""

    source: Any  # (rows, height, warp_size)
    slots: Any  # (stages, warpgroups, height, warp_size)
    filled: Any
    warpgroup: Any

    def slot(self, i: Any) -> tuple[Any, Any]:
        """The place in shared memory of the team's i-th row, and its barrier."""
        num_stages, num_warpgroups, *_ = self.slots.shape
        slot = jax.lax.rem(i, num_stages)
        return self.slots.at[slot, self.warpgroup], self.filled.at[slot * num_warpgroups + self.warpgroup]

    def fetch(self, i: Any, row: Any) -> None:
        slot, barrier = self.slot(i)
        plgpu.copy_gmem_to_smem(self.source.at[row], slot, barrier)

    def wait(self, i: Any) -> Any:
        slot, barrier = self.slot(i)
        plgpu.barrier_wait(barrier)
        return slot


def _team_and_member(tiles: MosaicGpuTiles) -> tuple[Any, Any]:
    """A warpgroup's team, and its number there."""
    warpgroup = jax.lax.axis_index("warpgroup")
    if tiles.num_teams == 1:  # 0 takes no register
        return 0, warpgroup
    return jax.lax.div(warpgroup, tiles.team_size), jax.lax.rem(warpgroup, tiles.team_size)


def _layout(tiles: MosaicGpuTiles) -> Any:
    """How a warpgroup's registers hold a piece. Each row of it is one warp's, so that its sums need no other warp."""
    tiling = plgpu.Tiling(((_WARPS, tiles.warp_size), (tiles.vec_size,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _bring_vectors(sources: Sequence[Any], shared: _Shared, team: Any, member: Any) -> None:
    """Copies the vectors to shared memory, and waits for them. The first team does it for all teams."""

    @pl.when(team == 0)
    def _():
        for source, vector in zip(sources, shared.vectors, strict=True):
            plgpu.copy_gmem_to_smem(source, vector.at[member], shared.vectors_filled.at[member])

    if sources:
        plgpu.barrier_wait(shared.vectors_filled.at[member])


def _write_totals(
    totals: Sequence[Sequence[jax.Array]], refs: Sequence[Any], shared: _Shared, tiles: MosaicGpuTiles, layout: Any
):
    """Writes a warpgroup's pieces of the totals: each team adds its own to what the teams before it have written.

    The refs are a block's, (height of a row, warp_size).
    """
    if not refs:
        return
    warpgroup, (team, member) = jax.lax.axis_index("warpgroup"), _team_and_member(tiles)
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


def _kernel(*refs, row_pass: RowPass, signature: Signature, n: int, num_blocks: int, tiles: MosaicGpuTiles):
    refs = signature.refs(refs)
    shared = _Shared(*refs.scratch)
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    team, member = _team_and_member(tiles)
    worker, num_workers = block * tiles.num_teams + team, num_blocks * tiles.num_teams
    num_rows = jax.lax.div(n - 1 - worker + num_workers, num_workers)
    first, own = member * tiles.height, pl.ds(member * tiles.height, tiles.height)
    queues = [
        _Queue(ref.at[:, own], slots, filled, warpgroup)
        for ref, slots, filled in zip(refs.matrices, shared.matrices, shared.matrices_filled, strict=True)
    ]
    layout = _layout(tiles)

    def row_of(i):
        return worker + i * num_workers

    def load_known_sums(i):
        return [ref[jnp.minimum(row_of(i), n - 1)] for ref in refs.known_sums]

    def fetch(queue, i):
        pl.when(i < num_rows)(lambda: queue.fetch(i, row_of(i)))

    def step(i, carry):
        known_sums, totals = carry
        next_known_sums = load_known_sums(i + 1)
        # The next row is fetched here. It could be fetched at the end of the previous step, when that step's row has
        # been read. But then the compiler moves the additions to `totals` past the branch, and spills registers.
        plgpu.commit_smem()
        for queue, stages in zip(queues, tiles.stages, strict=True):
            fetch(queue, i + stages - 1)
        row_slots = [queue.wait(i) for queue in queues]

        def fits_one_load(ref):
            return tiles.vec_size * ref.dtype.itemsize <= 16

        def load_piece(j):
            at = pl.ds(j * _WARPS, _WARPS)
            # A thread's elements of a vector may be wider than 16 bytes, and are more than one load then.
            vectors = [load(ref, (member, at), layout, optimized=fits_one_load(ref)) for ref in shared.vectors]
            return *(load(slot, (at,), layout) for slot in row_slots), *with_absent(vectors, signature.has_vector)

        def sum_along_row(stage, sums, number):
            def add(j, terms):
                return tuple(map(operator.add, terms, stage(sums, *load_piece(j))))

            terms = jax.lax.fori_loop(1, tiles.num_pieces, add, tuple(stage(sums, *load_piece(0))))
            sums_of_row = shared.sums.at[team, jax.lax.rem(i, 2)]
            for k, term in enumerate(terms):
                sums_of_row[number + k, pl.ds(member * _WARPS, _WARPS)] = jnp.sum(term, axis=1)
            plgpu.barrier_arrive(shared.sums_made.at[team])
            plgpu.barrier_wait(shared.sums_made.at[team])
            warps = range(tiles.team_size * _WARPS)
            return tuple(sum(sums_of_row[number + k, warp] for warp in warps) for k in range(len(terms)))

        sums = tuple(known_sums) or statistic_sums(row_pass, sum_along_row, lambda needed: needed)
        for ref, x in zip(refs.saved_sums, sums if refs.saved_sums else (), strict=True):
            pl.when(member == 0)(functools.partial(ref.__setitem__, row_of(i), x))
        for stage in row_pass.stages:
            sums += sum_along_row(stage, sums, len(sums))
        new_totals = []
        for j, total in enumerate(totals):
            outputs, terms = row_pass.outputs(sums, *load_piece(j))
            for ref, y in zip(refs.outputs, outputs, strict=True):
                ref[row_of(i), pl.ds(first + j * _WARPS, _WARPS)] = y.astype(ref.dtype)
            new_totals.append([x + y for x, y in zip(total, terms, strict=True)])
        return next_known_sums, new_totals

    for queue, stages in zip(queues, tiles.stages, strict=True):
        for i in range(stages - 1):
            fetch(queue, i)

    _bring_vectors([ref.at[own] for ref in refs.vectors], shared, team, member)
    zeros = plgpu.layout_cast(jnp.zeros((_WARPS, tiles.warp_size), jnp.float32), layout)
    totals = [[zeros] * len(refs.totals)] * tiles.num_pieces
    _, totals = jax.lax.fori_loop(0, num_rows, step, (load_known_sums(0), totals))
    _write_totals(totals, [ref.at[block] for ref in refs.totals], shared, tiles, layout)


def run(
    row_pass: RowPass, matrices: Sequence[jax.Array], vectors: Sequence[jax.Array | None], known_sums: Arrays = ()
) -> tuple[Arrays, Arrays, Arrays]:
    """matrices (N, D), vectors (D,) or None → outputs (N, D), totals (D,) float32, and sums to save (N, 1).

    The sums are those of the statistics and of the rescues. Where they are known, because an earlier pass saved them,
    they are read and none are saved.
    """
    (n, d), present = matrices[0].shape, [x for x in vectors if x is not None]
    signature = Signature.of(row_pass, matrices, vectors, known_sums, saves_sums=True)
    matrix_itemsizes, vector_bytes = [x.dtype.itemsize for x in matrices], sum(x.dtype.itemsize for x in present)
    tiles = tiles_mosaic_gpu.mosaic_gpu_tiles(d, matrix_itemsizes, vector_bytes, row_pass.num_totals)
    if isinstance(tiles, str):
        raise ValueError(tiles)
    num_blocks = min(NUM_CORES, cores_here(), cdiv(n, tiles.num_teams))
    row_shape = d // tiles.warp_size, tiles.warp_size
    kernel = functools.partial(_kernel, row_pass=row_pass, signature=signature, n=n, num_blocks=num_blocks, tiles=tiles)
    type_of = functools.partial(out_like, matrices[0])
    results = launch(
        kernel,
        *(x.reshape(n, *row_shape) for x in matrices),
        *(x.reshape(n) for x in known_sums),
        *(x.reshape(row_shape) for x in present),
        num_blocks=num_blocks,
        num_warpgroups=tiles.num_warpgroups,
        # All threads arrive at `sums_made` between a write of the sums and its reads, and again before the next one.
        auto_barriers=False,
        out_types=[type_of((n, *row_shape), dtype) for dtype in row_pass.output_dtypes]
        + [type_of((n,), jnp.float32)] * signature.num_saved_sums
        + [type_of((num_blocks, *row_shape), jnp.float32)] * signature.num_totals,
        scratch=_Shared.scratch(tiles, matrices, present),
        name=row_pass.name,
    )
    outputs, saved_sums, partial_totals = signature.results(results)
    return (
        tuple(x.reshape(n, d) for x in outputs),
        tuple(jnp.sum(x, axis=0).reshape(d) for x in partial_totals),
        tuple(x.reshape(n, 1) for x in saved_sums),
    )
