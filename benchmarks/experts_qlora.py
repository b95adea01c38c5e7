"""QLoRA of a mixture of experts: the planner's estimate, the compiler's figure, the measured peak, and tokens a second.

    python -m benchmarks.experts_qlora [--model qwen3-30b-a3b] [--batch 2] [--seq 2048] [--adapted experts attention]

The planner's own training step: adapters of rank 16 in bfloat16 computation beside nf4 weights, AdamW in float32, remat
full, the fused loss. "experts" has adapters on attention and on all experts, "attention" on attention alone. Weights
are random and are made on the device in 4 bits, one layer after another; no checkpoint is read. Each row has a process
of its own. Without a GPU only the estimate is printed.
"""

import argparse
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.planner import gpu_there
from liger_jax.models.core.parameters import parameter, path_of
from liger_jax.pallas_kernels.devices import GIB, GPUS
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run, training_step

NAME = "experts_qlora"
HEADER = ["adapters on", "batch × length", "estimate, GiB", "compiler, GiB", "peak, GiB", "ms a step", "tokens/s"]
HEADER += ["loss, first → last"]


def run_of(model: str, batch: int, seq: int, adapted: str, device: str) -> Run:
    options: dict[str, Any] = dict(lora=16, lora_experts=adapted == "experts", quantize="nf4", remat="full")
    return make_run(model, batch=batch, seq=seq, device=device, **options)


def filled(tree: Any) -> Any:
    """Random numbers of a model's size for its parameters, made on the device one after another."""

    def of_leaf(keys: Any, leaf: Any) -> jax.Array:
        info = parameter(path_of(keys), leaf.shape)
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(info.name.encode()))

        def draw(key: Any, shape: tuple[int, ...]) -> jax.Array:
            if leaf.dtype == jnp.uint8:
                return jax.random.bits(key, shape, jnp.uint8)
            if info.kind.endswith("_scales"):
                return (0.04 + 0.01 * jax.random.uniform(key, shape)).astype(leaf.dtype)
            if info.kind.endswith("lora_b"):
                return jnp.zeros(shape, leaf.dtype)
            one = 1.0 if info.kind == "norm" else 0.0
            return (one + 0.02 * jax.random.normal(key, shape)).astype(leaf.dtype)

        def make(key: Any) -> jax.Array:
            if leaf.ndim < 3:
                return draw(key, leaf.shape)
            return jax.lax.map(lambda key: draw(key, leaf.shape[1:]), jax.random.split(key, leaf.shape[0]))

        return jax.block_until_ready(jax.jit(make, out_shardings=leaf.sharding)(key))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def measured(arguments: tuple[Any, ...], steps: int) -> dict[str, Any]:
    """Bytes by the compiler and at the peak, milliseconds of a step, and losses. The arguments are `run_of`'s."""
    run = run_of(*arguments)
    mesh = make_mesh(jax.devices()[:1], run.mesh)
    step, ((adapters, moments), tokens, base) = training_step(run, mesh)
    with jax.set_mesh(mesh):
        compiled = step.lower((adapters, moments), tokens, base).compile()
        memory = compiled.memory_analysis()
        base, adapters = filled(base), filled(adapters)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), moments)
        state = adapters, jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, moments))()
        vocab_size = run.model.config.vocab_size
        ids = jax.device_put(jax.random.randint(jax.random.key(1), tokens.shape, 0, vocab_size), tokens.sharding)
        losses = []

        def turn() -> jax.Array:
            nonlocal state
            state, loss = compiled(state, ids, base)
            losses.append(loss)
            return loss

        ms = _measure.queued_ms(turn, jax.block_until_ready, steps)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return dict(needed=needed, peak=peak, ms=ms, losses=(float(losses[0]), float(losses[-1])))


def line(arguments: tuple[Any, ...], steps: int, on_gpu: bool) -> list[str]:
    gib, run = lambda size: f"{size / GIB:.2f}", run_of(*arguments)
    cell = [arguments[3], f"{run.batch} × {run.seq}", gib(estimate(run).total)]
    if not on_gpu:
        return [*cell, *["–"] * (len(HEADER) - len(cell))]
    found = _measure.in_own_process(measured, arguments, steps)
    first, last = found["losses"]
    speed = f"{run.batch * run.seq / found['ms'] * 1e3:,.0f}"
    return [*cell, gib(found["needed"]), gib(found["peak"]), f"{found['ms']:.0f}", speed, f"{first:.3f} → {last:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts_qlora")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--adapted", nargs="+", choices=("experts", "attention"), default=["experts", "attention"])
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    options = parser.parse_args()
    there = _measure.in_own_process(gpu_there)
    device = "h200" if there is None else there[0]
    jax.config.update("jax_platforms", "cpu")  # of this process alone: the GPU is for those that it starts
    lines = []
    for adapted in options.adapted:
        arguments = options.model, options.batch, options.seq, adapted, device
        lines.append(line(arguments, options.steps, there is not None))
        print(lines[-1], flush=True)
    command = f"python -m benchmarks.{NAME} --model {options.model} --batch {options.batch} --seq {options.seq}"
    text = _measure.heading(command, GPUS[device].kind)
    text += "\nnf4 weights, adapters of rank 16, AdamW in float32, remat full.\n\n"
    _measure.save(NAME, text + _measure.table(HEADER, lines))


if __name__ == "__main__":
    main()
