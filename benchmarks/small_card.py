"""A small model on a 16 GB card: what fits, fused and on logits, as predicted and as measured.

    python -m benchmarks.small_card [--cells logits:8x512 fused:512 …] [--workers 8]

Qwen2-0.5B, float32 throughout, AdamW, nothing recomputed: the planner's training step. "fused:8x512" is one step,
"fused:512" the largest batch at that length. Predicted is what compilers say, for a T4 and for an H200 of which a
process may have 15 GiB; it needs no GPU. Where there is one, the same steps are run on it, twice each, with 15 GiB for
each process: the largest batches from what was predicted, in at most three trials. Figures are kept in
`results/small_card.json`; what is there is not made again.
"""

import argparse
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks._memory import COLORS, GIB, Figure, Figures, draw, gib, in_threads, largest_compiled, run_of, stamp
from liger_jax.pallas_kernels.devices import GPUS
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.step import LOSSES, Run, training_step

NAME = "small_card"
CAP_GIB = 15
T4_GIB = 15843721216 / GIB  # all that CUDA counted of one
STEPS = ((2, 128), (8, 256), (8, 512))
LENGTHS = (128, 256, 512, 1024)
CARDS = {"h200": "15 GiB of an H200", "t4": "T4, 14.76 GiB"}
PUBLISHED = """What was published of this model in float32 with PyTorch on a 16 GB card: at 2 × 128 both losses take
10,686 MiB; at 8 × 256 and 8 × 512 the run on logits is out of memory, and the fused one fits.
"""
CELLS = [f"{loss}:{step}" for loss in LOSSES for step in (*(f"{b}x{t}" for b, t in STEPS), *map(str, LENGTHS))]


def spec_of(cell: str, card: str, batch: int | None = None) -> dict[str, Any]:
    """The arguments of a cell's run; `batch` where the cell asks for the largest."""
    loss, _, step = cell.partition(":")
    *own, seq = map(int, step.split("x"))
    memory = T4_GIB if card == "t4" else CAP_GIB
    spec = dict(model="qwen2-0.5b", batch=own[0] if own else batch, seq=seq, device=card, loss=loss)
    return spec | dict(dtype="float32", remat="none", memory_gib=memory)


# --- in a process of its own ------------------------------------------------------------------------------------------


def gpu_there() -> tuple[str, int] | None:
    """The GPU's name in `GPUS` and its bytes, by a process that goes; None if there is none."""
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    os.environ |= {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    names = [name for name, gpu in GPUS.items() if gpu.kind == device.device_kind]
    if not names:
        raise ValueError(
            f"The planner has no {device.device_kind!r}. It has {', '.join(g.kind for g in GPUS.values())}."
        )
    return names[0], 2 * device.memory_stats()["bytes_limit"]


def measured_peak(run: Run) -> int:
    """The most that the allocator of this process's GPU held in two steps."""
    mesh = make_mesh(jax.devices()[: run.target.count], run.mesh)
    step, (state, tokens) = training_step(run, mesh)
    fill = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), (state, tokens)),
        out_shardings=jax.tree.map(lambda x: x.sharding, (state, tokens)),
    )
    with jax.set_mesh(mesh):
        # Compiled before the state is there: trials of kernels then leave no holes in the allocator's memory.
        step = step.lower(state, tokens).compile()
        state, tokens = fill()
        state, _ = step(state, tokens)
        jax.block_until_ready(step(state, tokens))
    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


def measured(spec: dict[str, Any], device_bytes: int) -> dict[str, Any]:
    """The most that the allocator held in two steps, or None where the process' share was not enough."""
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX refuses both names at once
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{min(0.98, CAP_GIB * GIB / device_bytes):.6f}"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"  # one piece of memory, as a card has
    device = jax.devices()[0]
    try:
        peak = measured_peak(run_of(spec))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        peak = None
    limit = device.memory_stats()["bytes_limit"]
    return dict(peak=peak, limit=limit, **stamp(device.device_kind))


# --- the command ------------------------------------------------------------------------------------------------------


def predict(figures: Figures, cell: str, card: str) -> None:
    spec = spec_of(cell, card)
    if spec["batch"] is None:
        figures.make(f"{card}, {cell}", largest_compiled, spec)
    else:
        figures.compile(spec)


def measure(figures: Figures, cell: str, card: str, device_bytes: int) -> None:
    """Measures a step; for a cell that asks for the largest batch, steps around the predicted one."""

    def fits(batch: int) -> bool:
        figure = figures.make(measured_key(cell, batch), measured, spec_of(cell, card, batch), device_bytes)
        return figure.get("peak") is not None

    if (batch := spec_of(cell, card)["batch"]) is not None:
        fits(batch)
        return
    guess = figures[f"{card if card in CARDS else 'h200'}, {cell}"]["batch"]
    further = max(2, guess // 8)
    if fits(guess):
        if fits(guess + 1):
            fits(guess + further)
    elif guess > 1 and not fits(guess - 1) and guess > further:
        fits(guess - further)


def measured_key(cell: str, batch: int) -> str:
    return f"measured, {cell}, batch={batch}"


def trials(figures: Figures, cell: str) -> dict[int, bool]:
    """Batches that were tried, and whether they fitted."""
    prefix = f"measured, {cell}, batch="
    tried = {int(key.removeprefix(prefix)): value for key, value in figures.values.items() if key.startswith(prefix)}
    return {batch: value["peak"] is not None for batch, value in sorted(tried.items()) if "failure" not in value}


def largest_measured(tried: dict[int, bool]) -> tuple[int, str] | None:
    """The largest batch that fitted, and in words how sure it is; None if none did."""
    good = [batch for batch, fits in tried.items() if fits]
    if not good:
        return None
    bad = [batch for batch, fits in tried.items() if not fits and batch > max(good)]
    return max(good), f"{max(good)}" if min(bad, default=0) == max(good) + 1 else f"≥ {max(good)}" + (
        f", < {min(bad)}" if bad else ""
    )


def step_lines(figures: Figures) -> list[list[str]]:
    lines = []
    for batch, seq in STEPS:
        for loss in ("logits", "fused"):
            cell = f"{loss}:{batch}x{seq}"
            line = [f"{batch} × {seq}", loss]
            for card in CARDS:
                spec = spec_of(cell, card)
                figure = figures.compiled(spec)
                fits = figure and "total" in figure and figure["total"] <= run_of(spec).target.capacity_bytes
                line.append(gib(figure) + ("" if figure is None or fits else ", too much"))
            figure = figures[measured_key(cell, batch)]
            out = figure and ("failed" if "failure" in figure else gib(figure["peak"]))
            lines.append([*line, out.replace("–", "out of memory") if out else "–"])
    return lines


def largest_lines(figures: Figures) -> list[list[str]]:
    lines = []
    for seq in LENGTHS:
        for loss in ("logits", "fused"):
            of_cards = [figures[f"{card}, {loss}:{seq}"] for card in CARDS]
            predicted = [f"{f['batch']} ({f['batch'] * seq:,})" if f and "batch" in f else "–" for f in of_cards]
            tried = trials(figures, f"{loss}:{seq}")
            best = largest_measured(tried)
            shown = f"{best[1]} ({best[0] * seq:,})" if best else f"< {min(tried)}" if tried else "–"
            lines.append([str(seq), loss, *predicted, shown])
    return lines


def beside_published(figures: Figures) -> str:
    """Where XLA's step on logits fits, in the published cases, and up to where."""
    told = []
    for batch, seq in STEPS[1:]:
        spec = spec_of(f"logits:{batch}x{seq}", "t4")
        if (figure := figures.compiled(spec)) and "total" in figure:
            fits = figure["total"] <= run_of(spec).target.capacity_bytes
            told.append(f"{batch} × {seq} {'fits' if fits else 'does not fit'} ({gib(figure)} GiB)")
    edges = [(figures[f"t4, logits:{seq}"], seq) for seq in LENGTHS]
    edge = ", ".join(f"{figure['batch']} × {seq}" for figure, seq in edges if figure and "batch" in figure)
    return f"XLA's step on logits, compiled for a T4: {', '.join(told)}. Its edge: {edge}.\n"


def picture(figures: Figures) -> Figure:
    """Tokens in the largest step that fits, against length."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (card, title) in zip(figure.subplots(1, 2, sharey=True), CARDS.items(), strict=True):
        for loss in ("logits", "fused"):
            of_lengths = {seq: figures[f"{card}, {loss}:{seq}"] for seq in LENGTHS}
            tokens = {seq: f["batch"] * seq for seq, f in of_lengths.items() if f and "batch" in f}
            axes.plot(list(tokens), list(tokens.values()), "o-", color=COLORS[loss], label=f"{loss}, predicted")
            best = {seq: largest_measured(trials(figures, f"{loss}:{seq}")) for seq in LENGTHS}
            ran = {seq: b[0] * seq for seq, b in best.items() if b}
            if card == "h200" and ran:
                axes.plot(
                    list(ran), list(ran.values()), "kx" if loss == "logits" else "k+", ms=9, label=f"{loss}, measured"
                )
        axes.set(title=title, xlabel="tokens in a sequence", ylim=(0, None), xscale="log")
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("tokens in the largest step that fits")
    figure.suptitle("Qwen2-0.5B, float32, AdamW, nothing recomputed", fontsize=9)
    return figure


def report(figures: Figures, folder: pathlib.Path | None) -> None:
    command = " ".join(["python -m benchmarks.small_card", *sys.argv[1:]])
    columns = [f"predicted, {name}" for name in CARDS.values()] + [f"measured, {CAP_GIB} GiB of a GPU"]
    text = (
        f"`{command}`; figures of: {figures.stamps()}\n\nQwen2-0.5B, float32 throughout, AdamW, nothing recomputed.\n"
    )
    text += f"\n{PUBLISHED}"
    text += "\nWhat a step needs, GiB:\n\n" + _measure.table(["batch × length", "loss", *columns], step_lines(figures))
    text += "\nThe largest batch that fits (its tokens):\n\n" + _measure.table(
        ["length", "loss", *columns], largest_lines(figures)
    )
    text += f"\n{beside_published(figures)}"
    _measure.save(NAME, text, folder or _measure.RESULTS)
    draw(picture, figures, NAME, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_card")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS), help="to predict for")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time, which a GPU must have room for")
    parser.add_argument("--folder", type=pathlib.Path, help="of figures, table and picture")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # of this process alone: the GPU is for those that it starts
    figures = Figures(NAME, options.folder)
    there = _measure.in_own_process(gpu_there)
    pairs = [(cell, card) for cell in options.cells for card in options.cards]
    in_threads(lambda pair: predict(figures, *pair), pairs, options.workers)
    if there is not None:
        in_threads(lambda cell: measure(figures, cell, *there), options.cells, options.workers)
    report(figures, options.folder)


if __name__ == "__main__":
    main()
