"""The gated delta rule, forward alone and both ways, by implementation and beside torch's.

    python -m benchmarks.gated_delta_rule [--lengths 4096 32768] [--heads 16,32] [--width 128] [--save NAME]

One row of `lengths` tokens with the heads (keys, values) of Qwen3-Next and Qwen3.5, in bfloat16. Times are summed over
kernels (CUPTI), and torch's are between events, after warm runs. Below the table are the times of each of our kernels.
Beside ours: transformers' chunkwise form in torch, and flash-linear-attention's kernels; what is not installed, or does
not run, says so. "rms" is the RMS error of the output, and of the gradient by k, beside XLA in float32.
"""

import argparse
import collections
import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks._attention_peers import _event_ms
from benchmarks._measure import heading, in_own_process, program_ms, show_or_save, table, versions
from liger_jax.ops import gated_delta_rule

IMPLEMENTATIONS = ("xla", "triton")
TORCH = {
    "transformers, torch": ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "flash-linear-attention": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
}


def arguments(length: int, key_heads: int, heads: int, width: int) -> list[np.ndarray]:
    """q, k, v, gate, beta and the gradient by the output, as a model has them: keys of norm 1, decays of all sizes."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, length, key_heads, width), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, do = rng.standard_normal((2, 1, length, heads, width), np.float32)
    gate = -np.exp(rng.uniform(-8, 1, (1, length, heads))).astype(np.float32)
    beta = (1 / (1 + np.exp(-rng.standard_normal((1, length, heads))))).astype(np.float32)
    return [q, k, v, gate, beta, do]


def both_ways(*arrays: jax.Array, implementation: str) -> Any:
    """The output, and the gradients by all arguments."""
    out, back = jax.vjp(lambda *x: gated_delta_rule(*x, implementation=implementation)[0], *arrays[:5])
    return out, back(arrays[5])


def forward(*arrays: jax.Array, implementation: str) -> jax.Array:
    """The output alone."""
    return gated_delta_rule(*arrays[:5], implementation=implementation)[0]


def ours(arrays: list[np.ndarray]) -> tuple[dict[str, list[str]], list[str]]:
    """Cells by implementation, and a line for each kernel of ours."""
    half = [jnp.asarray(x, jnp.float32 if x.ndim == 3 else jnp.bfloat16) for x in arrays]
    exact: Any = jax.jit(functools.partial(both_ways, implementation="xla"))(*[x.astype(jnp.float32) for x in half])
    exact = [np.asarray(x) for x in (exact[0], exact[1][1])]
    cells, lines = {}, []
    for name in IMPLEMENTATIONS:
        try:
            programs = [
                jax.jit(functools.partial(f, implementation=name)).lower(*half).compile() for f in (forward, both_ways)
            ]
            out, gradients = programs[1](*half)
            rms = [_rms(x, y) for x, y in zip((out, gradients[1]), exact, strict=True)]
            mib = programs[1].memory_analysis().temp_size_in_bytes / 2**20
            del out, gradients
            cells[name] = [f"{program_ms(p, *half):.2f}" for p in programs]
            cells[name] += [f"{mib:.0f}", " and ".join(f"{x:.1e}" for x in rms)]
        except Exception as error:
            cells[name] = [f"{type(error).__name__}: {str(error)[:80]}", "–", "–", "–"]
            continue
        if name != "xla":
            lines += [f"- {kernel}: {ms:.3f} ms" for kernel, ms in _by_kernel(programs[1], half)]
    return cells, lines


def _rms(x: jax.Array, exact: np.ndarray) -> float:
    error = np.asarray(x, np.float32) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def _by_kernel(program: Any, arrays: list[jax.Array]) -> list[tuple[str, float]]:
    """The time of each kernel of a run, summed over its launches; the second of two runs."""
    measured = profiler.measure(program, aggregate=False)
    measured(*arrays)
    _, launches = measured(*arrays)
    times: dict[str, float] = collections.defaultdict(float)
    for kernel, ms in launches or ():
        times[kernel] += ms
    return sorted(times.items(), key=lambda item: -item[1])


def torch_cells(name: str, arrays: list[np.ndarray]) -> list[str]:
    """The cells of a torch function, or why there are none."""
    try:
        torch: Any = importlib.import_module("torch")
        module, function = TORCH[name]
        rule = getattr(importlib.import_module(module), function)
        types = [torch.float32 if x.ndim == 3 else torch.bfloat16 for x in arrays]
        q, k, v, gate, beta, do = (torch.tensor(x, dtype=t, device="cuda") for x, t in zip(arrays, types, strict=True))
        # As transformers calls both: with as many heads of queries and keys as of values.
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        leaves = [x.requires_grad_() for x in (q, k, v, gate, beta)]
        call = lambda: rule(q, k, v, g=gate, beta=beta)[0]

        def both():
            torch.autograd.grad(call(), leaves, do)

        with torch.no_grad():
            ahead = _event_ms(torch, call)
        return [f"{ahead:.2f}", f"{_event_ms(torch, both):.2f}", "–", "–"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:80]}", "–", "–", "–"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", nargs="+", type=int, default=(4096, 32768))
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split(","))), default=(16, 32))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save", metavar="NAME")
    options = parser.parse_args()
    rows, text = [], ""
    for length in options.lengths:
        case = length, *options.heads, options.width
        cells = {}
        for name in reversed(TORCH):
            cells[name] = in_own_process(_torch_of, name, case)
            print(name, *cells[name], file=sys.stderr, flush=True)
        own, lines = in_own_process(_ours_of, case)
        rows += [[f"{length:,}", name, *times] for name, times in (own | cells).items()]
        text += f"\nKernels of both ways, {length:,} tokens:\n\n" + "\n".join(lines) + "\n"
    heads = ",".join(map(str, options.heads))
    command = f"python -m benchmarks.gated_delta_rule --lengths {' '.join(map(str, options.lengths))} --heads {heads}"
    header = ["tokens", "implementation", "forward, ms", "both ways, ms", "temporaries, MiB", "rms of out and dk"]
    names = versions("torch", "transformers", "flash-linear-attention")
    show_or_save(options.save, f"{heading(command)}{names}\n\n{table(header, rows)}{text}")


def _ours_of(case: tuple[int, ...]) -> Any:
    return ours(arguments(*case))


def _torch_of(name: str, case: tuple[int, ...]) -> list[str]:
    return torch_cells(name, arguments(*case))


if __name__ == "__main__":
    main()
