"""The planner against compilers, and against a GPU where there is one.

    python -m benchmarks.planner [--models qwen2-0.5b llama-3.2-1b …] [--name planner]

The estimate is set beside what the compiler allocates, for described devices. If there is a GPU, the same is done for
it, and beside both stands the most that its allocator held while the step ran twice, each step in its own process.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, in_own_process, save, table
from liger_jax.pallas_kernels.devices import GIB, GPUS
from liger_jax.planner.compiled import compile_run
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import LOSSES, Run, training_step

# Model, batch, sequence, remat.
ON_ONE = (
    ("qwen2-0.5b", 8, 512, "full"),
    ("qwen2-0.5b", 8, 512, "none"),
    ("qwen2-0.5b", 8, 2048, "full"),
    ("llama-3.2-1b", 1, 2048, "full"),
    ("llama-3.2-1b", 8, 2048, "full"),
    ("llama-3.2-1b", 8, 2048, "dots"),
    ("qwen2-1.5b", 2, 4096, "full"),
    ("llama-3.2-3b", 2, 4096, "full"),
)
ON_SEVERAL = (
    ("llama-3-8b", 16, 4096, "full", "h200:8"),
    ("llama-3-8b", 64, 4096, "full", "h200:32"),
    ("qwen2.5-14b", 8, 4096, "full", "h200:8"),
    ("llama-3-8b", 16, 4096, "full", "a100-80g:8"),
)
ON_TPUS = (
    ("qwen2-0.5b", 8, 512, "full", "v6e"),
    ("qwen2-0.5b", 8, 512, "none", "v6e"),
    ("qwen2-0.5b", 8, 2048, "full", "v6e"),
    ("llama-3.2-1b", 4, 2048, "full", "v6e"),
    ("llama-3.2-1b", 4, 2048, "none", "v5p"),
    ("qwen2-0.5b", 32, 2048, "full", "v6e:2x2"),
    ("qwen2-1.5b", 8, 4096, "dots", "v5p:2x2x1"),
    ("llama-3.2-3b", 8, 4096, "full", "v6e:2x2"),
)


def cases(device: str, models: list[str] | None, elsewhere: bool) -> list[Run]:
    """All runs with both losses: on one `device`, and on devices that this machine does not have."""
    chosen = [(*case, device) for case in ON_ONE] + list(ON_SEVERAL + ON_TPUS if elsewhere else ())
    return [
        make_run(model, batch=batch, seq=seq, device=where, remat=remat, loss=loss)
        for model, batch, seq, remat, where in chosen
        if models is None or model in models
        for loss in LOSSES
    ]


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


def apart(run: Run) -> int | None:
    """`measured_peak` in a new process, since an allocator's peak cannot be set back; None if it is out of memory."""
    fields = {
        f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name not in ("model", "target", "mesh")
    }
    fields |= {"model": run.model.name, "device": run.target.name}
    command = [sys.executable, "-m", "benchmarks.planner", "--measure", json.dumps(fields)]
    # One piece of memory, as JAX takes it by default: an allocator that grows hands out whole pieces, of up to 128 MiB
    # more than was asked for.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        if "RESOURCE_EXHAUSTED" in done.stderr:
            return None
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def rows(runs: list[Run], on_gpu: bool) -> list[list[str]]:
    """The table, with what was measured where the device is there."""
    found = []
    for run in runs:
        predicted, compiled = estimate(run), compile_run(run)
        measured = apart(run) if on_gpu else None
        row = [run.model.name, f"{run.batch} × {run.seq}", run.remat, run.loss, run.target.name]
        row += [
            f"{predicted.total / GIB:.2f}",
            f"{compiled.total / GIB:.2f}",
            f"{predicted.total / compiled.total:.3f}",
        ]
        if on_gpu:
            row += ["out of memory", "–"] if measured is None else [
                f"{measured / GIB:.2f}", f"{compiled.total / measured:.3f}"
            ]  # fmt: skip
        found.append(row)
        print(*row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--name", default="planner", help="of the file under results/")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(measured_peak(make_run(**json.loads(arguments.measure))))
        return
    header = [
        "model",
        "batch × seq",
        "remat",
        "loss",
        "device",
        "estimate, GiB",
        "compiled, GiB",
        "estimate / compiled",
    ]
    jax.config.update("jax_platforms", "cpu")  # of this process alone: the GPU is for those that it starts
    there = in_own_process(gpu_there)
    if there:
        header += ["measured peak, GiB", "compiled / measured"]
    device = there[0] if there else "h200"
    found = rows(cases(device, arguments.models, elsewhere=there is None), on_gpu=there is not None)
    found.sort(key=lambda row: row[:5])
    ratios = [float(row[7]) for row in found]
    text = heading("python -m benchmarks.planner", there and GPUS[device].kind) + "\n" + table(header, found)
    text += f"\nestimate / compiled: {min(ratios):.3f} to {max(ratios):.3f}\n"
    save(arguments.name, text)


if __name__ == "__main__":
    main()
