"""The longest row that a card trains: by compiling the step for cards that need not be there.

    python -m benchmarks.longest_row [--cells 8b:qlora:16 70b:qlora:80 …]

A cell is a model, what is trained, and a card's memory in GB. A step has one row, layers' inputs in the host's memory
(`remat="offload"`), and AdamW. Adapters have rank 32 on all seven projections; full weights are bfloat16, and their
moments lie in the host's memory, too. The capacity is what a process gets of the card by the planner. The planner's
estimate says where to begin, and the compiler's figures where to go on, until what is left is less than a hundredth of
what the row takes, or the next length does not fit. Figures are kept in `results/longest_row.json`; what is there is
not made again.
"""

import argparse
import dataclasses
from typing import Any

import jax

from benchmarks import _measure
from benchmarks._memory import GIB, Figures, draw, gib, stamp
from liger_jax.models.core.stretched import MOST_POSITIONS, stretched
from liger_jax.planner.compilers import compile_run
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run

NAME = "longest_row"
UNIT = 1024  # lengths are multiples of it
MOST_COMPILES = 6
MODELS = {"8b": "llama-3.1-8b", "70b": "llama-3.3-70b"}
CARDS = {12: "rtx3060", 16: "rtx4080", 24: "rtx4090", 40: "a100-40g", 48: "rtx-a6000", 80: "h100"}
TRAINED: dict[str, dict[str, Any]] = {
    "qlora": dict(lora=32, quantize="nf4"),
    "lora": dict(lora=32),
    "full": dict(param_dtype="bfloat16", state_memory="host"),
}
CELLS = [f"8b:{kind}:{memory}" for kind, least in (("qlora", 12), ("lora", 24), ("full", 48)) for memory in CARDS
         if memory >= least] + ["70b:qlora:48", "70b:qlora:80"]  # fmt: skip
# Unsloth's table of its longest rows, with Hugging Face's and FlashAttention 2's beside them: 4-bit QLoRA of rank 32 on
# all seven projections, batch 1.
PUBLISHED = {
    "8b:qlora:12": (21_848, None), "8b:qlora:16": (40_724, 2_551), "8b:qlora:24": (78_475, 5_789),
    "8b:qlora:40": (153_977, None), "8b:qlora:48": (191_728, 15_502), "8b:qlora:80": (342_733, 28_454),
    "70b:qlora:48": (12_106, None), "70b:qlora:80": (89_389, 6_916),
}  # fmt: skip
PICTURED = [2**power for power in range(14, 20)]  # lengths
PEER = {16_384: 22.51, 32_768: 29.52, 65_536: 43.55, 98_304: 57.59}  # Hugging Face's peaks, of results/long_step.md


STATE_ON_HOST = {"70b:qlora:48"}  # beside which the moments of adapters would leave no room for rows


def run_of(cell: str, seq: int) -> Run:
    """The run of a cell with one row of so many tokens."""
    model, kind, memory = cell.split(":")
    options = TRAINED[kind] | (dict(state_memory="host") if cell in STATE_ON_HOST else {})
    run = make_run(MODELS[model], batch=1, seq=UNIT, device=CARDS[int(memory)], remat="offload", **options)
    config = stretched(run.model.config, MOST_POSITIONS, "llama3")
    return dataclasses.replace(run, model=dataclasses.replace(run.model, config=config), seq=seq)


# --- in a process of its own ------------------------------------------------------------------------------------------


def longest(cell: str) -> dict[str, Any]:
    """The longest row that fits, its memory, and the bytes of all lengths that were compiled."""
    jax.config.update("jax_platforms", "cpu")
    capacity = run_of(cell, UNIT).target.capacity_bytes
    needed = lambda n: estimate(run_of(cell, n * UNIT)).total
    answers: dict[int, int] = {}
    n, fitting, failing = 1, 0, MOST_POSITIONS // UNIT
    while n * 2 < failing and needed(2 * n) <= capacity:
        n *= 2
    a_unit = (needed(2 * n) - needed(n)) / n  # bytes
    n = max(1, n + int((capacity - needed(n)) / a_unit))
    while fitting < n < failing and len(answers) < MOST_COMPILES:
        answers[n * UNIT] = compile_run(run_of(cell, n * UNIT)).total
        room = capacity - answers[n * UNIT]
        fitting, failing = (max(n, fitting), failing) if room >= 0 else (fitting, min(n, failing))
        if 0 <= room < 0.01 * a_unit * n:
            break
        # Rounded down, with a thousandth to spare, so that the next length fits.
        n = min(n + int(room / a_unit - 0.001 * n), failing - 1) if room >= 0 else n - 1 + int(room / a_unit)
        n = max(n, fitting + 1)
    figure = dict(capacity=capacity, answers=answers, **stamp())
    if not fitting:
        return figure | dict(length=0)
    length = fitting * UNIT
    return figure | dict(length=length, total=answers[length], host=estimate(run_of(cell, length)).host)


def compiled(cell: str, seq: int) -> dict[str, Any]:
    """The memory of a row of so many tokens."""
    jax.config.update("jax_platforms", "cpu")
    run = run_of(cell, seq)
    return dict(total=compile_run(run).total, host=estimate(run).host, **stamp())


# --- the command ------------------------------------------------------------------------------------------------------


def report(figures: Figures) -> str:
    """The table."""
    rows = []
    for cell in CELLS:
        if (figure := figures[cell]) is None or "failure" in figure:
            continue
        model, kind, memory = cell.split(":")
        ours, (unsloth, other) = figure["length"], PUBLISHED.get(cell, (None, None))
        number = lambda n: "–" if n is None else f"{n:,}"
        times = "–" if unsloth is None else f"{ours / unsloth:.2f}"
        held = [gib(figure["total"], 1), gib(figure["host"], 1)] if ours else ["–", "–"]
        beside = ", state on the host" if cell in STATE_ON_HOST else ""
        what = [f"Llama {model.upper()}, {NAMES[kind]}{beside}", f"{memory} GB ({CARDS[int(memory)]})"]
        rows.append(
            [
                *what,
                gib(figure["capacity"], 1),
                f"**{ours:,}**" if ours else "not 1,024",
                *held,
                number(unsloth),
                times,
                number(other),
            ]
        )
    header = ["what is trained", "card", "a process gets, GiB", "longest row", "compiled, GiB", "host, GiB"]
    header += ["Unsloth", "×", "Hugging Face + FA2"]
    text = f"`python -m benchmarks.longest_row`; figures of: {figures.stamps()}\n\n{ABOUT}\n"
    return text + _measure.table(header, rows)


NAMES = {"qlora": "QLoRA", "lora": "LoRA", "full": "all weights in bfloat16"}
ABOUT = """All of ours is compiled for these cards, and nothing of it was run here. A step has one row, AdamW, and
layers' inputs in the host's pinned memory; adapters have rank 32 on all seven projections, beside nf4 or bfloat16
weights. What a process gets is a card's memory less CUDA's context and the allocator's reserve, as `liger-jax plan`
takes it. "host" is what the host must hold. A length is a multiple of 1,024 tokens: the next one does not fit,
or the room that is left is less than a fiftieth of what a process gets. Attention is compiled as the kernels of this
project; where cuDNN runs in their place, it takes a workspace of its own.

Unsloth's and Hugging Face's lengths are as Unsloth publishes them: Llama 3.1 8B and Llama 3.3 70B, 4-bit QLoRA of rank
32 on all seven projections, batch 1.
"""


def picture(figures: Figures) -> Any:
    """Device and host memory of a step against its length, for QLoRA of an 8B model on an H100."""
    from benchmarks._memory import Figure

    points = [(seq, figure) for seq in PICTURED if (figure := figures[f"8b:qlora:80, seq={seq}"])]
    lengths = [seq / 1024 for seq, _ in points]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(lengths, [point["total"] / GIB for _, point in points], "o-", color="#2e75b6", label="device")
    axes.plot(lengths, [point["host"] / GIB for _, point in points], "s--", color="#7f7f7f", label="host, pinned")
    peer = "Hugging Face + PEFT + Liger, bfloat16 weights, measured on an H200"
    axes.plot([seq / 1024 for seq in PEER], list(PEER.values()), "^-", color="#c55a11", label=peer)
    for memory, name in ((24, "24 GB card"), (48, "48 GB card"), (80, "80 GB card")):
        axes.axhline(figures[f"8b:qlora:{memory}"]["capacity"] / GIB, color="#c0c0c0", linewidth=1)
        axes.text(lengths[0], figures[f"8b:qlora:{memory}"]["capacity"] / GIB + 1, name, fontsize=8)
    axes.set(xlabel="tokens of the row, in units of 1,024", ylabel="GiB")
    axes.set_title("One step of Llama 3.1 8B, QLoRA of rank 32, compiled for an H100", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, metavar="MODEL:TRAINED:GB")
    arguments = parser.parse_args()
    figures = Figures(NAME, None)
    for cell in arguments.cells:
        figures.make(cell, longest, cell)
    for seq in PICTURED:
        figures.make(f"8b:qlora:80, seq={seq}", compiled, "8b:qlora:80", seq)
    _measure.save(NAME, report(figures))
    draw(picture, figures, NAME, None)


if __name__ == "__main__":
    main()
