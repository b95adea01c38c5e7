"""The TPU compiler's final schedule of the fused loss's kernels, read without a TPU.

    python -m benchmarks.tpu_schedule [--cases v6e:llama-3-8b-head v5p:gemma-2-2b-head]

libtpu writes each kernel as bundles of instructions, one a cycle, and how many slots of each unit a bundle uses.
Bundles × trip counts are cycles without stalls. What is left out: waiting for HBM, and guarded code with neither
products nor exponentials: what runs at a row tile's first and last step, and copies of windows inside VMEM.
The yardstick is XLA's own product hidden · weightᵀ, which writes the logits in bfloat16, read the same way.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks._shapes import HEADS

# An option of tpu7x's compiler: by default it copies 16-bit arrays that a loop reads, such as the weight, into tiles of
# 16 rows.
SMALL_TILES = "xla_tpu_control_large_2nd_minor_layout_for_x16"
FINAL_SCHEDULE = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_.*"  # of some 70 passes
KERNELS = ("fused_linear_cross_entropy_statistics", "fused_linear_cross_entropy_logit_gradients")


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a generation: bfloat16 multiply-adds a cycle, GHz, HBM bytes a nanosecond, and MiB of VMEM.

    Multiply-adds: 4 units of 128 × 128 up to v5p; 2 of 256 × 256 that take 2 rows a cycle from v6e on. With the
    clock these give the published peaks: 275, 197, 459, 918 and 2,307 TFLOP/s for chips of 2, 1, 2, 1 and 2 cores.
    """

    macs: int
    ghz: float
    hbm: float
    vmem: int


CORES = {
    "v4": Core(4 * 128 * 128, 1.05, 614, 16),
    "v5e": Core(4 * 128 * 128, 1.5, 819, 128),
    "v5p": Core(4 * 128 * 128, 1.75, 1383, 64),
    "v6e": Core(2 * 2 * 256 * 256, 1.75, 1640, 128),
    "tpu7x": Core(2 * 2 * 256 * 256, 2.2, 3690, 64),
}


@dataclasses.dataclass
class Loop:
    """A loop of the schedule: its first bundle, last bundle and trips."""

    first: int
    last: int
    trips: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Cycles with and without matrix work, spills and fills, and the share of its slots that each unit uses."""

    product_cycles: int
    other_cycles: int
    spills: int
    fills: int
    use: dict[str, float]

    @property
    def limit(self) -> str:
        unit = max(self.use, key=lambda name: self.use[name])
        return f"{unit} {self.use[unit]:.0%}"


def _slots(path: pathlib.Path) -> tuple[list[str], list[int], list[list[int]]]:
    """Names and capacities of the units, and the slots that each bundle uses."""
    lines = path.read_text().splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    return units, [int(x) for x in lines[2].split()], [[int(x) for x in line.split()] for line in lines[4:]]


def _bundles(path: pathlib.Path) -> list[str]:
    """The text of each bundle; a comment inside one may hold line breaks."""
    return re.split(r"\n(?= *0x[0-9a-f]+ )", path.read_text())[1:]


def _loops(bundles: list[str]) -> list[Loop]:
    """Loops by their marks: the body starts at LB, and the n-th exit test closes the innermost open one."""
    open_loops, loops = [], []
    for i, text in enumerate(bundles):
        if re.match(r" *0x[0-9a-f]+ L[BH]", text):
            open_loops.append(i)
        if (test := re.search(r"scmp\.\w+\.s32\.totalorder %\w+, (\d+) /\* loop exit test", text)) and open_loops:
            loops.append(Loop(open_loops.pop(), i, int(test[1])))
    return loops


def _guarded(bundles: list[str]) -> list[tuple[int, int]]:
    """Ranges that a forward branch jumps over; each ends before a bundle marked PF."""
    ends = [i for i, text in enumerate(bundles) if re.match(r" *0x[0-9a-f]+ PF", text)] + [len(bundles)]
    starts = [i for i, text in enumerate(bundles) if re.search(r"sbr\.rel \(!?%\w+\) target", text)]
    return [(start + 5, next(end for end in ends if end > start)) for start in starts]


def read_schedule(bundles_path: pathlib.Path, slots_path: pathlib.Path, tiles: int, steps: int) -> Schedule:
    """`tiles` is how often a guarded epilogue runs; one that is not guarded runs in every one of the grid's `steps`."""
    units, capacities, slots = _slots(slots_path)
    bundles = _bundles(bundles_path)
    weights, other = [1] * len(bundles), [False] * len(bundles)
    for loop in _loops(bundles):
        # The grid's loop has two trips more, which only fill and drain the copies.
        trips = steps if steps and loop.trips == steps + 2 else loop.trips
        for i in range(loop.first, loop.last + 1):
            weights[i] *= trips
    has = lambda unit, first, last: any(row[units.index(unit)] for row in slots[first:last])
    guarded = [(first, last) for first, last in _guarded(bundles) if not has("MXU", first, last)]
    for first, last in guarded:
        for i in range(first, min(last, len(bundles))):
            weights[i], other[i] = 0, True
    # An epilogue among the products is counted with them. Otherwise it is the longest with exponentials; shorter
    # ones, for the vocabulary's last tile or a row tile's end, run rarely.
    exponentials = [row[units.index("EUP")] for row in slots]
    if not any(e and not is_other for e, is_other in zip(exponentials, other, strict=False)):
        epilogues = [(last - first, first, last) for first, last in guarded if has("EUP", first, last)]
        for _, first, last in sorted(epilogues)[-1:]:
            weights[first:last] = [tiles] * (last - first)
    cycles = sum(weights)
    total = lambda unit: sum(w * row[units.index(unit)] for w, row in zip(weights, slots, strict=False))
    use = {unit: total(unit) / max(cycles, 1) / capacities[units.index(unit)] for unit in units if ":" not in unit}
    other_cycles = sum(w for w, is_other in zip(weights, other, strict=True) if is_other)
    return Schedule(cycles - other_cycles, other_cycles, total("VSTORE:SPILL"), total("VLOAD:FILL"), use)


def largest(directory: pathlib.Path, name: str, tiles: int = 0, steps: int = 0) -> Schedule:
    """The kernel named `name` with the most cycles: a last, shorter slice has a kernel of its own."""
    bundles = [path for path in directory.glob(f"*{name}*-final_bundles.txt") if "schedule-an" not in path.name]
    found = []
    for path in bundles:
        kernel = re.sub(r"-\d+-final_bundles.txt$", "", path.name)
        (slots,) = directory.glob(f"{kernel}-[0-9]*-final_hlo-static-per-bundle-utilization.txt")
        found.append(read_schedule(path, slots, tiles, steps))
    return max(found, key=lambda schedule: schedule.product_cycles + schedule.other_cycles)


def compile_program(generation: str, shape: str, what: str) -> None:
    """Compiles and prints the temporary bytes; run in a process of its own, since libtpu reads its settings once."""
    from tests.aot import targets

    os.environ.update(targets.ENVIRONMENT)
    import jax
    import jax.numpy as jnp

    from liger_jax import fused_linear_cross_entropy

    n, d, v = HEADS[shape]
    loss = lambda h, w, y: fused_linear_cross_entropy(h, w, y, mode="lean", implementation="mosaic_tpu")
    arguments = (((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32))
    function = jax.value_and_grad(loss, (0, 1))
    if what == "product":
        function = lambda h, w, y: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())))
    options = {SMALL_TILES: "false"} if what == "small tiles" else None
    compiled = targets.compile_for(function, arguments, targets.tpu_devices(generation)[0], "tpu", options)
    print(json.dumps({"temporary": compiled.memory_analysis().temp_size_in_bytes}))


def dumped(generation: str, shape: str, what: str, directory: str | None) -> int | None:
    """Compiles with the schedule written to `directory`. Returns the temporary bytes, or None if it fails."""
    flags = f"--xla_jf_dump_to={directory} {FINAL_SCHEDULE}" if directory else ""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu_schedule", "--compile", generation, shape, what],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])["temporary"]


def rows(generation: str, shape: str):
    from liger_jax.ops.loss_plan import Problem, make_plan
    from liger_jax.pallas_kernels.fused_linear_cross_entropy import config

    n, d, v = HEADS[shape]
    core = CORES[generation]
    entries = make_plan(Problem(n, d, v, 2, 2, "tpu", "mosaic_tpu", mode="lean")).chunk_size
    label = [generation, f"{shape} {HEADS[shape]}"]
    with tempfile.TemporaryDirectory() as directory:
        temporary = dumped(generation, shape, "loss", directory)
        if temporary is None:
            yield [*label, "does not compile", *["–"] * 7]
            return
        extra = f"{temporary / 2**20:.0f}"
        if generation == "tpu7x":
            extra += f" ({dumped(generation, shape, 'small tiles', None) / 2**20:.0f})"
        for kernel, columns in zip(KERNELS, (v, entries), strict=True):
            tile = config.tpu_config(n, columns, d, 2, core.vmem * 2**20)
            n_tiles, v_tiles = math.ceil(n / tile.n_block_size), math.ceil(columns / tile.v_block_size)
            tile_count = n_tiles * v_tiles
            schedule = largest(pathlib.Path(directory), kernel, tile_count, tile_count * (d // tile.d_block_size))
            ideal = n * d * columns / core.macs
            # Where the schedule is shorter than the published peak allows, the units themselves are waited for.
            cycles = max(schedule.product_cycles, ideal) + schedule.other_cycles
            # A weight tile is read once a row tile; a hidden tile once a tile of both where d is split.
            bytes_read = 2 * d * (n_tiles * columns + n * (v_tiles if tile.d_block_size < d else 1))
            yield [
                *label,
                kernel.removeprefix("fused_linear_cross_entropy_"),
                f"{cycles / 1e6:.2f}",
                f"{ideal / 1e6:.2f}",
                f"{ideal / cycles:.0%}",
                f"{(schedule.spills + schedule.fills) / cycles:.2f}",
                schedule.limit,
                f"{bytes_read / core.hbm / 1e6:.1f} / {cycles / core.ghz / 1e6:.1f}",
                extra,
            ]
    with tempfile.TemporaryDirectory() as directory:
        if dumped(generation, shape, "product", directory) is None:
            return
        schedule, ideal = largest(pathlib.Path(directory), "-"), n * d * v / core.macs
        cycles = max(schedule.product_cycles, ideal) + schedule.other_cycles
        yield [
            *label,
            "XLA's product",
            f"{cycles / 1e6:.2f}",
            f"{ideal / 1e6:.2f}",
            f"{ideal / cycles:.0%}",
            f"{(schedule.spills + schedule.fills) / cycles:.2f}",
            schedule.limit,
            f"– / {cycles / core.ghz / 1e6:.1f}",
            "–",
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    cases = [f"{generation}:{shape}" for shape in HEADS for generation in CORES]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_program(*args.compile)
        return
    import importlib.metadata

    from benchmarks._measure import save, table

    header = ["core", "(N, D, V), bf16", "kernel", "10⁶ cycles", "10⁶ ideal", "MXU-bound"]
    header += ["spills + fills a cycle", "most used unit", "HBM / schedule ms", "program's temporary MiB"]
    version = importlib.metadata.version("libtpu")
    title = f"# Compiler schedules, not measurements\n\nBy libtpu {version}; no TPU was there. MXU-bound 100 %: "
    title += (
        "schedule is shorter than the published peak allows, and waiting for the units, which it leaves out, decides. "
        f"In brackets: with {SMALL_TILES}=false."
    )
    lines = []
    for case in args.cases:  # some minutes each: what is done is saved
        lines += rows(*case.split(":"))
        save("tpu_schedule", title + "\n\n" + table(header, lines))


if __name__ == "__main__":
    main()
