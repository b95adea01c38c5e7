"""The planner against compilers, for described devices.

    python -m benchmarks.planner [--models qwen2-0.5b llama-3.2-1b …] [--name planner]

The estimate is set beside what the compiler allocates. `small_card`, `long_step` and `scaling` set the compiler's
figure beside the most that a GPU's allocator held.
"""

import argparse

import jax

from benchmarks._measure import heading, save, table
from liger_jax.pallas_kernels.devices import GIB
from liger_jax.planner.compilers import compile_run
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import LOSSES, Run

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


def cases(models: list[str] | None) -> list[Run]:
    """All runs with both losses, on devices that need not be there."""
    chosen = [(*case, "h200") for case in ON_ONE] + list(ON_SEVERAL + ON_TPUS)
    return [
        make_run(model, batch=batch, seq=seq, device=where, remat=remat, loss=loss)
        for model, batch, seq, remat, where in chosen
        if models is None or model in models
        for loss in LOSSES
    ]


def rows(runs: list[Run]) -> list[list[str]]:
    lines = []
    for run in runs:
        predicted, compiled = estimate(run), compile_run(run)
        row = [run.model.name, f"{run.batch} × {run.seq}", run.remat, run.loss, run.target.name]
        row += [f"{predicted.total / GIB:.2f}", f"{compiled.total / GIB:.2f}"]
        row.append(f"{predicted.total / compiled.total:.3f}")
        lines.append(row)
        print(*row, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--name", default="planner", help="of the file under results/")
    arguments = parser.parse_args()
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
    jax.config.update("jax_platforms", "cpu")
    cells = rows(cases(arguments.models))
    cells.sort(key=lambda row: row[:5])
    ratios = [float(row[7]) for row in cells]
    text = heading("python -m benchmarks.planner") + "\n" + table(header, cells)
    text += f"\nestimate / compiled: {min(ratios):.3f} to {max(ratios):.3f}\n"
    save(arguments.name, text)


if __name__ == "__main__":
    main()
