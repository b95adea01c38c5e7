"""A sharded training step against one device's, and its memory on each device against what the planner says.

    python -m benchmarks.sharded_step [--model qwen2-0.5b] [--batch 8] [--seq 1024] [--device h200:2] [--name NAME]
    python -m benchmarks.sharded_step --platform cpu --model config.json --seq 64

Loss and gradients of the first step are compared on meshes with Auto and with Explicit axes, in one batch and in two
micro-batches, in float32 and in bfloat16. Then the step runs on fully sharded state, and the most that each device's
allocator held is set beside the plan. On a CPU, whose devices are simulated, only the first is done. The exit code is 1
if an error or a difference is too large.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._measure import heading, save, table
from benchmarks.planner import measured_peak
from liger_jax.planner.compiled import compile_run
from liger_jax.planner.devices import GIB, target
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.sharding import make_mesh, shardings
from liger_jax.planner.step import LOSSES, Run
from liger_jax.training import make_step

# Relative differences that summing in another order explains, as root mean squares of an array; and the plan's bar.
SAME = {"float32": 1e-4, "bfloat16": 3e-2}
SAME_MEMORY = 0.05
# Its state is the last gradient, and parameters stay as they are.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params: (jax.tree.map(jnp.zeros_like, params), grads),
)


def loss_and_gradients(run: Run, axis_type: AxisType | None):
    """On the host: of one device without an axis type, else on a mesh of all."""
    sharded = axis_type is not None
    kernels = run.kernels() if sharded else dataclasses.replace(run.kernels(), batch_axes=None)
    graph, params = run.model.abstract(
        kernels=kernels, dtype=jnp.dtype(run.dtype), param_dtype=jnp.dtype(run.param_dtype), remat=run.remat
    )
    count = run.target.count if sharded else 1
    sizes = run.mesh if sharded else dict.fromkeys(run.mesh, 1)
    mesh = make_mesh(jax.devices()[:count], sizes, axis_type or AxisType.Auto)
    of_params, of_tokens = shardings(params, mesh), NamedSharding(mesh, P(tuple(sizes)))
    types, structure = jax.tree.flatten(params)

    def draw():
        keys = jax.random.split(jax.random.key(0), len(types))
        random = [0.02 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, types, strict=True)]
        return jax.tree.unflatten(structure, random)

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, run.model.config.vocab_size, (run.batch, run.seq)).astype(np.int32)
    # Unequal numbers of tokens count on each device.
    labels = np.where(rng.random(tokens.shape) < np.linspace(0, 0.8, run.batch)[:, None], -100, tokens)
    params = jax.jit(draw, out_shardings=of_params)()
    batch = jax.device_put(dict(input_ids=tokens, labels=labels), of_tokens)
    with jax.set_mesh(mesh):
        step = jax.jit(make_step(graph, RECORD, micro_batches=run.micro_batches))
        (_, gradients), loss = step((params, RECORD.init(params)), batch)
        return float(loss), [np.asarray(x, np.float32) for x in jax.tree.leaves(gradients)]


def differences(run: Run) -> list[list]:
    """Relative ones, of loss and gradients, for both dtypes, kinds of axes and ways to cut the batch."""
    found = []
    for dtype in SAME:
        same = dataclasses.replace(run, dtype=dtype)
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            expected, truth = loss_and_gradients(same, None)
            for kind in (AxisType.Auto, AxisType.Explicit):
                for parts in (1, 2):
                    loss, gradients = loss_and_gradients(dataclasses.replace(same, micro_batches=parts), kind)
                    rms = [
                        float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)))
                        for x, y in zip(gradients, truth, strict=True)
                    ]
                    found.append([dtype, kind.name, parts, abs(loss / expected - 1), max(rms)])
    return found


def peaks(run: Run) -> list[int]:
    """Bytes: the estimate, the compiler's, and the allocator's on each device."""
    measured_peak(run)
    measured = [device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices()[: run.target.count]]
    return [estimate(run).total, compile_run(run, jax.devices()[: run.target.count]).total, *measured]


def apart(arguments: argparse.Namespace, what: str, loss: str) -> list:
    """What a new process finds: an allocator's peak cannot be set back."""
    environment = dict(os.environ)
    if arguments.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={target(arguments.device).count}"
        environment |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flag)
    fields = dict(model=arguments.model, batch=arguments.batch, seq=arguments.seq, device=arguments.device, loss=loss)
    command = [sys.executable, "-m", "benchmarks.sharded_step", "--measure", json.dumps([what, fields])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2-0.5b", help="as the planner takes it")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all devices")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--device", default="h200:2", help="as the planner takes it; on a CPU its number counts")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu", help="where it runs")
    parser.add_argument("--name", help="of a file under results/")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, fields = json.loads(arguments.measure)
        print(json.dumps({"differences": differences, "peaks": peaks}[what](make_run(**fields))))
        return 0
    good = True
    text = f"\n{arguments.model}, {arguments.batch} × {arguments.seq} on {arguments.device} ({arguments.platform})\n\n"
    rows = []
    kinds = ("differences", "peaks") if arguments.platform == "gpu" else ("differences",)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # most of it is compilation, and each has its allocator
        pairs = [(what, loss) for what in kinds for loss in LOSSES]
        found = dict(zip(pairs, pool.map(lambda pair: apart(arguments, *pair), pairs), strict=True))
    for loss in LOSSES:
        for dtype, kind, parts, of_loss, of_gradients in found["differences", loss]:
            good &= max(of_loss, of_gradients) <= SAME[dtype]
            rows.append([loss, dtype, kind, str(parts), f"{of_loss:.1e}", f"{of_gradients:.1e}"])
    text += table(["loss", "dtype", "axes", "micro-batches", "loss differs by", "worst gradient by (rms)"], rows)
    if "peaks" in kinds:
        rows = []
        for loss in LOSSES:
            estimated, compiled, *measured = found["peaks", loss]
            good &= all(abs(compiled / peak - 1) <= SAME_MEMORY for peak in measured)
            measured = ", ".join(f"{peak / GIB:.2f}" for peak in measured)
            rows.append([loss, f"{estimated / GIB:.2f}", f"{compiled / GIB:.2f}", measured])
        text += "\n" + table(["loss", "estimate, GiB", "compiled, GiB", "peak of each device, GiB"], rows)
    limits = f"{SAME}" + (f" and {SAME_MEMORY:.0%} of memory" if arguments.platform == "gpu" else "")
    text += f"\n{'all within' if good else 'NOT all within'} {limits}\n"
    print(text)
    if arguments.name:
        save(arguments.name, heading("python -m benchmarks.sharded_step") + text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
