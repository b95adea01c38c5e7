"""Where a training step's memory goes: from small models to sharded ones, and as batch and length grow.

    python -m benchmarks.memory_split [--only scale flat] [--estimates]

"scale": static memory, dynamic memory and the loss's part of four models, one sequence of 4,096 tokens on each device
and several. "flat": one model, the whole step and the loss by itself, against batch and against length. Bars and lines
are estimates; diamonds and circles are compiled for H200s that are not there. The loss by itself is its value and
gradients, compiled alone: what it needs beside hidden states, head and their gradients. Figures are kept in
`results/memory_split.json`; what is there is not made again.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks._memory import COLORS, Figure, Figures, both, draw, estimated, gib, named, run_of, stamp
from liger_jax import fused_linear_cross_entropy
from liger_jax.models.core import plain
from liger_jax.models.core.head import head_logits
from liger_jax.planner.compilers import compile_for, devices
from liger_jax.planner.devices import GIB

NAME = "memory_split"
SCALE = (("qwen2-0.5b", "h200"), ("llama-3.2-1b", "h200"), ("llama-3-8b", "h200:8"), ("qwen2.5-14b", "h200:8"))
SCALE_SEQ, EACH = 4096, (1, 4, 16)  # sequences on each device, in the order in which they are compiled
FLAT_MODEL, FLAT_SEQ, FLAT_BATCH = "qwen2-0.5b", 2048, 8
BATCHES, SEQS = (1, 2, 8, 32), (512, 2048, 8192)


def scale_spec(model: str, where: str, each: int) -> dict[str, Any]:
    count = int(where.partition(":")[2] or 1)
    return dict(model=model, batch=each * count, seq=SCALE_SEQ, device=where)


def flat_specs(axis: str) -> dict[int, dict[str, Any]]:
    """Runs by their batch or their length."""
    spec = lambda batch, seq: dict(model=FLAT_MODEL, batch=batch, seq=seq, device="h200")
    if axis == "batch":
        return {batch: spec(batch, FLAT_SEQ) for batch in BATCHES}
    return {seq: spec(FLAT_BATCH, seq) for seq in SEQS}


def loss_alone(spec: dict[str, Any]) -> dict[str, Any]:
    """What value and gradients of the loss need for themselves, by the compiler."""
    jax.config.update("jax_platforms", "cpu")
    run = run_of(spec)
    config = run.model.config

    def loss(hidden, weight, labels):
        if run.loss == "fused":
            return fused_linear_cross_entropy(hidden, weight, labels)
        return plain.cross_entropy(head_logits(hidden, weight), labels, None, -100, "mean")[0]

    hidden = (run.batch, run.seq, config.hidden_size), run.dtype
    weight = (config.vocab_size, config.hidden_size), run.param_dtype
    types = [hidden, weight, ((run.batch, run.seq), jnp.int32)]
    (device,) = devices(run.target)
    program = compile_for(jax.value_and_grad(loss, (0, 1)), types, device, run.target.platform)
    return dict(total=program.memory_analysis().temp_size_in_bytes, **stamp())


def alone(figures: Figures, spec: dict[str, Any]) -> Any:
    return figures[f"loss alone, {named(spec)}"]


# --- scale ------------------------------------------------------------------------------------------------------------


def split(spec: dict[str, Any]) -> dict[str, int]:
    """The estimate in three parts that live at its peak."""
    found = estimated(spec)
    loss = found.parts["loss"]
    return {"static": found.static, "dynamic": found.total - found.static - loss, "loss": loss}


def scale_lines(figures: Figures) -> list[list[str]]:
    lines = []
    for model, where in SCALE:
        for each in sorted(EACH):
            runs = both(scale_spec(model, where, each))
            compiled = {loss: figures.compiled(spec) for loss, spec in runs.items()}
            totals = {loss: sum(split(spec).values()) for loss, spec in runs.items()}
            for loss, spec in runs.items():
                line = [model, where, f"{each} × {SCALE_SEQ}", loss, *map(gib, split(spec).values()), gib(totals[loss])]
                known = all(figure and "total" in figure for figure in compiled.values())
                needed = {name: figure["total"] for name, figure in compiled.items()} if known else totals
                saved = f"{1 - needed['fused'] / needed['logits']:.0%}" + ("" if known else " (estimate)")
                lines.append([*line, gib(compiled[loss]), saved if loss == "fused" else ""])
    return lines


def scale_picture(figures: Figures) -> Figure:
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    shades = {"static": "#7f7f7f", "dynamic": "#70ad47", "loss": "#c00000"}
    for axes, (model, where) in zip(figure.subplots(1, len(SCALE)), SCALE, strict=True):
        for place, each in enumerate(sorted(EACH)):
            for (loss, spec), shift in zip(both(scale_spec(model, where, each)).items(), (-0.2, 0.2), strict=True):
                bottom, first = 0.0, not place and loss == "logits"
                for part, size in split(spec).items():
                    label = part if first else None
                    axes.bar(place + shift, size / GIB, 0.36, bottom=bottom, color=shades[part], label=label)
                    bottom += size / GIB
                top = bottom
                if (found := figures.compiled(spec)) and "total" in found:
                    axes.plot(place + shift, found["total"] / GIB, "kD", ms=4, label="compiled" if first else None)
                    top = max(bottom, found["total"] / GIB)
                above = dict(xytext=(0, 4), textcoords="offset points", ha="center", va="bottom")  # the diamond
                axes.annotate(loss, (place + shift, top), fontsize=6, rotation=90, **above)
        axes.set_title(f"{model}, {where}")
        axes.set_xticks(range(len(EACH)), map(str, sorted(EACH)))
        axes.margins(y=0.15)
    figure.supxlabel(f"sequences of {SCALE_SEQ:,} tokens on each device", fontsize=9)
    figure.axes[0].set_ylabel("GiB on each device, estimate")
    figure.axes[0].legend(fontsize=8)
    return figure


# --- flat -------------------------------------------------------------------------------------------------------------


def flat_lines(figures: Figures) -> list[list[str]]:
    lines = []
    for spec in {named(spec): spec for axis in ("batch", "seq") for spec in flat_specs(axis).values()}.values():
        line = [f"{spec['batch']} × {spec['seq']}"]
        for run in both(spec).values():
            line += [gib(estimated(run).total), gib(figures.compiled(run)), gib(alone(figures, run))]
        lines.append(line)
    return lines


def flat_picture(figures: Figures) -> Figure:
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    fixed = {"batch": f"sequences of {FLAT_SEQ:,} tokens", "seq": f"tokens in each of {FLAT_BATCH} sequences"}
    for axes, (axis, label) in zip(figure.subplots(1, 2), fixed.items(), strict=True):
        for loss in COLORS:
            runs = {size: spec | {"loss": loss} for size, spec in flat_specs(axis).items()}
            axes.plot(
                list(runs), [estimated(s).total / GIB for s in runs.values()], color=COLORS[loss], label=f"step, {loss}"
            )
            for style, of, name in (("o", figures.compiled, None), ("s--", lambda s: alone(figures, s), "loss alone")):
                found = {size: of(spec) for size, spec in runs.items() if "total" in (of(spec) or {})}
                axes.plot(
                    list(found),
                    [kept["total"] / GIB for kept in found.values()],
                    style,
                    color=COLORS[loss],
                    label=name and f"{name}, {loss}",
                )
        axes.set(xlabel=label, ylim=(0, None))
        axes.set_xticks(list(flat_specs(axis)), map(str, flat_specs(axis)))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("GiB")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"{FLAT_MODEL}, one H200, AdamW, remat full; lines of steps are estimates", fontsize=9)
    return figure


# --- the command ------------------------------------------------------------------------------------------------------


def report(figures: Figures, folder: pathlib.Path | None) -> None:
    command = " ".join(["python -m benchmarks.memory_split", *sys.argv[1:]])
    text = f"`{command}`; figures of: {figures.stamps()}\n\nAdamW in float32, bfloat16 computation, remat full.\n"
    header = ["model", "devices", "each device", "loss", "static", "dynamic", "the loss's", "estimate", "compiled"]
    text += "\nGiB on each device at the step's peak; the first four figures are estimates.\n\n"
    text += _measure.table([*header, "fused saves"], scale_lines(figures))
    header = ["batch × length"]
    for loss in COLORS:
        header += [f"{loss}: estimate", "compiled", "the loss alone, compiled"]
    text += f"\n{FLAT_MODEL} on one H200, GiB:\n\n" + _measure.table(header, flat_lines(figures))
    _measure.save(NAME, text, folder or _measure.RESULTS)
    draw(scale_picture, figures, "memory_scale", folder)
    draw(flat_picture, figures, "memory_flat", folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_split")
    parser.add_argument("--only", nargs="+", choices=("scale", "flat"), default=("flat", "scale"))
    parser.add_argument("--estimates", action="store_true", help="compile nothing that is not kept")
    parser.add_argument("--folder", type=pathlib.Path, help="of figures, table and pictures")
    options = parser.parse_args()
    figures = Figures(NAME, options.folder)
    if "flat" in options.only and not options.estimates:
        runs = [run for axis in ("batch", "seq") for spec in flat_specs(axis).values() for run in both(spec).values()]
        for run in runs:
            figures.make(f"loss alone, {named(run)}", loss_alone, run)
        for run in runs:
            figures.compile(run)
    if "scale" in options.only and not options.estimates:
        for each in EACH:
            for model, where in SCALE:
                for run in both(scale_spec(model, where, each)).values():
                    figures.compile(run)
    report(figures, options.folder)


if __name__ == "__main__":
    main()
