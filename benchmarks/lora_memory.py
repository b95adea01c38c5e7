"""What fits on 16, 24 and 80 GB: training all weights, adapters, and adapters beside nf4 weights, at four sizes.

    python -m benchmarks.lora_memory [--models qwen2-0.5b …] [--cards t4 …] [--estimate] [--workers 2]

One sequence of 2,048 tokens, AdamW, the fused loss and `remat="full"`. All weights are trained in float32, as the
planner does by default. Adapters have rank 16, and stand beside bfloat16 weights, or nf4 ones. Every step is compiled
for the card, which need not be there, and stands beside the planner's estimate. Nothing is run. Figures are kept in
`results/lora_memory.json`; what is there is not made again. With `--estimate` nothing more is compiled.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax

from benchmarks import _measure
from benchmarks._memory import GIB, Figures, estimated, gib, in_threads, run_of

NAME = "lora_memory"
MODELS = ("qwen2-0.5b", "llama-3.2-1b", "llama-3-8b", "qwen2.5-14b")
CARDS = {"t4": "16 GB (T4)", "l4": "24 GB (L4)", "h100": "80 GB (H100)"}
ADAPTERS = dict(lora=16, param_dtype="bfloat16")
WAYS: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": ADAPTERS, "QLoRA": ADAPTERS | dict(quantize="nf4")}


def spec_of(model: str, way: str, card: str) -> dict[str, Any]:
    """The arguments of a cell's run."""
    return dict(model=model, batch=1, seq=2048, device=card) | WAYS[way]


def cell(figures: Figures, spec: dict[str, Any]) -> str:
    """What the compiler says, or else ≈ the estimate, and whether the card's process can have that much."""
    figure = figures.compiled(spec)
    is_compiled = bool(figure) and "total" in figure
    total = figure["total"] if is_compiled else estimated(spec).total
    too_much = "" if total <= run_of(spec).target.capacity_bytes else ", too much"
    return ("" if is_compiled else "≈ ") + gib(total) + too_much


def table(figures: Figures, models: list[str], cards: list[str]) -> str:
    """A line for each model and way."""
    lines = []
    for model in models:
        for way in WAYS:
            specs = [spec_of(model, way, card) for card in cards]
            pairs = [(figures.compiled(spec), estimated(spec).total) for spec in specs]
            ratios = [f"{total / figure['total']:.2f}" for figure, total in pairs if figure and "total" in figure]
            lines.append([model, way, *(cell(figures, spec) for spec in specs), ", ".join(ratios)])
    return _measure.table(["model", "trained", *(CARDS[card] for card in cards), "estimates / compiled"], lines)


def report(figures: Figures, models: list[str], cards: list[str], folder: pathlib.Path | None) -> None:
    command = " ".join(["python -m benchmarks.lora_memory", *sys.argv[1:]])
    room = ", ".join(
        f"{run_of(spec_of(models[0], 'LoRA', card)).target.capacity_bytes / GIB:.1f} GiB of {CARDS[card]}"
        for card in cards
    )
    text = (
        f"`{command}`; figures of: {figures.stamps()}\n\n1 × 2,048 tokens, AdamW, fused loss, remat full; adapters of "
        f"rank 16. GiB by the compiler for each card, or ≈ by the planner's estimate; nothing "
        f"was run. A process can have {room}.\n\n"
    )
    _measure.save(NAME, text + table(figures, models, cards), folder or _measure.RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_memory")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--estimate", action="store_true", help="compile nothing more")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--folder", type=pathlib.Path, help="of figures and table")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    figures = Figures(NAME, options.folder)
    specs = [spec_of(*of) for of in ((m, w, c) for m in options.models for w in WAYS for c in options.cards)]
    if not options.estimate:
        in_threads(figures.compile, specs, options.workers)
    report(figures, options.models, options.cards, options.folder)


if __name__ == "__main__":
    main()
