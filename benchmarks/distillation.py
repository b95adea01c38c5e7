"""The fused distillation losses against the products that they need, plain JAX and their peers, on one NVIDIA GPU.

    python -m benchmarks.distillation [--tokens 8192] [--vocabulary 128256] [--memory]

Each row is a training step of the student: the mean loss, and its gradients by the student's hidden states and weight.
The unit is what a step cannot do without: three products of the student and one of the teacher, each timed alone in the
same run, as bare bf16 products. Times are medians over rounds in which every program has its turn
(`_measure.in_rounds`). "Extra" memory is beside inputs and gradients: for JAX the compiler's figure, for torch the peak
of its allocator.

Errors are the RMS of (dW − truth), divided by that of plain JAX in bf16, whose logits are rounded. The truth is plain
JAX in float64, on as many tokens as `--truth` says and 16,384 entries of the vocabulary.

`--memory` compiles the losses for 1,024 to 65,536 tokens, and draws the extra memory.
"""

import argparse
import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from liger_jax import fused_linear_cross_entropy, fused_linear_distillation, fused_linear_topk_distillation
from liger_jax.pallas_kernels.fused_linear_distillation import reference

STUDENT, TEACHER, STORED = 2048, 4096, 64  # widths, and log-probabilities of a stored teacher
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


def unit_ms(inputs: list[jax.Array]) -> float:
    """Three products of the student and one of the teacher."""
    product = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    student, teacher = (functools.partial(product, *pair) for pair in (inputs[:2], inputs[2:]))
    times = _measure.in_rounds({"student": student, "teacher": teacher})
    print({name: f"{ms:.2f} ms" for name, ms in times.items()})
    return 3 * times["student"] + times["teacher"]


def measure_jax(inputs: list[jax.Array]) -> dict[str, tuple[float, float]]:
    """Milliseconds and extra MiB of each loss's step."""
    programs, extra = {}, {}
    for name, loss in losses(len(inputs[1])).items():
        try:
            step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*inputs).compile()
            jax.block_until_ready(step(*inputs))
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            continue
        programs[name] = functools.partial(step, *inputs)
        extra[name] = step.memory_analysis().temp_size_in_bytes / 2**20
    times = _measure.in_rounds(programs)
    return {name: (times[name], extra[name]) for name in programs}


def measure_torch(inputs: list[jax.Array]) -> dict[str, tuple[float, float]]:
    """The same of torch's peers."""
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
            times = _measure.in_rounds({name: step}, wait=lambda _: torch.cuda.synchronize())
        except Exception as error:  # a peer's failure is a line
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
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
        gc.collect()
        torch.cuda.empty_cache()
    return found


def errors(n: int, v: int) -> list[str]:
    """For each divergence and mode: dW's RMS error over plain JAX's."""
    inputs = make_inputs(n, v)
    lines = []
    for kind in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in inputs]
            exact = lambda *x, kind=kind: jnp.mean(reference.divergence(x[0] @ x[1].T, x[2] @ x[3].T, kind=kind))
            truth = np.asarray(jax.jit(jax.grad(exact, 1))(*wide))
        rms = lambda grad, truth=truth: float(np.sqrt(np.mean(np.square(np.asarray(grad, np.float64) - truth))))
        base = rms(jax.jit(jax.grad(functools.partial(plain, kind), 1))(*inputs))
        for mode in ("fast", "lean"):
            loss = functools.partial(fused_linear_distillation, divergence=kind, mode=mode)
            lines.append(f"{kind}, {mode}: {rms(jax.jit(jax.grad(loss, 1))(*inputs)) / base:.2f}")
    return lines


def memory_table(v: int) -> str:
    """Extra MiB of the compiled steps as tokens grow, and their picture."""
    names = [name for name in losses(v) if name.endswith(("fast", "lean"))]
    found: dict[str, list[float]] = {name: [] for name in names}
    for n in TOKENS_OF_PICTURE:
        shapes = (n, STUDENT), (v, STUDENT), (n, TEACHER), (v, TEACHER)
        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        for name in names:
            found[name].append(_measure.extra_mib(jax.value_and_grad(losses(v)[name], (0, 1)), *types))
    _draw(found)
    rows = [[name, *(f"{x:,.0f}" for x in found[name])] for name in names]
    return _measure.table(["extra MiB", *(f"{n:,} tokens" for n in TOKENS_OF_PICTURE)], rows)


def _draw(found: dict[str, list[float]]) -> None:
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    for name, values in found.items():
        panel.plot(TOKENS_OF_PICTURE, values, "o-", label=name)
    panel.set(xscale="log", xlabel="tokens", ylabel="extra memory, MiB", ylim=(0, None))
    panel.legend()
    figure.tight_layout()
    figure.savefig(_measure.RESULTS / "distillation_memory.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--truth", type=int, default=1024, help="tokens on which errors are measured")
    parser.add_argument("--memory", action="store_true", help="extra memory from 1,024 to 65,536 tokens, and no times")
    args = parser.parse_args()
    heading = _measure.heading("python -m benchmarks.distillation" + " --memory" * args.memory)
    if args.memory:
        _measure.save("distillation_memory", heading + "\n" + memory_table(args.vocabulary))
        return
    inputs = make_inputs(args.tokens, args.vocabulary)
    unit = unit_ms(inputs)
    found = measure_jax(inputs) | measure_torch(inputs)
    del inputs
    rows = [[name, f"{ms:.2f}", f"{ms / unit:.2f}", f"{mib:,.0f}"] for name, (ms, mib) in found.items()]
    rows.sort(key=lambda row: float(row[1]))
    shape = (
        f"N = {args.tokens:,}, student {STUDENT:,}, teacher {TEACHER:,}, V = {args.vocabulary:,}; unit {unit:.2f} ms\n"
    )
    text = _measure.table(["who", "ms a step", "× unit", "extra MiB"], rows)
    wrong = (
        f"dW's error of plain JAX's, {args.truth} tokens, V = 16,384: " + "; ".join(errors(args.truth, 16384)) + "\n"
    )
    _measure.save("distillation", "\n".join([heading, shape, text, wrong]))


if __name__ == "__main__":
    main()
