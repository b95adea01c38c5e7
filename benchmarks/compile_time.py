"""The wait before the first step: seconds to trace, lower and compile the fused loss and a training step.

    python -m benchmarks.compile_time [--programs loss-fast step-scanned] [--target h100] [--xla NAME=VALUE]

Every program has a process of its own, without a compilation cache. There JAX, our package and Pallas' backend for GPUs
are imported, and the device is in use, before the program is traced. (A first kernel imports that backend otherwise,
which takes a third of a second.)

XLA tries several programs for each matrix product, and runs them on the device. `--xla xla_gpu_autotune_level=0`
leaves that out, which tells its share of the compilation; it is no way to train. With `--target` the programs are
compiled for a device that need not be there, which runs no such trials. CPU seconds are those of the process and of the
assemblers that it starts: where other work shares the cores, they alone can be compared.
"""

import argparse
import contextlib
import functools
import resource
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from benchmarks._measure import heading, in_own_process, save, table
from benchmarks._models import SIZES, make_model
from liger_jax import fused_linear_cross_entropy
from liger_jax.models import KernelOptions
from liger_jax.pallas_kernels.devices import GPUS
from liger_jax.planner import compilers
from liger_jax.training import make_step

HEAD = (8192, 4096, 128256)  # Llama-3-8B's
SMALL = (300, 320, 1001)
TOKENS = (8, 2048)
KERNEL_CALLS = ("custom_call @mosaic_gpu", "custom_call @__gpu$xla.gpu.triton")
HEADER = ["program", "kernels", "trace, s", "lower, s", "compile, s", "all, s", "CPU s to lower", "CPU s to compile"]


class Times(NamedTuple):
    """Seconds of a program's phases, by the clock and of the processor, and the Pallas kernels that were lowered."""

    kernels: int
    trace: float
    lower: float
    compile: float
    lower_cpu: float  # with tracing
    compile_cpu: float


# --- programs ---------------------------------------------------------------------------------------------------------


def plain_loss(hidden, weight, labels):
    logits = (hidden @ weight.T).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss_and_gradients(loss, n: int, d: int, v: int):
    """A function, and the types of its arguments."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((n, d), (v, d))]
    return jax.value_and_grad(loss, (0, 1)), (*types, jax.ShapeDtypeStruct((n,), jnp.int32))


def fused(mode: str, shape: tuple[int, int, int]):
    """The fused loss of a mode."""
    return loss_and_gradients(functools.partial(fused_linear_cross_entropy, mode=mode), *shape)


def step(scan_layers: bool):
    """Llama-3.2-1B's step with AdamW, all in bfloat16."""
    make = lambda: make_model(SIZES["llama-3.2-1b"], KernelOptions(), scan_layers=scan_layers)
    graph, params = nnx.split(jax.eval_shape(make))
    optimizer = optax.adamw(1e-5)
    state = params, jax.eval_shape(optimizer.init, params)
    return make_step(graph, optimizer), (state, jax.ShapeDtypeStruct(TOKENS, jnp.int32))


PROGRAMS = {
    "loss-plain": functools.partial(loss_and_gradients, plain_loss, *HEAD),
    "loss-fast": functools.partial(fused, "fast", HEAD),
    "loss-lean": functools.partial(fused, "lean", HEAD),
    "loss-lean-small": functools.partial(fused, "lean", SMALL),
    "step-scanned": functools.partial(step, True),
    "step-unrolled": functools.partial(step, False),
}
NAMES = {
    "loss-plain": f"plain loss {HEAD}",
    "loss-fast": f"fused loss, fast, {HEAD}",
    "loss-lean": f"fused loss, lean, {HEAD}",
    "loss-lean-small": f"fused loss, lean, {SMALL}",
    "step-scanned": f"step of Llama-3.2-1B, {TOKENS[0]} × {TOKENS[1]}, scanned",
    "step-unrolled": f"step of Llama-3.2-1B, {TOKENS[0]} × {TOKENS[1]}, unrolled",
}


# --- in a program's process -------------------------------------------------------------------------------------------


def measured(name: str, target: str | None, xla: dict[str, str]) -> Times:
    """The times of a program, compiled for the GPU that is here or for a described one."""
    jax.config.update("jax_enable_compilation_cache", False)
    if target is not None:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0] if target is None else compilers.gpu_devices(target)[0]
    place = SingleDeviceSharding(device)
    in_context = contextlib.nullcontext()
    if target is not None:
        kind = compilers.described(device, "gpu")
        in_context = jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind))
    platforms = None if target is None else ("cuda",)
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    with in_context:
        # A first program, so that the device is in use.
        jax.jit(jnp.exp).trace(placed(jnp.zeros(8))).lower(lowering_platforms=platforms).compile()
        function, types = PROGRAMS[name]()
        moments = [(time.monotonic(), cpu_seconds())]
        traced = jax.jit(function).trace(*jax.tree.map(placed, types))
        moments.append((time.monotonic(), cpu_seconds()))
        lowered = traced.lower(lowering_platforms=platforms)
        moments.append((time.monotonic(), cpu_seconds()))
        lowered.compile(xla)
        moments.append((time.monotonic(), cpu_seconds()))
    (start, cpu_start), (traced_at, _), (lowered_at, cpu_lowered), (end, cpu_end) = moments
    text = lowered.as_text()
    return Times(
        kernels=sum(text.count(call) for call in KERNEL_CALLS),
        trace=traced_at - start,
        lower=lowered_at - traced_at,
        compile=end - lowered_at,
        lower_cpu=cpu_lowered - cpu_start,
        compile_cpu=cpu_end - cpu_lowered,
    )


def cpu_seconds() -> float:
    """The processor's seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# --- the command ------------------------------------------------------------------------------------------------------


def cells(name: str, times: Times) -> list[str]:
    whole = times.trace + times.lower + times.compile
    seconds = (times.trace, times.lower, times.compile, whole, times.lower_cpu, times.compile_cpu)
    return [NAMES[name], f"{times.kernels}", *[f"{value:.2f}" for value in seconds]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time")
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--target", choices=tuple(GPUS), help="compile for this GPU, which need not be here")
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE", help="options of the compiler")
    parser.add_argument("--name", default="compile_time", help="of the table's file, without its ending")
    options = parser.parse_args()
    xla = dict(option.split("=", 1) for option in options.xla)
    rows = []
    for name in options.programs:
        rows.append(cells(name, in_own_process(measured, name, options.target, xla)))
        print("  ".join(rows[-1]), flush=True)
    command = " ".join(["python -m benchmarks.compile_time", *sys.argv[1:]])
    device: Any = None if options.target is None else f"compiled for {GPUS[options.target].kind}"
    save(options.name, heading(command, device) + "\n" + table(HEADER, rows))


if __name__ == "__main__":
    main()
