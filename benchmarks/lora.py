"""Adapters beside dense and quantised weights: tokens a second, memory beside the plan, and a layer's cost.

    python -m benchmarks.lora [--model llama-3-8b] [--batch 4] [--seq 2048] [--rank 16] [--remat full] [--kinds nf4]
    python -m benchmarks.lora --parts steps peer      beside Hugging Face with PEFT and Liger's kernels, and Unsloth

A step is loss, gradients of the adapters and AdamW, as `liger-jax plan --lora 16 --param-dtype bfloat16` plans it, on
random weights that are made on the device. The peak is the allocator's, and only known for the first program, which is
the quantised one; the plan is the compiler's account of it. The layer is one of the model's with `remat="none"`: its
forward, and its backward by its input alone, or by its input and the adapters. Times are medians over rounds in which
every program has its turn. The peers' steps, of the same shape, have processes of their own before that. A line says so
if Unsloth is not installed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _hugging_face, _unsloth
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


def steps(run: Run, options: argparse.Namespace) -> str:
    """The table of whole steps."""
    runs = {kind: dataclasses.replace(run, quantize=kind) for kind in options.kinds}
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


def layer(run: Run, options: argparse.Namespace) -> str:
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
    cases |= {f"with adapters, {kind}": (kind, True) for kind in options.kinds}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(cases, pool.map(lambda case: program(*case), cases.values()), strict=True))
    times = in_rounds({name: lambda p=p, arrays=arrays: p(*arrays) for name, (p, arrays) in compiled.items()})
    rows = [[name, f"{ms:.2f}", f"{ms / times['frozen']:.3f}"] for name, ms in times.items()]
    return table(["layer", "ms", "× frozen"], rows)


# --- others' steps ----------------------------------------------------------------------------------------------------


def peft_step(values: dict[str, Any], checkpoint: pathlib.Path, options: dict[str, Any]) -> _hugging_face.Step:
    """Hugging Face's, with bfloat16 adapters in the place of PEFT's float32."""
    del checkpoint
    _hugging_face.patch_with_liger(values["model_type"])
    return _hugging_face.training_step(values, compiled=False, **options)


def unsloth_step(four_bits: bool, values: Any, checkpoint: pathlib.Path, options: dict[str, Any]) -> _hugging_face.Step:
    """Unsloth's."""
    del values
    return _unsloth.training_step(checkpoint, four_bits=four_bits, **options)


PEERS: dict[str, tuple[str, Callable[..., _hugging_face.Step]]] = {
    "hf": ("HF + PEFT + Liger, bfloat16", peft_step),
    "unsloth": ("Unsloth, bfloat16", functools.partial(unsloth_step, False)),
    "unsloth-nf4": ("Unsloth, nf4", functools.partial(unsloth_step, True)),
}


def peer_row(peer: str, values: dict[str, Any], checkpoint: pathlib.Path, options: dict[str, Any]) -> list[str]:
    """A peer's line of the table. `values`: config.json. `options`: of a training step."""
    name, make = PEERS[peer]
    step = make(values, checkpoint, options)
    losses = [float(step.run()) for _ in range(2)]
    ms = in_rounds({name: step.run}, wait=step.wait, rounds=3, seconds=2)[name]
    peak, speed = (step.peak_bytes() or 0) / GIB, options["tokens"].size / ms * 1e3
    return [name, f"{ms:.0f}", f"{speed:,.0f}", f"{peak:.2f}", ", ".join(f"{loss:.3f}" for loss in losses)]


def peer(run: Run, options: argparse.Namespace) -> str:
    """The table of others' steps. What cannot run here is a line, too."""
    config = run.model.config
    values = config_json.write(config, run.model.family.config_fixed, run.model.family.__name__, "bfloat16")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (run.batch, run.seq))
    step = dict(tokens=tokens, rank=run.lora, recomputed=run.remat != "none", learning_rate=1e-4, decay=0.0)
    peers = [peer for peer in options.peers if peer == "hf" or importlib.util.find_spec("unsloth")]
    if len(peers) < len(options.peers):
        print("Unsloth is not installed: without its rows", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or pathlib.Path(folder)
        if options.checkpoint is None and set(peers) - {"hf"}:
            in_own_process(_unsloth.write_checkpoint, checkpoint, values)
        for peer in peers:
            try:
                rows.append(in_own_process(peer_row, peer, values, checkpoint, step))
            except Exception as error:
                rows.append([PEERS[peer][0], "failed", "", "", " ".join(f"{error}".split())[:300]])
            print(*rows[-1], sep=" | ", flush=True)
    return table(["peer", "ms a step", "tokens/s", "allocator's peak, GiB", "first losses"], rows)


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
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="of the part peer")
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, help="the model's, for Unsloth; random weights are written without it"
    )
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
    tables = [part(run, arguments) for name, part in PARTS.items() if name in arguments.parts]
    save("lora", "\n".join([heading(command), *tables]))


if __name__ == "__main__":
    main()
