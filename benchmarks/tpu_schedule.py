"""The TPU compiler's final schedule of the fused loss's kernels, read without a TPU.

    python -m benchmarks.tpu_schedule [--cases v6e:llama-3-8b-head v5p:gemma-2-2b-head]

libtpu writes each operation as bundles of instructions, one a cycle, and how many slots of each unit a bundle uses.
Bundles × trip counts are cycles without stalls. An operation's counted time is the longest of three: its cycles, what
its products take at the published peak, and what its arrays take at HBM's bandwidth. A program's is the sum over its
operations, loops included. What is left out: guarded code with neither products nor exponentials (what runs at a row
tile's first and last step, and copies of windows inside VMEM), and copies that run beside other operations.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks._shapes import HEADS
from benchmarks._tpu_program import Operation, hbm_bytes, operations, shapes
from liger_jax.pallas_kernels.devices import TPU, TPUS

# An option of tpu7x's compiler: by default it copies 16-bit arrays that a loop reads, such as the weight, into tiles of
# 16 rows.
SMALL_TILES = "xla_tpu_control_large_2nd_minor_layout_for_x16"
FINAL_SCHEDULE = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_.*"  # of some 70 passes
KERNELS = ("fused_linear_cross_entropy_statistics", "fused_linear_cross_entropy_logit_gradients")


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


@dataclasses.dataclass(frozen=True)
class Count:
    """An operation that was counted: its schedule, if it was written, and what one core takes for one run."""

    operation: Operation
    schedule: Schedule | None
    ideal_cycles: float
    cycles: float
    hbm_ns: float

    def ms(self, core: TPU) -> float:
        return self.operation.runs * max(self.cycles / core.ghz, self.hbm_ns) / 1e6


def _schedule_of(directory: pathlib.Path, name: str, tiles: int, steps: int) -> Schedule | None:
    """The schedule of the operation of this name; XLA writes none for one that equals another."""
    paths = [p for p in directory.glob(f"*-{name}-[0-9]*-final_bundles.txt") if "schedule-an" not in p.name]
    if not paths:
        return None
    kernel = re.sub(r"-\d+-final_bundles.txt$", "", paths[0].name)
    (slots,) = directory.glob(f"{kernel}-[0-9]*-final_hlo-static-per-bundle-utilization.txt")
    return read_schedule(paths[0], slots, tiles, steps)


def _counted(directory: pathlib.Path, operation: Operation, core: TPU, d: int) -> Count:
    """The count of an operation. For our kernels it knows the grid, and that each row tile reads the whole weight."""
    from liger_jax.pallas_kernels.fused_linear_cross_entropy import config
    from liger_jax.pallas_kernels.tiles import cdiv

    name, macs, moved, tiles, steps = operation.instruction.name, operation.macs, operation.hbm_bytes, 0, 0
    hidden = next((s for t in operation.operand_types for s in shapes(t) if len(s) == 2 and s[1] == d), None)
    if any(kernel in name for kernel in KERNELS):
        n = max(s[0] for s in shapes(operation.instruction.type))
        if KERNELS[0] in name:
            columns = max(s[0] for t in operation.operand_types for s in shapes(t) if len(s) == 2 and s[1] == d)
        else:
            columns = shapes(operation.instruction.type)[0][1]
        is_fast = hidden is None or (n, columns) in shapes(operation.instruction.type)[:1] and KERNELS[0] in name
        tile = config.tpu_config(n, columns, d, 2, core.vmem_bytes, keeps_maxima=is_fast)
        n_tiles, v_tiles, d_tiles = (
            cdiv(size, block)
            for size, block in ((n, tile.n_block_size), (columns, tile.v_block_size), (d, tile.d_block_size))
        )
        tiles = n_tiles * v_tiles // core.cores
        steps = tiles * d_tiles if hidden else tiles
        if hidden:  # a tile of hidden is read once a row tile, or once a tile of both where d is split
            macs = n * columns * d
            reads = n_tiles * columns + n * (v_tiles if d_tiles > 1 else 1)
            moved = 2 * d * reads + hbm_bytes(operation.instruction.type)
    if "_empty_" in name:  # it is reserved, and not written
        moved = 0
    schedule = _schedule_of(directory, name, tiles, steps)
    ideal = macs / core.macs / core.cores
    busy = max(schedule.product_cycles, ideal) + schedule.other_cycles if schedule else ideal
    return Count(operation, schedule, ideal, busy, moved / (core.bandwidth / 1e9) / core.cores)


def function_of(what: str):
    """The loss of hidden (N, D), weight (V, D) and labels that is compiled, and its gradients."""
    import jax
    import jax.numpy as jnp

    from liger_jax import fused_linear_cross_entropy

    def plain(h, w, y):
        z = jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return jnp.mean(jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, y[:, None], axis=1)[:, 0])

    def peer(h, w, y):
        from tokamax import config, linear_softmax_cross_entropy_loss  # pyright: ignore[reportMissingImports]

        config.cross_compile(True).__enter__()  # for good: its backward asks again whether a TPU is there
        return linear_softmax_cross_entropy_loss(h, y, w.T, reduction="mean", implementation="mosaic_tpu")

    def ours(h, w, y):
        implementation, mode = what.split()
        return fused_linear_cross_entropy(h, w, y, mode=mode, implementation=implementation)

    loss = {"plain float32 logits": plain, "tokamax": peer}.get(what, ours)
    return jax.value_and_grad(loss, (0, 1))


def compile_program(generation: str, shape: str, what: str, in_small_tiles: str, text_path: str) -> None:
    """Compiles and prints the temporary bytes; run in a process of its own, since libtpu reads its settings once."""
    from tests.aot.targets import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    import jax.numpy as jnp

    from liger_jax.planner.compilers import compile_for, tpu_devices

    n, d, v = HEADS[shape]
    arguments = (((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32))
    options = {SMALL_TILES: "false"} if in_small_tiles == "yes" else None
    device = tpu_devices(generation)[0]
    compiled = compile_for(function_of(what), arguments, device, "tpu", options)
    pathlib.Path(text_path).write_text(compiled.as_text())
    print(json.dumps({"temporary": compiled.memory_analysis().temp_size_in_bytes}))


def dumped(generation: str, shape: str, what: str, in_small_tiles: bool, directory: str) -> int | None:
    """Compiles with text and schedules written to `directory`. Returns the temporary bytes, or None if it fails."""
    command = [sys.executable, "-m", "benchmarks.tpu_schedule", "--compile", generation, shape, what]
    command += ["yes" if in_small_tiles else "no", f"{directory}/program.txt"]
    flags = f"--xla_jf_dump_to={directory} {FINAL_SCHEDULE}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])["temporary"]


def programs() -> list[str]:
    import importlib.util

    ours = ["plain float32 logits", "xla fast", "mosaic_tpu fast", "xla lean", "mosaic_tpu lean"]
    return [*ours, "tokamax"] if importlib.util.find_spec("tokamax") else ours


def rows(generation: str, shape: str, what: str) -> tuple[list[str], list[list[str]]]:
    """The program's row, and a row for each of its operations with a product or more than 2 % of the time."""
    (n, d, v), core = HEADS[shape], TPUS[generation]
    label = [generation, f"{shape} {HEADS[shape]}", what]
    in_small_tiles = generation == "tpu7x"
    with tempfile.TemporaryDirectory() as directory:
        temporary = dumped(generation, shape, what, in_small_tiles, directory)
        if temporary is None:
            return [*label, "does not compile", "–", "–", "–"], []
        text = (pathlib.Path(directory) / "program.txt").read_text()
        counts = [_counted(pathlib.Path(directory), operation, core, d) for operation in operations(text)]
    total = sum(count.ms(core) for count in counts)
    product = n * d * v / core.macs / core.cores / core.ghz / 1e6
    details = []
    for count in counts:
        if count.ms(core) < 0.02 * total or count.schedule is None:
            continue
        schedule, hbm_ms = count.schedule, count.operation.runs * count.hbm_ns / 1e6
        spilled = (schedule.spills + schedule.fills) / max(count.cycles, 1)
        details.append([
            *label,
            f"{count.operation.runs} × {count.operation.instruction.name}",
            f"{count.ms(core):.2f}",
            f"{count.operation.runs * count.cycles / core.ghz / 1e6:.2f} / {hbm_ms:.2f}",
            f"{count.ideal_cycles / count.cycles:.0%}" if count.ideal_cycles else "–",
            f"{spilled:.2f}",
            schedule.limit,
        ])  # fmt: skip
    row = [*label, f"{total:.1f}", f"{total / product:.2f}", f"{3 * product:.1f}", f"{temporary / 2**20:.0f}"]
    return row, details


def main() -> None:
    parser = argparse.ArgumentParser()
    cases = [f"{generation}:{shape}" for shape in HEADS for generation in TPUS]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--programs", nargs="+", default=programs())
    parser.add_argument("--compile", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_program(*args.compile)
        return
    import importlib.metadata

    from benchmarks._measure import save, table

    label = ["core", "(N, D, V), bf16", "program"]
    header = [*label, "counted ms", "× one product", "three products ms", "temporary MiB"]
    details_header = [*label, "operation", "counted ms", "schedule / HBM ms", "MXU-bound", "spills + fills a cycle"]
    details_header += ["most used unit"]
    version = importlib.metadata.version("libtpu")
    title = (
        f"# Counted from the compiler's schedules, not measured\n\nBy libtpu {version}; no TPU was there. A program "
    )
    title += "is the loss and both gradients. MXU-bound 100 %: the schedule is shorter than the published peak allows, "
    title += f"and waiting for the units, which it leaves out, decides. tpu7x: with {SMALL_TILES}=false."
    lines, details = [], []
    for case in args.cases:
        target, shape = case.split(":")
        for what in args.programs:  # a minute each: what is done is saved
            row, of_operations = rows(target, shape, what)
            print(" | ".join(row), flush=True)
            lines.append(row)
            details += of_operations
            tables = table(header, lines) + "\n\n## Their operations\n\n" + table(details_header, details)
            save("tpu_schedule", title + "\n\n" + tables)


if __name__ == "__main__":
    main()
