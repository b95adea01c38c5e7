"""The fused distillation losses against the products that they need, plain JAX and their peers, on one NVIDIA GPU.

    python -m benchmarks.distillation [--tokens 8192] [--vocabulary 128256] [--parts times peers errors memory]

Each row is a training step of the student: the mean loss, and its gradients by the student's hidden states and weight.
The unit is what a step cannot do without: three products of the student and one of the teacher, each timed alone in the
same run, as bare bf16 products. All programs are compiled first, in parallel. Times are medians over rounds in which
every program of JAX has its turn (`_measure.in_rounds`), and torch's run after them. "Extra" memory is beside inputs
and gradients: for JAX the compiler's figure, for torch the peak of its allocator.

Errors are the RMS of (dW − truth), divided by that of plain JAX in bf16, whose logits are rounded. The truth is plain
JAX in float64, on as many tokens as `--truth` says and 16,384 entries of the vocabulary.

"memory" is of 1,024 to 65,536 tokens, by the compiler for an H200 that need not be there, and a picture.
"""

import argparse
import concurrent.futures
import functools
import gc
import importlib
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _figures, _measure
from liger_jax import fused_linear_cross_entropy, fused_linear_distillation, fused_linear_topk_distillation
from liger_jax.pallas_kernels.fused_linear_distillation import reference

STUDENT, TEACHER, STORED = 2048, 4096, 64  # widths, and log-probabilities of a stored teacher
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
        "liger-jax fused_linear_cross_entropy": cross_entropy,
        "plain JAX jsd, bf16 logits": functools.partial(plain, "jsd"),
    }


def torch_losses() -> dict[str, Callable[..., Any]]:
    """The peers that are installed, as losses of torch tensors."""
    found: dict[str, Callable[..., Any]] = {}
    try:
        liger = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
        # Student and teacher, labels, beta, ignore_index, temperature.
        found["Liger jsd"] = lambda *arrays: liger.apply(*arrays, None, 0.5, -100, 1.0)
    except ImportError as error:
        print(f"without Liger: {error}")
    try:
        trl = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        found["TRL jsd"] = lambda h, w, th, tw: trl.apply(h, w, None, th, tw, None, 0.5)[0].mean()
    except ImportError as error:
        print(f"without TRL: {error}")
    return found


# --- times and memory -------------------------------------------------------------------------------------------------

STUDENT_PRODUCT, TEACHER_PRODUCT = "one product of the student", "one product of the teacher"


def compiled_programs(inputs: list[jax.Array], pool: concurrent.futures.Executor) -> dict[str, Any]:
    """The products and the losses' steps, as futures of functions of nothing and of their extra MiB."""

    def compiled(name: str, function: Callable[..., Any], arguments: list[jax.Array]) -> tuple[Any, float]:
        start = time.perf_counter()
        program = jax.jit(function).lower(*arguments).compile()
        print(f"  compiled {name} in {time.perf_counter() - start:.0f} s", flush=True)
        return functools.partial(program, *arguments), program.memory_analysis().temp_size_in_bytes / 2**20

    product = lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    tasks = {STUDENT_PRODUCT: (product, inputs[:2]), TEACHER_PRODUCT: (product, inputs[2:])}
    steps = {name: (jax.value_and_grad(loss, (0, 1)), inputs) for name, loss in losses(len(inputs[1])).items()}
    return {name: pool.submit(compiled, name, *task) for name, task in (tasks | steps).items()}


def measure_jax(futures: dict[str, Any]) -> tuple[float, dict[str, tuple[float, float]]]:
    """The unit in milliseconds, and milliseconds and extra MiB of each loss's step, all in the same rounds."""
    programs, extra = {}, {}
    for name, future in futures.items():
        try:
            program, extra[name] = future.result()
            jax.block_until_ready(program())
            programs[name] = program
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    times = _measure.in_rounds(programs, rounds=4, seconds=0.3)
    products = {name: times.pop(name) for name in (STUDENT_PRODUCT, TEACHER_PRODUCT)}
    print({name: f"{ms:.2f} ms" for name, ms in products.items()}, flush=True)
    unit = 3 * products[STUDENT_PRODUCT] + products[TEACHER_PRODUCT]
    return unit, {name: (ms, extra[name]) for name, ms in times.items()}


def measure_torch(inputs: list[jax.Array]) -> dict[str, tuple[float, float]]:
    """The same of torch's peers; one that fails is a printed line."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {}
    as_torch = lambda x: torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16).cuda()
    tensors = [as_torch(x) for x in inputs]
    for tensor in tensors[:2]:
        tensor.requires_grad_()
    found = {}
    for name, loss in torch_losses().items():

        def step(loss=loss):
            for tensor in tensors[:2]:
                tensor.grad = None
            loss(*tensors).backward()

        try:
            times = _measure.in_rounds({name: step}, lambda _: torch.cuda.synchronize(), rounds=2, seconds=0.3)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        gradients = sum(tensor.nbytes for tensor in tensors[:2])
        for tensor in tensors[:2]:
            tensor.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found[name] = times[name], (torch.cuda.max_memory_allocated() - before - gradients) / 2**20
        print(f"  {name}: {found[name][0]:.1f} ms, {found[name][1]:,.0f} MiB", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return found


def times_table(found: dict[str, tuple[float, float]], unit: float, tokens: int, vocabulary: int) -> str:
    rows = [[name, f"{ms:.2f}", f"{ms / unit:.2f}", f"{mib:,.0f}"] for name, (ms, mib) in found.items()]
    rows.sort(key=lambda row: float(row[1]))
    shape = f"N = {tokens:,}, student {STUDENT:,}, teacher {TEACHER:,}, V = {vocabulary:,}; unit {unit:.2f} ms"
    return f"{shape}\n\n" + _measure.table(["who", "ms a step", "× unit", "extra MiB"], rows)


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
    found: dict[str, list[float]] = {name: [] for name in names}
    for n in TOKENS_OF_PICTURE:
        types = [(shape, jnp.bfloat16) for shape in ((n, STUDENT), (v, STUDENT), (n, TEACHER), (v, TEACHER))]
        for name in names:
            step = jax.value_and_grad(losses(v)[name], (0, 1))
            compiled = compile_for(step, types, gpu_devices("h200")[0], "gpu")
            found[name].append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
    title = "Forward and backward, student 2,048, teacher 4,096, bfloat16, compiled for an H200"
    styles = "o-", "s-", "v--", "x--", "d:"
    path = folder / "distillation_memory.png"
    _figures.memory_against_tokens(found, styles, TOKENS_OF_PICTURE, title, path, ylim=(0, None))
    rows = [[name, *(f"{x:,.0f}" for x in found[name])] for name in names]
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
        inputs = make_inputs(args.tokens, args.vocabulary)
        unit, found = float("nan"), {}
        if "times" in parts:
            unit, found = measure_jax(compiled_programs(inputs, pool))
            print(times_table(found, unit, args.tokens, args.vocabulary), flush=True)
        if "peers" in parts:
            found |= measure_torch(inputs)
        del inputs
        text += "\n\n" + times_table(found, unit, args.tokens, args.vocabulary)
        _measure.save("distillation", text, args.folder)
        if "errors" in parts:
            _measure.save("distillation", f"{text}\n{errors(args.truth, 16384, pool)}", args.folder)


if __name__ == "__main__":
    main()
