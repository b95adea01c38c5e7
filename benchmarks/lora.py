"""Adapters beside dense and quantised weights: tokens a second, memory beside the plan, and a layer's cost.

    python -m benchmarks.lora [--model llama-3-8b] [--batch 4] [--seq 2048] [--rank 16] [--remat full] [--kinds nf4]
    python -m benchmarks.lora --parts steps peer --kinds       beside Hugging Face with PEFT and Liger's kernels

A step is loss, gradients of the adapters and AdamW, as `liger-jax plan --lora 16 --param-dtype bfloat16` plans it, on
random weights that are made on the device. The peak is the allocator's, and only known for the first program, which is
the quantised one; the plan is the compiler's account of it. The layer is one of the model's with `remat="none"`: its
forward, and its backward by its input alone, or by its input and the adapters. Times are medians over rounds in which
every program has its turn. The peer's step, of the same shape, has a process of its own before that.
"""

import argparse
import concurrent.futures
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _hugging_face
from benchmarks._measure import heading, in_own_process, in_rounds, save, table
from liger_jax.models.hugging_face import config_json
from liger_jax.models.lora import add_lora, trainable
from liger_jax.models.quantized import quantize
from liger_jax.planner import compile_run
from liger_jax.planner.devices import GIB
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run

SCALE = 0.05  # the scale of every block: weights are then much like a trained model's


@jax.jit
def _numbers(seed: jax.Array, like: jax.Array) -> jax.Array:
    """Numbers that look random, made without memory beside them: codes of all values, or floats of deviation 0.02."""
    count = jnp.uint32(seed)
    for axis in range(like.ndim):
        count = count * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis)
    count = (count ^ (count >> 15)) * jnp.uint32(2246822519)
    count = (count ^ (count >> 13)) * jnp.uint32(3266489917)
    if jnp.issubdtype(like.dtype, jnp.integer):
        return (count >> 24).astype(like.dtype)
    return ((count >> 8).astype(jnp.float32) * (0.07 / 2**24) - 0.035).astype(like.dtype)


def filled(tree: Any) -> Any:
    """Arrays for a tree of shapes."""

    def array(path, x):
        name = jax.tree_util.keystr(path)
        seed = abs(hash(name)) % 2**31
        if "scales" in name:
            return jnp.full(x.shape, SCALE, x.dtype)
        if "norm" in name or "lora_b" in name:
            return jnp.full(x.shape, "norm" in name, x.dtype)
        return jax.jit(lambda: _numbers(seed, jnp.zeros(x.shape, x.dtype)))()

    return jax.tree_util.tree_map_with_path(array, tree)


def step_of(run: Run, program: Any) -> Any:
    """Runs of the planned step, each on the last one's state."""
    (adapters, opt_state), tokens, frozen = program.in_avals[0]
    state = filled(adapters), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), opt_state)
    frozen = filled(frozen)
    tokens = jax.random.randint(jax.random.key(1), tokens.shape, 0, run.model.config.vocab_size)

    def one():
        nonlocal state
        state, loss = program(state, tokens, frozen)
        return loss

    return one


def steps(run: Run, kinds: list[str]) -> str:
    """The table of whole steps."""
    runs = {kind: dataclasses.replace(run, quantize=kind) for kind in kinds}
    runs["bfloat16"] = run
    with concurrent.futures.ThreadPoolExecutor() as pool:  # before there is any state, beside which trials would run
        compiled = dict(
            zip(runs, pool.map(lambda run: compile_run(run, jax.devices()[:1]), runs.values()), strict=True)
        )
    peaks, programs = {}, {}
    for kind, each in runs.items():
        programs[kind] = step_of(each, compiled[kind].program)
        print(kind, "loss", float(programs[kind]()), float(programs[kind]()), flush=True)
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        peaks[kind] = peak if len(programs) == 1 else None
        print(kind, "plan", compiled[kind].total / GIB, "peak", peak and peak / GIB, flush=True)
    times = in_rounds(programs, rounds=3, seconds=2)
    rows = []
    for kind, ms in times.items():
        plan, peak = compiled[kind].total, peaks[kind]
        measured = f"{peak / GIB:.2f} ({peak / plan - 1:+.1%})" if peak else "–"
        speed = [f"{ms:.0f}", f"{run.batch * run.seq / ms * 1e3:,.0f}", f"{times['bfloat16'] / ms:.3f}"]
        rows.append([kind, *speed, f"{plan / GIB:.2f}", measured])
    return table(["base weights", "ms a step", "tokens/s", "× bfloat16", "GiB, compiled", "allocator's peak"], rows)


def layer(run: Run, kinds: list[str]) -> str:
    """The table of one layer."""
    config = dataclasses.replace(run.model.config, num_hidden_layers=1, vocab_size=256)
    x = jax.random.normal(jax.random.key(0), (run.batch, run.seq, config.hidden_size), jnp.bfloat16)
    rope = jnp.ones((1, run.seq, config.head_dim), jnp.float32)
    inputs = {kind: (rope, rope, None, config.window_of(kind)) for kind in config.layer_types or ("full_attention",)}

    def make(kind, adapted):
        dtypes: dict[str, Any] = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        model = run.model.family(config, **dtypes, scan_layers=False, rngs=nnx.Rngs(0))
        model = model if kind is None else quantize(model, kind)
        return add_lora(model, run.lora or 16, alpha=16, rngs=nnx.Rngs(1)) if adapted else model

    def program(kind, adapted):
        model = nnx.eval_shape(lambda: make(kind, adapted))
        graph, adapters, base = trainable(model) if adapted else nnx.split(model, nnx.LoRAParam, ...)

        def gradients(adapters, base, x, dy):
            call = lambda adapters, x: nnx.merge(graph, adapters, base).model.run_layers(x, inputs).hidden
            y, pullback = jax.vjp(call, adapters, x)
            return y, pullback(dy)

        arrays = filled(adapters), filled(base), x, x
        return jax.jit(gradients).lower(*arrays).compile(), arrays

    cases = {"frozen": (None, False), "with adapters": (None, True)}
    cases |= {f"with adapters, {kind}": (kind, True) for kind in kinds}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(cases, pool.map(lambda case: program(*case), cases.values()), strict=True))
    times = in_rounds({name: lambda p=p, arrays=arrays: p(*arrays) for name, (p, arrays) in compiled.items()})
    rows = [[name, f"{ms:.2f}", f"{ms / times['frozen']:.3f}"] for name, ms in times.items()]
    return table(["layer", "ms", "× frozen"], rows)


def peer_ms(values: dict[str, Any], batch: int, seq: int, rank: int, recomputed: bool) -> tuple[float, float]:
    """Milliseconds and peak GiB of the step of transformers with PEFT's adapters and Liger's kernels."""
    _hugging_face.patch_with_liger(values["model_type"])
    tokens = np.random.default_rng(0).integers(0, values["vocab_size"], (batch, seq))
    options = dict(compiled=False, recomputed=recomputed, learning_rate=1e-4, decay=0.0, rank=rank)
    step = _hugging_face.training_step(values, tokens, **options)
    ms = in_rounds({"peer": step.run}, wait=step.wait, rounds=3, seconds=2)["peer"]
    return ms, (step.peak_bytes() or 0) / GIB


def peer(run: Run, kinds: list[str]) -> str:
    """The table of Hugging Face's step with PEFT and Liger's kernels."""
    del kinds
    values = config_json.write(run.model.config, run.model.family.config_fixed, run.model.family.__name__, "bfloat16")
    ms, peak = in_own_process(peer_ms, values, run.batch, run.seq, run.lora, run.remat != "none")
    row = ["HF + PEFT + Liger, bfloat16", f"{ms:.0f}", f"{run.batch * run.seq / ms * 1e3:,.0f}", f"{peak:.2f}"]
    return table(["peer", "ms a step", "tokens/s", "allocator's peak, GiB"], [row])


PARTS = {"peer": peer, "steps": steps, "layer": layer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--kinds", nargs="*", default=["nf4"])
    parser.add_argument("--device", default="h100", help="by the planner's name, for the loss's memory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["steps", "layer"])
    arguments = parser.parse_args()
    run = make_run(
        arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        device=arguments.device,
        param_dtype="bfloat16",
        remat=arguments.remat,
        lora=arguments.rank,
    )
    command = f"python -m benchmarks.lora --model {arguments.model} --batch {arguments.batch} --seq {arguments.seq} "
    command += f"--rank {arguments.rank} --remat {arguments.remat} --kinds {' '.join(arguments.kinds)} "
    command += f"--parts {' '.join(arguments.parts)}"
    # The peer first: its process takes the memory that JAX would hold later.
    tables = [part(run, arguments.kinds) for name, part in PARTS.items() if name in arguments.parts]
    save("lora", "\n".join([heading(command), *tables]))


if __name__ == "__main__":
    main()
