"""What a program that XLA has compiled for several devices sends and multiplies, with its loops multiplied out."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from benchmarks._tpu_program import Instruction, _computations, shapes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s4": 1 / 2, "bf16": 2, "f16": 2, "s16": 2, "s32": 4, "u32": 4, "f32": 4}
_CALLED = ("calls", "to_apply", "body", "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program, as often as its loops run it."""

    kind: str  # one of `KINDS`
    devices: int  # how many take part
    bytes: int  # of the whole: what an all-gather makes, a reduce-scatter takes, an all-reduce sums
    largest: int  # elements of the largest array in it
    runs: int  # how often a step runs it
    source: str  # the operation of the model that it stands for

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, as rings and trees of the least traffic do."""
        once = self.bytes * (self.devices - 1) / self.devices
        return self.runs * once * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised program's text, of those between one device and itself none."""
    result = []
    for instruction, types, runs in _walk(text):
        kind = instruction.opcode.removesuffix("-start")
        devices = _devices(instruction)
        if kind not in KINDS or devices == 1:
            continue
        taken = "".join(types.get(name, "") for name in instruction.operands)
        made = instruction.type
        if kind == "all-gather" and instruction.opcode.endswith("-start"):  # its type holds what it takes, too
            whole, largest = _bytes(made) - _bytes(taken), _largest(made)
        else:
            whole = _bytes(made) if kind == "all-gather" else _bytes(taken) or _bytes(made)
            largest = max(_largest(made), _largest(taken))
        source = re.search(r'op_name="([^"]*)"', instruction.attributes)
        result.append(Collective(kind, devices, int(whole), largest, runs, source[1] if source else ""))
    return result


def product_flops(text: str) -> int:
    """Floating-point operations of a device's matrix products in a step: two for each multiply-add.

    Products inside of kernels are not seen: compile for CPUs, which have none.
    """
    total = 0
    for instruction, types, runs in _walk(text):
        if instruction.opcode != "dot":
            continue
        (left,), (out,) = shapes(types[instruction.operands[0]]), shapes(instruction.type)
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = map(int, filter(None, contracted[1].split(","))) if contracted else ()
        total += 2 * runs * math.prod(out) * math.prod(left[dim] for dim in dims)
    return total


def by_kind(found: list[Collective], layers: int) -> list[list[str]]:
    """Rows of a table: kind, devices, how often a layer or the rest of a step runs it, and the MiB a device sends.

    Collectives of one kind and size are a layer's as often as there are `layers` of them: the compiler unrolls loops
    and takes passes out of them, so that a loop's count alone does not tell.
    """
    alike: dict[tuple[str, int, int], int] = collections.Counter()
    for each in found:
        alike[each.kind, each.devices, each.bytes] += each.runs
    rows: dict[tuple[bool, str, int], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for (kind, devices, size), runs in alike.items():
        of_layer, left = divmod(runs, layers)
        for in_layer, times in ((True, of_layer), (False, left)):
            row = rows[in_layer, kind, devices]
            row[0] += times
            row[1] += Collective(kind, devices, size, 0, times, "").sent / 2**20
    told = sorted((key, row) for key, row in rows.items() if row[0])
    return [
        ["a layer" if in_layer else "the rest", kind, str(devices), str(times), f"{sent:.1f}"]
        for (in_layer, kind, devices), (times, sent) in reversed(told)
    ]


def _walk(text: str) -> Iterator[tuple[Instruction, dict[str, str], int]]:
    """Every instruction, the types of its computation's, and how often it runs."""
    computations = _computations(text)

    def of(name: str, runs: int) -> Iterator[tuple[Instruction, dict[str, str], int]]:
        instructions = computations.get(name, [])
        types = {i.name: i.type for i in instructions}
        for i in instructions:
            yield i, types, runs
            if i.opcode in ("reduce", "scatter", "sort", "map", "select-and-scatter", *KINDS, "all-reduce-start"):
                continue  # what they call is of single numbers
            times = runs * (_trips(i, computations) if i.opcode == "while" else 1)
            called = [found[1] for key in _CALLED if (found := re.search(rf"\b{key}=%([\w.-]+)", i.attributes))]
            if branches := re.search(r"branch_computations=\{([^}]*)\}", i.attributes):
                called += re.findall(r"%([\w.-]+)", branches[1])[:1]  # one of them runs
            for each in called:
                yield from of(each, times)

    yield from of("", 1)


def _trips(loop: Instruction, computations: dict[str, list[Instruction]]) -> int:
    """How often a loop's body runs, by the compiler's note or else by the bound that its condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known[1])
    condition = re.search(r"condition=%([\w.-]+)", loop.attributes)
    body = computations.get(condition[1], []) if condition else []
    limits = [int(i.arguments[1:-1]) for i in body if i.opcode == "constant" and i.arguments[1:-1].isdecimal()]
    return max(limits, default=1)


def _devices(instruction: Instruction) -> int:
    """The devices of a collective's groups, which are listed, counted, or named by a mesh's axes."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", instruction.attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=@?mesh(.*?) \{([^}]*)\}", instruction.attributes):
        sizes = {name: int(size) for name, size in re.findall(r"(\w+)'?=(\d+)", found[1])}
        # A part of an axis is "name:(devices outside of the part)devices in it".
        axes = [axis.replace("'", "") for axis in found[2].split(",")]
        return math.prod(int(axis.split(")")[-1]) if ":" in axis else sizes[axis] for axis in axes)
    return 2 if "source_target_pairs" in instruction.attributes else 1


def _bytes(types: str) -> float:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    return sum(_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)


def _largest(types: str) -> int:
    return max((math.prod(shape) for shape in shapes(types)), default=0)
