"""Training steps of whole models, ours beside Hugging Face's: tokens a second, MFU and peak memory.

    python -m benchmarks.training_step [--model qwen2-0.5b] [--batch 8] [--seq 512 2048] [--remat none full]
                                       [--only ours ours-unrolled hf-liger]

A step is loss, gradients and AdamW on random tokens; parameters, computation and AdamW's state are bfloat16 (6 bytes a
parameter less than with `stochastic_rounding`). By default each of ours has all kernels or none; `--only ours-glu` has
one alone, which tells what a kernel costs where XLA fuses. Ours is jitted, its state updated in place. Every row has a
process of its own, and so the whole GPU: peak memory is the most that its allocator ever held, `peak_bytes_in_use` of
JAX or `max_memory_allocated` of torch. Steps are queued one after the other, as training loops do that look at the loss
now and then; times are the median of three such turns, after steps that are not timed.

MFU is 6·(parameters in a token's matrix products)·tokens + 6·L·Q·H·T·tokens FLOP (the second term is causal
attention), over time and the device's peak for dense bfloat16; what is recomputed is not counted.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _figures, _hugging_face, _measure
from benchmarks._hugging_face import Step
from benchmarks._models import (
    LEARNING_RATE,
    SIZES,
    WEIGHT_DECAY,
    compiled_step,
    family_of,
    make_model,
    needed_bytes,
    runs,
)
from liger_jax.models import KernelOptions
from liger_jax.models.hugging_face import config_json
from liger_jax.pallas_kernels.devices import GPUS

OURS = {
    "ours": "liger-jax",
    "ours-unrolled": "liger-jax, scan_layers=False",
    "ours-unfused": "liger-jax, all kernels off",
    "ours-unfused-unrolled": "liger-jax, all kernels off, scan_layers=False",
}
KERNELS = ("rms_norm", "glu", "fused_linear_cross_entropy")
OURS |= {f"ours-{name}": f"liger-jax, {name} alone" for name in KERNELS}
PEERS = {"hf": "HF", "hf-liger": "HF + Liger", "hf-compile": "HF + torch.compile"}
PACKAGES = ("flax", "torch", "triton", "transformers", "liger-kernel")
HEADER = ["model", "batch × length", "remat", "who", "tokens/s", "ms a step", "MFU", "peak GiB", "GiB by the compiler"]
HEADER += ["loss, first → last"]
PICTURES = pathlib.Path(__file__).parent.parent / "docs"


@dataclasses.dataclass
class Row:
    """One program on one batch, and its measurements."""

    who: str  # a key of OURS or PEERS
    model: str
    batch: int
    seq: int
    remat: str
    xla: tuple[str, ...] = ()  # the compiler's options, "name=value"; a peer's row has none
    ms: float = 0.0
    losses: tuple[float, float] = (0.0, 0.0)
    peak_gib: float | None = None
    needed_gib: float | None = None
    device: str | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        remat = () if self.remat == "none" else (f"remat {self.remat}",)
        return ", ".join(((OURS | PEERS)[self.who], *remat, *self.xla))

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.seq / self.ms * 1e3


# --- in a row's process -----------------------------------------------------------------------------------------------


def measured(row: Row, steps: int, mode: str) -> Row:
    """The row with its figures."""
    config = SIZES[row.model]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (row.batch, row.seq), np.int32)
    step = our_step(row, tokens, mode) if row.who in OURS else peer_step(row, tokens)
    losses = []

    def run():
        losses.append(step.run())
        return losses[-1]

    step.wait(run())
    row.ms = _measure.queued_ms(run, step.wait, steps)
    row.losses, row.device = (float(losses[0]), float(losses[-1])), step.device
    row.peak_gib, row.needed_gib = (x and x / 2**30 for x in (step.peak_bytes(), step.needed_bytes))
    return row


def our_step(row: Row, tokens: np.ndarray, mode: str) -> Step:
    kernels = KernelOptions.off() if "unfused" in row.who else KernelOptions(mode=mode)
    if (alone := row.who.removeprefix("ours-")) in KERNELS:
        kernels = dataclasses.replace(KernelOptions.off(), **{alone: True}, mode=mode)
    options = dict(remat=row.remat, scan_layers="unrolled" not in row.who)
    start, step = compiled_step(
        functools.partial(make_model, SIZES[row.model], kernels, **options),
        optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        jnp.asarray(tokens),
        compiler_options=dict(option.split("=", 1) for option in row.xla),
    )
    device = jax.devices()[0]
    stats = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use")
    # A program's outputs are all there when one is.
    run = runs(start, step, jnp.asarray(tokens))
    return Step(run, jax.block_until_ready, stats, device.device_kind, needed_bytes(step))


def peer_step(row: Row, tokens: np.ndarray) -> Step:
    config = SIZES[row.model]
    family = family_of(config)  # the class alone: JAX would take the GPU to make a model
    values = config_json.write(config, family.config_fixed, family.__name__, "bfloat16")
    if row.who == "hf-liger":
        _hugging_face.patch_with_liger(values["model_type"])
    return _hugging_face.training_step(
        values,
        tokens,
        compiled=row.who == "hf-compile",
        recomputed=row.remat != "none",
        learning_rate=LEARNING_RATE,
        decay=WEIGHT_DECAY,
    )


# --- table and picture ------------------------------------------------------------------------------------------------


def step_flops(row: Row) -> float:
    """The model's operations: each product once forward and twice backward. The embedding is looked up."""
    config = SIZES[row.model]
    projections = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    experts = config.experts
    inner = config.intermediate_size if experts is None else experts.per_token * experts.width
    layer = config.hidden_size * (projections + 3 * inner)
    products = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * row.seq
    return 6.0 * (products + attention) * row.batch * row.seq


def table_line(row: Row) -> list[str]:
    cell = [row.model, f"{row.batch} × {row.seq}", row.remat]
    if row.failure is not None:
        return [*cell, f"{row.name}: failed", *[""] * (len(HEADER) - 4)]
    show = lambda x: "–" if x is None else f"{x:,.2f}"
    gpu = next((gpu for gpu in GPUS.values() if gpu.kind == row.device), None)
    mfu = "–" if gpu is None else f"{step_flops(row) / (row.ms / 1e3) / gpu.peak_flops:.1%}"
    figures = [f"{row.tokens_per_second:,.0f}", f"{row.ms:.1f}", mfu, show(row.peak_gib), show(row.needed_gib)]
    return [*cell, row.name, *figures, f"{row.losses[0]:.3f} → {row.losses[1]:.3f}"]


def draw(rows: list[Row], path: pathlib.Path, title: str) -> None:
    """Speed and memory against tokens in a step, a line for each program and a row of panels for each model."""
    if (pyplot := _figures.pyplot()) is None:
        return
    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = pyplot.subplots(len(models), 2, figsize=(11, 4.2 * len(models)), squeeze=False, layout="tight")
    for (speed, memory), model in zip(panels, models, strict=True):
        for name in dict.fromkeys(row.name for row in rows):
            own = sorted((r for r in rows if r.model == model and r.name == name), key=lambda r: r.batch * r.seq)
            sizes = [row.batch * row.seq for row in own]
            style = "o-" if own and own[0].who in OURS else "s--"
            speed.plot(sizes, [row.tokens_per_second for row in own], style, label=name)
            memory.plot(sizes, [row.peak_gib or row.needed_gib or float("nan") for row in own], style, label=name)
        cells = {r.batch * r.seq: f"{r.batch} × {r.seq}" for r in rows if r.model == model}
        for panel, what in ((speed, "tokens a second"), (memory, "peak memory, GiB")):
            panel.set(title=f"{model}: {what}", xlabel="batch × length", ylim=(0, None), xscale="log")
            panel.set_xticks(list(cells), list(cells.values()))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        speed.legend(fontsize=8)
    figure.suptitle(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(rows: list[Row], options: argparse.Namespace, command: str) -> None:
    """Writes the table and the picture of the rows so far."""
    device = next((row.device for row in rows if row.device), "no device")
    heading = _measure.heading(command, device).rstrip() + "; " + _measure.versions(*PACKAGES)
    text = f"{heading}\n\n{options.steps} steps in a turn.\n\n{_measure.table(HEADER, list(map(table_line, rows)))}"
    failed = [row for row in rows if row.failure is not None]
    failures = [f"- {r.model}, {r.batch} × {r.seq}, {r.name}: {r.failure}\n" for r in failed]
    text += "".join(["\n" if failures else "", *failures])
    _measure.save(options.name, text, options.folder or _measure.RESULTS)
    if done := [row for row in rows if row.failure is None]:
        draw(done, (options.folder or PICTURES) / f"{options.name}.png", heading.split(", `")[0])


# --- the command ------------------------------------------------------------------------------------------------------


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step")
    parser.add_argument("--model", nargs="+", choices=tuple(SIZES), default=["qwen2-0.5b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[8])
    parser.add_argument("--seq", nargs="+", type=int, default=[512, 2048])
    everyone = (*OURS, *PEERS)
    parser.add_argument(
        "--only", nargs="+", choices=everyone, default=[*list(OURS)[: -len(KERNELS)], *PEERS], help="of the programs"
    )
    parser.add_argument("--remat", nargs="+", default=["none"], help="ours by that name; HF's recompute if not none")
    parser.add_argument("--mode", default="auto", help="of our fused loss")
    parser.add_argument("--xla", nargs="+", default=[], metavar="NAME=VALUE", help="the compiler's options, of ours")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--name", default="training_step", help="of the files, without their endings")
    parser.add_argument("--folder", type=pathlib.Path, help="of table and picture")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options(sys.argv[1:])
    command = " ".join(["python -m benchmarks.training_step", *sys.argv[1:]])
    cells = itertools.product(options.model, options.batch, options.seq)
    rows: list[Row] = []
    for model, batch, seq in cells:
        for remat, who in itertools.product(options.remat, options.only):
            xla = tuple(options.xla) if who in OURS else ()
            row, start = Row(who, model, batch, seq, remat, xla), time.monotonic()
            try:
                row = _measure.in_own_process(measured, row, options.steps, options.mode)
            except Exception as error:  # what cannot run here is a result too
                row.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            rows.append(row)
            result = row.failure or f"{row.ms:.1f} ms"
            seconds = time.monotonic() - start
            print(f"  {model}, {batch} × {seq}, {row.name}: {result} ({seconds:.0f} s in all)", flush=True)
        report(rows, options, command)


if __name__ == "__main__":
    main()
