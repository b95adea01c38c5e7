"""The operations of a program that XLA has compiled for a TPU: how often each runs, its products and its HBM bytes."""

import dataclasses
import math
import re

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
# What moves nothing, and what the compiler hides behind other operations.
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "copy-start",
    "copy-done",
    "slice-start",
    "slice-done",
    "iota",
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = type opcode(arguments), attributes`; operands are the arguments' names."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction that takes time, as often as its loops run it: multiply-adds and HBM bytes of one run."""

    instruction: Instruction
    operand_types: list[str]
    runs: int
    macs: int
    hbm_bytes: int


def shapes(type_text: str) -> list[tuple[int, ...]]:
    """The shapes of the arrays in a type."""
    return [tuple(map(int, sizes.split(","))) if sizes else () for _, sizes, _ in _ARRAY.findall(type_text)]


def hbm_bytes(type_text: str) -> int:
    """The bytes of a type's arrays, without those in VMEM or another small memory."""
    arrays = _ARRAY.findall(type_text)
    in_hbm = [(dtype, sizes) for dtype, sizes, layout in arrays if not re.search(r"S\([1-9]\)", layout)]
    return sum(_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, sizes.split(",")))) for dtype, sizes in in_hbm)


def _closing(text: str, start: int) -> int:
    """The index behind the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%([\w.-]+) = ", line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode, bracket = re.match(r" ([\w-]+)", line[end:]), line.index("(", end)
    behind = _closing(line, bracket)
    return Instruction(match[1], line[start:end], opcode[1] if opcode else "", line[bracket:behind], line[behind:])


def _computations(text: str) -> dict[str, list[Instruction]]:
    """Instructions by computation; the program's entry is ""."""
    computations: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            instructions = computations["" if header[1] else header[2]] = []
        elif computations and (instruction := _instruction(line)):
            instructions.append(instruction)
    return computations


def operations(text: str) -> list[Operation]:
    """The operations of an optimised program's text."""
    computations = _computations(text)

    def called(instruction: Instruction, key: str) -> list[Instruction]:
        name = re.search(key + r"=%([\w.-]+)", instruction.attributes)
        return computations.get(name[1], []) if name else []

    def macs(instructions: list[Instruction]) -> int:
        types, total = {i.name: i.type for i in instructions}, 0
        for i in instructions:
            if i.opcode in ("convolution", "dot"):
                a, b, out = (math.prod(shapes(t)[0]) for t in (types[i.operands[0]], types[i.operands[1]], i.type))
                total += math.isqrt(a * b * out)  # M·K · K·N · M·N
            total += macs(called(i, "calls")) if i.opcode == "fusion" else 0
        return total

    def bytes_read(body: list[Instruction], number: int, whole: int) -> int:
        """The bytes that a fusion reads of a parameter: its slices if it reads only these, and none that it updates."""
        name = next((i.name for i in body if i.opcode == "parameter" and i.arguments == f"({number})"), None)
        total = 0
        for user in (i for i in body if name in i.operands):
            if user.opcode == "fusion":
                total += bytes_read(called(user, "calls"), user.operands.index(name), whole)
            elif user.opcode in ("dynamic-slice", "slice", "gather"):
                total += hbm_bytes(user.type)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                return whole
        return min(total, whole)

    def bytes_written(body: list[Instruction], whole: int) -> int:
        if body and body[-1].opcode == "dynamic-update-slice":
            types = {i.name: i.type for i in body}
            return hbm_bytes(types[body[-1].operands[1]])
        return bytes_written(called(body[-1], "calls"), whole) if body and body[-1].opcode == "fusion" else whole

    def moved_bytes(instruction: Instruction, operand_types: list[str]) -> int:
        body = called(instruction, "calls") if instruction.opcode == "fusion" else []
        read = [bytes_read(body, i, hbm_bytes(t)) if body else hbm_bytes(t) for i, t in enumerate(operand_types)]
        return sum(read) + bytes_written(body, hbm_bytes(instruction.type))

    def walk(instructions: list[Instruction], runs: int):
        types = {i.name: i.type for i in instructions}
        for i in instructions:
            operand_types = [types.get(name, "") for name in i.operands]
            if i.opcode == "while":
                limits = [int(c.arguments[1:-1]) for c in called(i, "condition") if c.opcode == "constant"]
                yield from walk(called(i, "body"), runs * max(limits, default=1))
            elif i.opcode in ("call", "conditional"):
                yield from walk(called(i, "to_apply"), runs)
            elif i.opcode not in _FREE and not (i.opcode == "custom-call" and "tpu_custom_call" not in i.attributes):
                yield Operation(i, operand_types, runs, macs([i]), moved_bytes(i, operand_types))

    return list(walk(computations[""], 1))
