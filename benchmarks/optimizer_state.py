"""The update of a model's parameters by AdamW with 8-bit state, beside optax's AdamW: time, bytes and peak.

    python -m benchmarks.optimizer_state [--model qwen2-0.5b] [--cases "8-bit, bfloat16" …] [--rounds 5] [--name NAME]
    python -m benchmarks.optimizer_state --target h100       what the compiler says, on a machine without a GPU
    python -m benchmarks.optimizer_state --converge [--steps 300] [--batch 4] [--seeds 0 1 2] [--mesh fsdp=4]
                                                             held-out losses of `make train`'s model, on any device

What is timed is the update alone, with random gradients: `optimizer.update` and `optax.apply_updates` in one program
whose parameters and state are donated. Programs have their turns one after another in one process, and the figure is
the median over rounds. GB/s counts what an update must read and write, each number once: parameters, gradients, state.
The peak is the allocator's, of a process that does nothing else. The case that others are divided by is optax's AdamW
all in bfloat16, which does not train at small rates.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from benchmarks import _held_out
from benchmarks._measure import heading, in_own_process, in_rounds, save, table
from liger_jax.pallas_kernels.devices import GIB, GPUS
from liger_jax.planner import compilers
from liger_jax.planner.architectures import architecture
from liger_jax.training import adamw_8bit, stochastic_rounding

RATE, DECAY = 1e-4, 0.01
HEADER = ["optimizer, parameters", "state, bytes each", "temporaries, GiB", "update, ms", "GB/s", "ratio", "peak, GiB"]


class Case(NamedTuple):
    """An optimizer, and the dtype of parameters and gradients."""

    dtype: Any
    optimizer: Callable[[], optax.GradientTransformation]


_optax = functools.partial(optax.adamw, RATE, weight_decay=DECAY)
_eight_bit = functools.partial(adamw_8bit, RATE, weight_decay=DECAY)
CASES = {
    "optax, bfloat16": Case(jnp.bfloat16, _optax),
    "optax, float32": Case(jnp.float32, _optax),
    "optax rounded stochastically, bfloat16": Case(jnp.bfloat16, lambda: stochastic_rounding(_optax())),
    "8-bit, bfloat16": Case(jnp.bfloat16, _eight_bit),
    "8-bit, float32": Case(jnp.float32, _eight_bit),
    "8-bit rounded stochastically, bfloat16": Case(jnp.bfloat16, lambda: stochastic_rounding(_eight_bit())),
}
FIRST = "optax, bfloat16"


# --- an update --------------------------------------------------------------------------------------------------------


def params_of(model: str, case: Case) -> Any:
    """The parameters without numbers."""
    return architecture(model).abstract(param_dtype=case.dtype)[1]


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled_update(params: Any, case: Case, target: str | None = None):
    """The program for the device that is here, or for a GPU that need not be."""
    optimizer = case.optimizer()

    def update(state, grads):
        params, opt_state = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(optimizer.init, params)
    if target is None:
        return jax.jit(update, donate_argnums=0).lower((params, opt_state), params).compile()
    device = compilers.gpu_devices(target)[0]
    kind = compilers.described(device, "gpu")
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(update, donate_argnums=0).trace(*jax.tree.map(put, ((params, opt_state), params)))
        return traced.lower(lowering_platforms=("cuda",)).compile()


def make_run(model: str, case: Case) -> Callable[[], Any]:
    """Runs one update after another on random parameters and gradients; each returns an array to wait for."""
    types, structure = jax.tree.flatten(params_of(model, case))
    compiled = compiled_update(jax.tree.unflatten(structure, types), case)

    @functools.partial(jax.jit, static_argnums=0)
    def draw(seed, size):
        keys = jax.random.split(jax.random.key(seed), len(types))
        random = [size * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, types, strict=True)]
        return jax.tree.unflatten(structure, random)

    params, grads = draw(0, jnp.asarray(0.02, case.dtype)), draw(1, jnp.asarray(1e-3, case.dtype))
    state = params, jax.jit(case.optimizer().init)(params)
    del params

    def run():
        nonlocal state
        state = compiled(state, grads)
        return jax.tree.leaves(state)[0]

    return run


# --- in a process of its own ------------------------------------------------------------------------------------------


def peak_gib(model: str, name: str, updates: int = 3) -> float | None:
    """The most that the allocator held during some updates, and before them; None where it does not tell."""
    run = make_run(model, CASES[name])
    jax.block_until_ready([run() for _ in range(updates)][-1])
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / GIB if stats else None


def times_ms(model: str, names: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of each case's update, in turns."""
    return in_rounds({name: make_run(model, CASES[name]) for name in names}, rounds=rounds)


def counted(model: str, name: str, target: str | None) -> tuple[float, float, int]:
    """State in bytes a parameter, temporaries in GiB, and the bytes that an update reads and writes at least."""
    if target is not None:
        jax.config.update("jax_platforms", "cpu")
    case = CASES[name]
    params = params_of(model, case)
    state = jax.eval_shape(case.optimizer().init, params)
    numbers = sum(x.size for x in jax.tree.leaves(params))
    memory = compiled_update(params, case, target).memory_analysis()
    moved = 3 * bytes_of(params) + 2 * bytes_of(state)
    return bytes_of(state) / numbers, memory.temp_size_in_bytes / GIB, moved


# --- a training -------------------------------------------------------------------------------------------------------


def converged(steps: int, batch: int, seeds: tuple[int, ...], mesh: str | None, out: Path) -> str:
    """The table of held-out losses with moments in float32 and in 8 bits."""
    corpus = _held_out.load(out)
    training = lambda name: _held_out.training_of(steps, batch, dtype="float32", optimizer=name)
    kinds = {"AdamW": ("adamw", None), "8-bit AdamW": ("adamw8bit", None)}
    if mesh is not None:
        kinds[f"8-bit AdamW on {mesh}"] = ("adamw8bit", mesh)
    trainings = {name: _held_out.Trainings(corpus, training(kind), mesh) for name, (kind, mesh) in kinds.items()}
    return _held_out.compared(trainings, seeds)


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_state")
    parser.add_argument("--model", default="qwen2-0.5b", help="as the planner takes it")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program")
    parser.add_argument("--target", choices=tuple(GPUS), help="compile for this GPU, which need not be here; no times")
    parser.add_argument("--name", default="optimizer_state", help="of the table's file, without its ending")
    parser.add_argument("--converge", action="store_true", help="the held-out losses alone, in float32")
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 512 tokens in a step of a training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--mesh", help="with 8-bit state on several devices besides, such as fsdp=4")
    parser.add_argument("--out", type=Path, default=Path("runs/llama-small"), help="folder for the text's tokens")
    options = parser.parse_args()
    if options.converge:
        print(heading(" ".join(["python -m benchmarks.optimizer_state", *sys.argv[1:]])))
        print(converged(options.steps, options.batch, tuple(options.seeds), options.mesh, options.out))
        return
    told = {name: in_own_process(counted, options.model, name, options.target) for name in options.cases}
    times, peaks = {}, {}
    if options.target is None:
        times = in_own_process(times_ms, options.model, options.cases, options.rounds)
        peaks = {name: in_own_process(peak_gib, options.model, name) for name in options.cases}
    rows = []
    for name, (state, temporaries, moved) in told.items():
        ms, first, peak = times.get(name), times.get(FIRST), peaks.get(name)
        speed = (
            ["", "", ""]
            if ms is None
            else [f"{ms:.2f}", f"{moved / ms / 1e6:.0f}", f"{ms / first:.2f}" if first else ""]
        )
        rows.append([name, f"{state:.3f}", f"{temporaries:.3f}", *speed, "" if peak is None else f"{peak:.2f}"])
    command = " ".join(["python -m benchmarks.optimizer_state", *sys.argv[1:]])
    device: Any = None if options.target is None else f"compiled for {GPUS[options.target].kind}"
    text = f"{heading(command, device)}\nThe update of {options.model}'s parameters.\n\n{table(HEADER, rows)}"
    save(options.name, text)


if __name__ == "__main__":
    main()
