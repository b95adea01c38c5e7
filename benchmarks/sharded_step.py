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
import itertools
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
from liger_jax.planner.mesh import LAYOUT, make_mesh
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import LOSSES, Run
from liger_jax.training import make_step

DTYPES = ("float32", "bfloat16")
# The relative difference, as root mean square of an array, that summing in another order explains in float32; in
# bfloat16 it is 1.5 times one device's own from float32. And the plan's bar.
SAME, SAME_MEMORY = 1e-4, 0.05
# Its state is the last gradient, and parameters stay as they are.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params: (jax.tree.map(jnp.zeros_like, params), grads),
)


def loss_and_gradients(run: Run, axis_type: AxisType | None):
    """Loss and gradients on the host: of one device without an axis type, else of a mesh of all devices."""
    sharded = axis_type is not None
    kernels = run.kernels()
    if not sharded:  # all tokens are on one device, and its budget was for a share of them
        kernels = dataclasses.replace(kernels, layout=None, memory_budget_bytes=None)
    graph, params = run.model.abstract(
        kernels=kernels, dtype=jnp.dtype(run.dtype), param_dtype=jnp.dtype(run.param_dtype), remat=run.remat
    )
    count = run.target.count if sharded else 1
    sizes = run.mesh if sharded else dict.fromkeys(run.mesh, 1)
    mesh = make_mesh(jax.devices()[:count], sizes, axis_type or AxisType.Auto)
    of_params, of_tokens = LAYOUT.shardings(params, mesh), NamedSharding(mesh, P(tuple(sizes)))
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
    precision = jax.default_matmul_precision("highest" if run.dtype == "float32" else "default")
    with jax.set_mesh(mesh), precision:
        step = jax.jit(make_step(graph, RECORD, micro_batches=run.micro_batches))
        (_, gradients), loss = step((params, RECORD.init(params)), batch)
        return float(loss), [np.asarray(x, np.float32) for x in jax.tree.leaves(gradients)]


def differences(run: Run) -> list[list]:
    """Relative errors of loss and gradients, for both kinds of axes and ways to cut the batch, and the allowed ones."""
    truth = loss_and_gradients(dataclasses.replace(run, dtype="float32"), None)
    expected = truth if run.dtype == "float32" else loss_and_gradients(run, None)
    allowed = SAME if run.dtype == "float32" else 1.5 * relative(expected, truth)[1]
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        for parts in (1, 2):
            sharded = loss_and_gradients(dataclasses.replace(run, micro_batches=parts), kind)
            found.append([kind.name, parts, *relative(sharded, expected), allowed])
    return found


def relative(found: tuple, expected: tuple) -> tuple[float, float]:
    """The relative error of the loss, and the largest of the gradients'."""
    (loss, gradients), (expected_loss, expected_gradients) = found, expected
    pairs = zip(gradients, expected_gradients, strict=True)
    rms = [float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))) for x, y in pairs]
    return abs(loss / expected_loss - 1), max(rms)


def peaks(run: Run) -> list[int]:
    """Bytes: the estimate, the compiler's, and the allocator's on each device."""
    measured_peak(run)
    measured = [device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices()[: run.target.count]]
    return [estimate(run).total, compile_run(run, jax.devices()[: run.target.count]).total, *measured]


def apart(arguments: argparse.Namespace, what: str, loss: str, dtype: str = "bfloat16") -> list:
    """Runs a step in a new process, because an allocator's peak cannot be set back."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # there are several of them
    if arguments.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={target(arguments.device).count}"
        environment |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flag)
    elif what == "differences":  # of values: which kernel is fastest need not be tried, which takes minutes
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    fields = {name: getattr(arguments, name) for name in ("model", "batch", "seq", "device")}
    fields |= dict(loss=loss, dtype=dtype)
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
    parser.add_argument("--workers", type=int, default=6, help="processes at a time; most of their time is compilation")
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
    on_gpu = arguments.platform == "gpu"
    cases = [("differences", loss, dtype) for loss in LOSSES for dtype in DTYPES]
    cases += [("peaks", loss) for loss in LOSSES if on_gpu]
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        found = dict(zip(cases, pool.map(lambda case: apart(arguments, *case), cases), strict=True))
    for loss, dtype in itertools.product(LOSSES, DTYPES):
        for kind, parts, of_loss, of_gradients, allowed in found["differences", loss, dtype]:
            good &= max(of_loss, of_gradients) <= allowed
            rows.append([loss, dtype, kind, str(parts), *(f"{x:.1e}" for x in (of_loss, of_gradients, allowed))])
    header = ["loss", "dtype", "axes", "micro-batches", "loss differs by", "worst gradient by (rms)", "allowed"]
    text += table(header, rows)
    if on_gpu:
        rows = []
        for loss in LOSSES:
            estimated, compiled, *measured = found["peaks", loss]
            good &= all(abs(compiled / peak - 1) <= SAME_MEMORY for peak in measured)
            measured = ", ".join(f"{peak / GIB:.2f}" for peak in measured)
            rows.append([loss, f"{estimated / GIB:.2f}", f"{compiled / GIB:.2f}", measured])
        text += "\n" + table(["loss", "estimate, GiB", "compiled, GiB", "peak of each device, GiB"], rows)
    text += f"\n{'All' if good else 'NOT all'} within what is allowed"
    text += f", and {SAME_MEMORY:.0%} of memory.\n" if on_gpu else ".\n"
    print(text)
    if arguments.name:
        save(arguments.name, heading("python -m benchmarks.sharded_step") + text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
