"""The fused distillation losses against the fused cross-entropy, plain JAX and their peers, on one NVIDIA GPU.

    python -m benchmarks.distillation [--tokens 8192] [--vocabulary 128256] [--parts times peers errors memory]

Each row is a training step of the student: the mean loss, and its gradients by the student's hidden states and weight.
The unit is the fused cross-entropy of the student. All programs are compiled first, in parallel. Times are medians over
rounds in which every program of JAX has its turn (`_measure.in_rounds`), and torch's run after them. "Extra" memory is
beside inputs and gradients: for JAX the compiler's figure, for torch the peak of its allocator.

Errors are the RMS of (dW − truth), divided by that of plain JAX in bf16, whose logits are rounded. The truth is plain
JAX in float64, on as many tokens as `--truth` says and 16,384 entries of the vocabulary.

"memory" is of 1,024 to 65,536 tokens, by the compiler for an H200 that need not be there, and a picture.
"""

import argparse
import concurrent.futures
import functools
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _figures, _measure, _peers
from benchmarks._token_losses import HEADER, Data, compiled_steps, installed, jax_rows, lines, torch_rows
from liger_jax import fused_linear_cross_entropy, fused_linear_distillation, fused_linear_topk_distillation
from tests.ops.references import distillation as reference

STUDENT, TEACHER, STORED = 2048, 4096, 64  # widths, and log-probabilities of a stored teacher
UNIT = "liger-jax fused_linear_cross_entropy"
SHORT_CHUNKS = "liger-jax jsd, fast, chunks of 512 tokens"
DOCS = _measure.RESULTS.parent.parent / "docs"
TOKENS_OF_PICTURE = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


def make_inputs(n: int, v: int) -> list[jax.Array]:
    """Hidden states and heads of the student and the teacher, random normal; logits of variance 1."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (n, STUDENT), (v, STUDENT), (n, TEACHER), (v, TEACHER)
    scales = 1.0, STUDENT**-0.5, 1.0, TEACHER**-0.5
    return [
        (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    ]


def plain(kind: str, hidden, weight, teacher_hidden, teacher_weight):
    """Unfused: both models' logits in bf16, and the divergence in float32."""
    logits = [(h @ w.T).astype(jnp.float32) for h, w in ((hidden, weight), (teacher_hidden, teacher_weight))]
    return jnp.mean(reference.divergence(*logits, kind=kind))


def losses(v: int) -> dict[str, Callable[..., jax.Array]]:
    """By name: a mean loss of (student hidden, student weight, teacher hidden, teacher weight)."""
    ours = {
        f"liger-jax {kind}, {mode}": functools.partial(fused_linear_distillation, divergence=kind, mode=mode)
        for kind in ("jsd", "forward_kl")
        for mode in ("fast", "lean")
    }

    # Between both: the fast mode's products, and a fourth of its memory.
    ours[SHORT_CHUNKS] = functools.partial(fused_linear_distillation, divergence="jsd", mode="fast", chunk_size=512)

    def top_k(hidden, weight, teacher_hidden, teacher_weight):
        token_ids = jnp.arange(STORED)[None, :] * (v // STORED) + jnp.arange(len(hidden))[:, None] % (v // STORED)
        log_probs = jnp.full(token_ids.shape, -np.log(2 * STORED), jnp.float32)
        return fused_linear_topk_distillation(hidden, weight, token_ids, log_probs, tail="ignore")

    def cross_entropy(hidden, weight, teacher_hidden, teacher_weight):
        return fused_linear_cross_entropy(hidden, weight, jnp.arange(len(hidden)) % v)

    return ours | {
        f"liger-jax top-{STORED}": top_k,
        UNIT: cross_entropy,
        "plain JAX jsd, bf16 logits": functools.partial(plain, "jsd"),
    }


def torch_losses(teacher: list[jax.Array]) -> dict[str, Callable[..., Any]]:
    """The peers that are installed, as losses of torch tensors."""

    def liger() -> dict[str, Callable[..., Any]]:
        loss = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
        hidden, weight = map(_peers.to_torch, teacher)
        # Student and teacher, labels, beta, ignore_index, temperature.
        return {"Liger jsd": lambda h, w, _: loss.apply(h, w, hidden, weight, None, 0.5, -100, 1.0)}

    def trl() -> dict[str, Callable[..., Any]]:
        loss = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        hidden, weight = map(_peers.to_torch, teacher)
        return {"TRL jsd": lambda h, w, _: loss.apply(h, w, None, hidden, weight, None, 0.5)[0].mean()}

    return installed({"Liger": liger, "TRL": trl})


# --- times and memory -------------------------------------------------------------------------------------------------


def times_table(parts: list[str], inputs: list[jax.Array], pool: concurrent.futures.Executor) -> str:
    vocabulary = len(inputs[1])
    rows = []
    if "times" in parts:
        rows = jax_rows(compiled_steps(losses(vocabulary), inputs, pool), inputs, {})
    if "peers" in parts:
        data = Data(inputs[0], inputs[1], jnp.zeros(len(inputs[0]), jnp.int32))
        rows += torch_rows(torch_losses(inputs[2:]), data, None)
    cells = lines(f"{vocabulary:,}", sorted(rows, key=lambda row: row.ms), UNIT)
    shape = f"N = {len(inputs[0]):,}, student {STUDENT:,}, teacher {TEACHER:,}"
    return f"{shape}\n\n" + _measure.table(["V", *HEADER[1:5]], [line[:5] for line in cells])


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(n: int, v: int, pool: concurrent.futures.Executor) -> str:
    """For each divergence and mode: dW's RMS error over plain JAX's."""
    inputs = make_inputs(n, v)
    gradient = lambda loss: np.asarray(jax.jit(jax.grad(loss, 1))(*inputs), np.float64)

    def truth(kind: str) -> np.ndarray:
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in inputs]
            exact = lambda *x: jnp.mean(reference.divergence(x[0] @ x[1].T, x[2] @ x[3].T, kind=kind))
            return np.asarray(jax.jit(jax.grad(exact, 1))(*wide))

    kinds, modes = ("forward_kl", "reverse_kl", "jsd", "tvd"), ("fast", "lean")
    truths = {kind: pool.submit(truth, kind) for kind in kinds}
    plains = {kind: pool.submit(gradient, functools.partial(plain, kind)) for kind in kinds}
    fused = {
        (kind, mode): pool.submit(gradient, functools.partial(fused_linear_distillation, divergence=kind, mode=mode))
        for kind in kinds
        for mode in modes
    }
    rms = lambda future, kind: float(np.sqrt(np.mean(np.square(future.result() - truths[kind].result()))))
    rows = [
        [kind, *(f"{rms(fused[kind, mode], kind) / rms(plains[kind], kind):.2f}" for mode in modes)] for kind in kinds
    ]
    caption = f"dW's RMS error against float64, over that of plain JAX with bf16 logits; {n:,} tokens, V = {v:,}"
    return f"{caption}\n\n" + _measure.table(["divergence", *modes], rows)


# --- the picture ------------------------------------------------------------------------------------------------------


def memory_table(v: int, folder: pathlib.Path) -> str:
    """Extra MiB of the steps as tokens grow, compiled for an H200, and their picture."""
    from liger_jax.planner.compilers import compile_for, gpu_devices

    names = [name for name in losses(v) if name.endswith(("fast", "lean")) or name == SHORT_CHUNKS]
    mebibytes: dict[str, list[float]] = {name: [] for name in names}
    for n in TOKENS_OF_PICTURE:
        types = [(shape, jnp.bfloat16) for shape in ((n, STUDENT), (v, STUDENT), (n, TEACHER), (v, TEACHER))]
        for name in names:
            step = jax.value_and_grad(losses(v)[name], (0, 1))
            compiled = compile_for(step, types, gpu_devices("h200")[0], "gpu")
            mebibytes[name].append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
    title = "Forward and backward, student 2,048, teacher 4,096, bfloat16, compiled for an H200"
    styles = "o-", "s-", "v--", "x--", "d:"
    path = folder / "distillation_memory.png"
    _figures.memory_against_tokens(mebibytes, styles, TOKENS_OF_PICTURE, title, path, ylim=(0, None))
    rows = [[name, *(f"{x:,.0f}" for x in mebibytes[name])] for name in names]
    return _measure.table(["extra MiB", *(f"{n:,} tokens" for n in TOKENS_OF_PICTURE)], rows)


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--truth", type=int, default=1024, help="tokens on which errors are measured")
    all_parts = "times", "peers", "errors", "memory"
    parser.add_argument("--parts", nargs="+", choices=all_parts, default=all_parts[:3])
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    args = parser.parse_args()
    if "memory" in args.parts:
        folder = DOCS if args.folder == _measure.RESULTS else args.folder
        heading = _measure.heading("python -m benchmarks.distillation --parts memory", "compiled for an H200")
        _measure.save("distillation_memory", f"{heading}\n{memory_table(args.vocabulary, folder)}", args.folder)
    parts = [part for part in args.parts if part != "memory"]
    if not parts:
        return
    text = _measure.heading("python -m benchmarks.distillation").rstrip()
    if "peers" in parts:
        text += "; " + _measure.versions("torch", "triton", "liger-kernel", "trl")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        text += "\n\n" + times_table(parts, make_inputs(args.tokens, args.vocabulary), pool)
        _measure.save("distillation", text, args.folder)
        if "errors" in parts:
            _measure.save("distillation", f"{text}\n{errors(args.truth, 16384, pool)}", args.folder)


if __name__ == "__main__":
    main()
