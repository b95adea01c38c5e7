"""Pods without pods: a training step of LLaMA-3-8B, and of 70B, compiled for many devices that are not there.

    python -m benchmarks.pods [--targets v5e:8x8 h200:8 …] [--models llama-3-8b] [--shared 0 1 …]

One sequence of 8,192 tokens on each device (4,096 for 70B), AdamW in float32, bfloat16 computation, remat "full", all
devices along FSDP, with the fused loss and on logits. Each program is searched for the Pallas kernels that it calls,
and the command fails if one is missing that the platform's defaults choose. Figures are kept in `results/pods.json`;
what is there is not made again.

A second table has the runs of `SHARED`, by number: 8 sequences of 8,192 tokens for 70B on 8 and on 16 devices, and one
of 131,072 for 8B, whose devices share rows. Rows are packed, so that a kernel runs attention on GPUs whether or not
cuDNN is installed, and the loss is fused. Runs that were not compiled are estimated.
"""

import argparse
import pathlib
import sys
from typing import Any

from benchmarks import _measure
from benchmarks._memory import COLORS, Figure, Figures, both, draw, estimated, gib, run_of
from liger_jax.planner import target
from liger_jax.planner.devices import GIB
from liger_jax.training.meshes import in_words

NAME = "pods"
TARGETS = ("a100-80g:8", "v5e:8x8", "h200:8", "v6e:8x8", "h200:32", "v5p:4x4x4")  # by memory in all
SEQ = {"llama-3-8b": 8192, "llama-3-70b": 4096}
_OF_70B = dict(model="llama-3-70b", batch=8, seq=8192, packed=True)
_OF_8B = dict(model="llama-3.1-8b", batch=1, seq=131072, packed=True)
SHARED: tuple[dict[str, Any], ...] = (
    _OF_70B | dict(device="h200:8", mesh={"fsdp": 8}),
    _OF_70B | dict(device="h200:8", mesh={"fsdp": 8}, optimizer="adamw8bit"),
    _OF_70B | dict(device="h200:8", mesh={"fsdp": 8}, state_memory="host"),
    _OF_70B | dict(device="v5p:2x2x4", mesh={"fsdp": 8, "sequence": 2}),
    _OF_70B | dict(device="v5p:2x2x4", mesh={"fsdp": 8, "tensor": 2}),
    _OF_8B | dict(device="h200:8", mesh={"sequence": 8}),
    _OF_8B | dict(device="v5p:4x4x1", mesh={"sequence": 16}),
    _OF_8B | dict(device="v5p:4x4x1", mesh={"sequence": 8, "tensor": 2}),
)


def spec_of(model: str, where: str) -> dict[str, Any]:
    return dict(model=model, batch=target(where).count, seq=SEQ[model], device=where)


def expected(spec: dict[str, Any]) -> list[str]:
    """The kernels that a step must call: norms everywhere, the fused loss where its plan chooses one."""
    run = run_of(spec)
    norms = ["rms_norm_backward", "rms_norm_forward"]
    of_loss = ["fused_linear_cross_entropy_logit_gradients", "fused_linear_cross_entropy_statistics"]
    return (of_loss if run.loss == "fused" and run.loss_plan().implementation != "xla" else []) + norms


def missing(figures: Figures) -> list[str]:
    """A sentence for each program that lacks a kernel. A program that was refused for its memory cannot be read."""
    absent = []
    for model in SEQ:
        for where in TARGETS:
            for loss, spec in both(spec_of(model, where)).items():
                figure = figures.compiled(spec)
                if not figure or figure.get("kernels") is None:
                    continue
                if lacks := [kernel for kernel in expected(spec) if kernel not in figure["kernels"]]:
                    absent.append(f"{model} on {where}, {loss}: {', '.join(lacks)} not in the compiled program")
    return absent


def lines(figures: Figures) -> list[list[str]]:
    rows = []
    for model, seq in SEQ.items():
        for where in TARGETS:
            for loss, spec in both(spec_of(model, where)).items():
                figure, run = figures.compiled(spec), run_of(spec)
                if figure is None:
                    continue
                capacity = run.target.memory_bytes
                row = [model, where, f"{run.batch} × {seq}", loss, gib(capacity), gib(estimated(spec).total)]
                if "failure" in figure:
                    rows.append([*row, "failed", "–", figure["failure"]])
                    continue
                fits = "fits" if figure["total"] <= run.target.capacity_bytes else "does not fit"
                if figure["total"] > capacity and run.target.platform == "tpu" and figure["kernels"] is not None:
                    fits = "too much by the program's account, but libtpu did not refuse it"
                ours = [kernel for kernel in figure["kernels"] or () if not kernel.startswith("splash")]  # JAX's own
                told = "no program: refused for its memory" if figure["kernels"] is None else ", ".join(ours) or "none"
                rows.append([*row, gib(figure), fits, told])
    return rows


def shared_lines(figures: Figures) -> list[list[str]]:
    """A row for each run of `SHARED`."""
    rows = []
    for spec in SHARED:
        run, figure = run_of(spec), figures.compiled(spec)
        needed = estimated(spec).total if not figure or "failure" in figure else figure["total"]
        told = "–" if figure is None else gib(figure)
        fits = "fits" if needed <= run.target.capacity_bytes else "does not fit"
        options = [f"--{name.replace('_', '-')} {spec[name]}" for name in ("optimizer", "state_memory") if name in spec]
        where = [run.model.name, run.target.name, f"`{in_words(spec['mesh'])}`", f"{run.batch} × {run.seq}"]
        rows.append(
            [*where, " ".join(options) or "–", gib(run.target.capacity_bytes), gib(estimated(spec).total), told, fits]
        )
    return rows


def picture(figures: Figures) -> Figure:
    """Compiled GiB on each device, on logits and fused, against what it has."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    cases = [(model, where) for model in SEQ for where in TARGETS]
    cases = [
        case for case in cases if all("total" in (figures.compiled(s) or {}) for s in both(spec_of(*case)).values())
    ]
    for place, case in enumerate(cases):
        for (loss, spec), shift in zip(both(spec_of(*case)).items(), (-0.2, 0.2), strict=True):
            needed = figures.compiled(spec)["total"] / GIB
            axes.barh(place + shift, needed, 0.38, color=COLORS[loss], label=None if place else loss)
            axes.text(needed + 0.5, place + shift, f"{needed:.1f}", va="center", fontsize=7)
        capacity = run_of(spec_of(*case)).target.memory_bytes / GIB
        axes.plot([capacity] * 2, [place - 0.45, place + 0.45], "k", lw=2, label=None if place else "of the device")
    axes.set_yticks(range(len(cases)), [f"{model}\n{where}" for model, where in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="GiB on each device, compiled", title="One sequence on each device, remat full, AdamW")
    axes.legend(fontsize=8)
    return figure


def report(figures: Figures, folder: pathlib.Path | None) -> None:
    command = " ".join(["python -m benchmarks.pods", *sys.argv[1:]])
    header = ["model", "devices", "batch × seq", "loss", "GiB of a device", "estimate, GiB", "compiled, GiB", ""]
    text = f"`{command}`; figures of: {figures.stamps()}\n\nGiB on each device.\n\n"
    text += _measure.table([*header, "our kernels in the program"], lines(figures))
    text += "\nKernels that the platform's defaults choose, and that are missing: "
    text += "".join(f"\n- {sentence}" for sentence in missing(figures)) or "none"
    header = ["model", "devices", "mesh", "batch × seq", "options", "GiB that a process can have", "estimate, GiB"]
    text += ".\n\nRows that are fewer than devices, or too long for one; packed, with the fused loss:\n\n"
    text += _measure.table([*header, "compiled, GiB", ""], shared_lines(figures))
    _measure.save(NAME, text, folder or _measure.RESULTS)
    draw(picture, figures, NAME, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pods")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=TARGETS)
    parser.add_argument("--models", nargs="+", choices=tuple(SEQ), default=tuple(SEQ))
    numbers = range(len(SHARED))
    parser.add_argument("--shared", nargs="*", type=int, choices=numbers, default=numbers, help="runs of SHARED")
    parser.add_argument("--folder", type=pathlib.Path, help="of figures, table and picture")
    options = parser.parse_args()
    figures = Figures(NAME, options.folder)
    for model in options.models:
        for where in options.targets:
            for spec in both(spec_of(model, where)).values():
                figures.compile(spec)
        report(figures, options.folder)
    for number in options.shared:
        figures.compile(SHARED[number])
        report(figures, options.folder)
    if sentences := missing(figures):
        raise SystemExit("\n".join(sentences))


if __name__ == "__main__":
    main()
