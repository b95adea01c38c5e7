"""Norms on an NVIDIA GPU by the tiles of their Triton kernels, in XLA, and on Hopper in Mosaic GPU: the evidence behind
`norms/tiles_triton.py` and `norms/tiles_mosaic_gpu.py`.

    python -m benchmarks.row_tiles [--widths 2048 8192] [--ops rms_norm layer_norm]

Kernel time and the speed of a copy as `benchmarks/_copy_speed.py` has them, on 16,384 rows in bfloat16. A tile is: rows
a step × warps, × programs a core where they walk over rows; the pieces of a row; and whether the next rows are loaded
ahead. In Mosaic GPU it is: teams of a block × warpgroups of a team.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp

from benchmarks import _copy_speed, _measure
from benchmarks._copy_speed import Rotation, copy_programs, in_rounds
from benchmarks.memory_bound import WIDTHS
from liger_jax.ops.place import Place, described
from liger_jax.pallas_kernels.norms import fused_add_rms_norm, layer_norm, rms_norm, tiles_mosaic_gpu, tiles_triton
from liger_jax.pallas_kernels.norms.backends import Backend, backends
from liger_jax.pallas_kernels.norms.tiles_mosaic_gpu import MosaicGpuTiles
from liger_jax.pallas_kernels.norms.tiles_triton import TritonTiles
from liger_jax.pallas_kernels.tiles import cdiv, round_up

ROWS = 16384
HOPPER = "Mosaic GPU"
TEAMS = ((8, 1), (6, 1), (4, 1), (3, 1), (2, 1), (4, 2), (3, 2), (2, 2), (2, 4), (1, 4), (1, 3))


def kernels_of(norm: ModuleType) -> dict[str, Backend]:
    """The norm's kernels by the names that the tables show."""
    own = backends(norm, "xla", "triton", "mosaic_gpu")
    return {"XLA": own["xla"], "Triton": own["triton"], HOPPER: own["mosaic_gpu"]}


OPS = {  # kernels, options of forward and backward, rows and columns of forward, rows and columns of backward
    "rms_norm": (
        kernels_of(rms_norm),
        {"offset": 0.0},
        {"casting_mode": "llama"},
        (1, 1),
        (2, 1),
    ),
    "layer_norm": (kernels_of(layer_norm), {}, {}, (1, 2), (2, 2)),
    "fused_add_rms_norm": (
        kernels_of(fused_add_rms_norm),
        {"offset": 0.0},
        {"casting_mode": "llama"},
        (2, 1),
        (3, 1),
    ),
}


def tiles_of(d: int, backward: bool) -> dict[str, TritonTiles]:
    """Tiles by name. A thread has 4 to 64 elements of a piece, and 160 at most, or 80 where it walks over rows."""
    divisions, wide = {}, d > 8192
    sizes = [size for size in (256, 512, 1024, 2048, 4096, 8192) if d <= round_up(d, size) <= 4 * d // 3]
    row_counts = (1, 2, 4) if d <= 1024 else (1, 2) if d <= 4096 else (1,)
    warp_counts = (8, 16, 32) if wide else (1, 2, 4, 8, 16)
    walks = (1, 2, 3, 4, 8, 16) if backward else (None, 2, 4, 8, 16)
    for rows, warps, programs, size in itertools.product(row_counts, warp_counts, walks, sizes):
        count, elements = cdiv(d, size), rows * size // (32 * warps)
        if count > 10 or not 4 <= elements <= 64 or elements * count > (80 if programs else 160):
            continue
        if programs and not 4 <= programs * warps <= (16 if backward and not wide else 32):
            continue
        for ahead in (False, True) if wide and programs else (bool(programs),):
            steps = cdiv(ROWS, rows)
            num_programs = min(steps, programs * tiles_triton.MULTIPROCESSORS) if programs else steps
            name = f"{rows} × {warps}" + (f" × {programs}" if programs else "") + f", {count} × {size}"
            divisions[name + ", ahead" if ahead else name] = TritonTiles(
                rows,
                size,
                count,
                warps,
                num_programs,
                cdiv(steps, num_programs),
                loads_ahead=ahead,
                keeps_vectors=bool(programs) and not wide,
                evicts_outputs_first=d > (1536 if backward else 4096),
            )
    return divisions


def teams_of(d: int, num_rows: int, num_columns: int, num_sums: int) -> dict[str, MosaicGpuTiles]:
    """Tiles by name: the teams that have room for rows of bfloat16."""
    divisions, default = {}, tiles_mosaic_gpu.TEAMS
    for share in TEAMS:
        tiles_mosaic_gpu.TEAMS = {num_sums: {d: share}}
        tiles = tiles_mosaic_gpu.mosaic_gpu_tiles(d, [2] * num_rows, 2 * num_columns, num_sums)
        if not isinstance(tiles, str) and (tiles.num_teams, tiles.team_size) == share:
            divisions[f"{HOPPER}, {share[0]} × {share[1]}"] = tiles
    tiles_mosaic_gpu.TEAMS = default
    return divisions


@contextlib.contextmanager
def chosen(tiles: TritonTiles | MosaicGpuTiles | None) -> Iterator[None]:
    """A context in which kernels take these tiles, if there are any, instead of their own choice."""
    if tiles is None:
        yield
        return
    is_triton = isinstance(tiles, TritonTiles)
    module, name = (tiles_triton, "triton_tiles") if is_triton else (tiles_mosaic_gpu, "mosaic_gpu_tiles")
    default = getattr(module, name)
    setattr(module, name, lambda *_: tiles)
    try:
        yield
    finally:
        setattr(module, name, default)


def programs(op: str, d: int, all_tiles: bool):
    """(direction, name) → a lowered program; and the arrays of each direction."""
    kernels, both_options, forward_options, forward_counts, backward_counts = OPS[op]
    shapes = lambda counts: [(ROWS, d)] * counts[0] + [(d,)] * counts[1]
    types = lambda counts: [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes(counts)]
    sums = [jax.ShapeDtypeStruct((ROWS, 1), jnp.float32)] * (3 if op == "layer_norm" else 2)
    options, lowered = {"eps": 1e-6, **both_options}, {}
    on_hopper = Place(described(jax.devices()[0])).is_hopper and not kernels[HOPPER].unsupported(*types(forward_counts))
    names = [name for name in kernels if name != HOPPER or on_hopper]
    for backward, counts in ((False, forward_counts), (True, backward_counts)):
        direction = "backward" if backward else "forward"
        choices = dict.fromkeys(names)
        if all_tiles:
            choices |= tiles_of(d, backward)
        if all_tiles and on_hopper:
            num_columns = 1 if backward else counts[1]
            choices |= teams_of(d, counts[0], num_columns, counts[1] if backward else 0)
        for name, tiles in choices.items():
            kernel = kernels[HOPPER] if isinstance(tiles, MosaicGpuTiles) else kernels.get(name, kernels["Triton"])
            launch = {"interpret": False} if kernel is kernels["Triton"] else {}
            if backward:
                known = [] if name == "XLA" else sums
                run = lambda known, *arrays, kernel=kernel, launch=launch: kernel.backward(
                    *arrays, tuple(known), **options, **launch
                )
                arguments = (known, *types(counts))
            else:
                run = lambda *arrays, kernel=kernel, launch=launch: kernel.forward(
                    *arrays, **options, **forward_options, **launch
                )
                arguments = tuple(types(counts))
            jax.clear_caches()  # a traced kernel has its tiles
            with chosen(tiles):
                lowered[direction, name] = jax.jit(run).lower(*arguments), arguments
    return lowered


def filled(arguments, key):
    """Random arrays of these types, and ones for what a forward pass has saved."""
    make = lambda i, x: (
        jnp.ones(x.shape, x.dtype)
        if x.dtype == jnp.float32
        else jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
    )
    leaves, tree = jax.tree.flatten(arguments)
    return jax.tree.unflatten(tree, [make(i, x) for i, x in enumerate(leaves)])


def compiled(lowered):
    try:
        return lowered.compile()
    except Exception:  # too many registers, say: no result
        return None


def measured(op: str, d: int, num_best: int) -> list[list[str]]:
    """Table rows: XLA, the default, Mosaic GPU, and the best tiles of each direction."""
    lowered = programs(op, d, num_best > 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ready = dict(zip(lowered, pool.map(lambda x: compiled(x[0]), lowered.values()), strict=True))
    sets, runs, moved, copies = {}, {}, {}, {}
    for direction, count in (("forward", 2), ("backward", 3)):
        if op == "fused_add_rms_norm":  # reads the residual, and its forward writes the sum, too
            count += 2 if direction == "forward" else 1
        moved[direction], copies[direction] = copy_programs(count * ROWS * d * 2, None)
    for (direction, name), program in ready.items():
        if program is not None:
            arguments = lowered[direction, name][1]
            kind = direction, name == "XLA"
            if kind not in sets:
                num_sets = max(2, cdiv(_copy_speed.ROTATED_BYTES, moved[direction]))
                sets[kind] = [filled(arguments, jax.random.key(i)) for i in range(num_sets)]
            runs[direction, name] = Rotation(program, sets[kind], ROWS * d * 2)
    runs |= {(f"{direction} copy", name): run for direction, each in copies.items() for name, run in each.items()}
    for run in runs.values():
        run.iterations = 10
        run.warm_up()
    times = in_rounds(runs, rounds=3)
    lines = []
    for direction in ("forward", "backward"):
        best_copy = min(us for (kind, _), us in times.items() if kind == f"{direction} copy")
        own = {name: us for (kind, name), us in times.items() if kind == direction}
        best = sorted(own, key=lambda name: own[name])[:num_best]
        shown = dict.fromkeys([*(name for name in OPS[op][0] if name in own), *best])
        lines += [
            [op, f"{d}", direction, name, f"{own[name]:.1f}", f"{100 * best_copy / own[name]:.0f}"] for name in shown
        ]
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--ops", nargs="+", choices=tuple(OPS), default=list(OPS))
    parser.add_argument("--best", type=int, default=3, help="how many tiles are shown; 0 measures the default alone")
    arguments = parser.parse_args()
    command = f"python -m benchmarks.row_tiles --widths {' '.join(map(str, arguments.widths))}"
    lines = []
    for d, op in itertools.product(arguments.widths, arguments.ops):
        lines += measured(op, d, arguments.best)
        header = ["op, 16,384 rows", "width", "direction", "tiles", "µs", "% of a copy's speed"]
        text = _measure.heading(f"{command} --ops {' '.join(arguments.ops)}") + "\n" + _measure.table(header, lines)
        _measure.save("row_tiles", text)


if __name__ == "__main__":
    main()
