"""What FP8 products would save a Llama-3-8B layer, and what they would cost its head.

    python -m benchmarks.fp8 [--tokens 8192] [--rounds 5] [--name NAME]
    python -m benchmarks.fp8 --head                       the head's noise alone, on any device
    python -m benchmarks.fp8 --converge [--steps 300] [--batch 4] [--seeds 0 1 2] [--out FOLDER]
                                                          held-out losses of `make train`'s model, on any device

A product is x·W, dY·Wᵀ or xᵀ·dY of a layer's seven projections, by `liger_jax.ops.fp8_matmul`; or in XLA's pattern,
with the same scales and formats. The step is one layer's loss and all its gradients: norms, rotation, attention and
gated unit are this package's, and the projections are bfloat16 or FP8. The first row's feed-forward is `gated_mlp`, as
in a model's unrolled layers. Figures are medians over rounds in which every program has its turn, on random normal
data.

The head's table: hidden states and head of random normal numbers, scaled so that the logits have the spread of its
first column. The noise is the root mean square of (FP8 logit − float32 logit); the bias is the mean difference of the
log-sum-exp.
"""

import argparse
import concurrent.futures
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import _held_out
from benchmarks._measure import heading, in_rounds, save, table
from liger_jax.models import KernelOptions
from liger_jax.ops import apply_rope, causal_attention, fp8_matmul, gated_mlp, rms_norm, swiglu
from liger_jax.ops.fp8_matmul import FORWARD, GRADIENT

WIDTH, INNER, HEADS, KEY_HEADS, HEAD = 4096, 14336, 32, 8, 128
SHAPES = dict(
    q=(WIDTH, HEADS * HEAD), k=(WIDTH, KEY_HEADS * HEAD), v=(WIDTH, KEY_HEADS * HEAD), o=(HEADS * HEAD, WIDTH),
    gate=(WIDTH, INNER), up=(WIDTH, INNER), down=(INNER, WIDTH),
)  # fmt: skip


# --- products ---------------------------------------------------------------------------------------------------------


def scaled(x, dtype):
    """x as FP8 numbers and the scale that makes them x again."""
    scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / jnp.finfo(dtype).max.astype(jnp.float32)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def scaled_product(a, b, contracting):
    """a·b of (FP8 numbers, scale) each, in the pattern that XLA's pass over products knows as an FP8 product."""
    wide = lambda x: x[0].astype(jnp.bfloat16) * x[1].astype(jnp.bfloat16)
    return jax.lax.dot_general(wide(a), wide(b), (contracting, ((), ())), preferred_element_type=jnp.bfloat16)


@jax.custom_vjp
def dot_in_pattern(x, w):
    """x (N, D), w (D, F) → (N, F); forward and both gradients are in that pattern."""
    return scaled_product(scaled(x, FORWARD), scaled(w, FORWARD), ((1,), (0,)))


def _pattern_forward(x, w):
    x, w = scaled(x, FORWARD), scaled(w, FORWARD)
    return scaled_product(x, w, ((1,), (0,))), (x, w)


def _pattern_backward(residuals, dy):
    x, w = residuals
    dy = scaled(dy, GRADIENT)
    return scaled_product(dy, w, ((1,), (1,))), scaled_product(x, dy, ((0,), (0,)))


dot_in_pattern.defvjp(_pattern_forward, _pattern_backward)


def bfloat16_dot(x, w):
    return x @ w


DOTS = {
    "bfloat16, gated_mlp": None,
    "bfloat16": bfloat16_dot,
    "FP8": fp8_matmul,
    "FP8, XLA's pattern": dot_in_pattern,
}


# --- a layer ----------------------------------------------------------------------------------------------------------


def layer(dot, weights, x, cos, sin):
    """A decoder layer on x (B, T, D)."""
    batch, length = x.shape[:2]
    fused, dot = dot is None, dot or bfloat16_dot
    project = lambda name, x: dot(x.reshape(-1, x.shape[-1]), weights[name]).reshape(batch, length, -1)
    heads = lambda x: x.reshape(batch, length, -1, HEAD)
    h = rms_norm(x, weights["norm_attention"])
    q, k = apply_rope(heads(project("q", h)), heads(project("k", h)), cos, sin)
    attended = causal_attention(q, k, heads(project("v", h))).reshape(batch, length, -1)
    x = x + project("o", attended)
    h = rms_norm(x, weights["norm_feed_forward"])
    if fused:
        return x + gated_mlp(h, weights["gate"], weights["up"], weights["down"])
    return x + project("down", swiglu(project("gate", h), project("up", h)))


def layer_step(dot, tokens):
    """A program that runs a layer's loss and gradients on rows of 2,048 tokens."""
    rows, length = tokens // 2048, 2048
    keys = iter(jax.random.split(jax.random.key(0), 16))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    weights = {name: shape[0] ** -0.5 * draw(*shape) for name, shape in SHAPES.items()}
    weights |= dict(norm_attention=jnp.ones(WIDTH, jnp.bfloat16), norm_feed_forward=jnp.ones(WIDTH, jnp.bfloat16))
    x, target = draw(rows, length, WIDTH), draw(rows, length, WIDTH)
    angles = jnp.arange(length)[:, None] * 5e5 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angles = jnp.broadcast_to(jnp.concatenate([angles, angles], axis=-1), (rows, length, HEAD))
    cos, sin = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)

    def loss(weights, x):
        return jnp.sum((layer(dot, weights, x, cos, sin) * target).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile()
    return functools.partial(compiled, weights, x), "f8e5m2" in (compiled.as_text() or "")


def product_ms(tokens, shape, rounds):
    """Milliseconds of x·W in bfloat16, in FP8 from bfloat16 operands, and in FP8 from operands that are FP8."""
    x = jax.random.normal(jax.random.key(0), (tokens, shape[0]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)

    def of_fp8(x, w):
        sums = jax.lax.dot_general(x[0], w[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return (sums * x[1] * w[1]).astype(jnp.bfloat16)

    ready = jax.jit(lambda x, w: (scaled(x, FORWARD), scaled(w.T, FORWARD)))(x, w)
    programs = {
        "bfloat16": functools.partial(jax.jit(bfloat16_dot), x, w),
        "FP8": functools.partial(jax.jit(DOTS["FP8"]), x, w),
        "FP8 operands": functools.partial(jax.jit(of_fp8), *ready),
    }
    return in_rounds(programs, rounds=rounds, seconds=0.1)


# --- the head ---------------------------------------------------------------------------------------------------------


def head_noise(spread, tokens=256, width=4096, vocab=32768):
    """The noise of FP8 logits, and the bias of their log-sum-exp, for logits of a standard deviation."""
    x = jax.random.normal(jax.random.key(2), (tokens, width))
    w = spread * width**-0.5 * jax.random.normal(jax.random.key(3), (vocab, width))

    def wide(x):
        numbers, scale = scaled(x, FORWARD)
        return numbers.astype(jnp.float32) * scale

    logits = jnp.matmul(x, w.T, precision="highest")
    rounded = jnp.matmul(wide(x), wide(w).T, precision="highest")
    lse = jax.nn.logsumexp
    return jnp.sqrt(jnp.mean((rounded - logits) ** 2)), jnp.mean(lse(rounded, axis=1) - lse(logits, axis=1))


# --- the command ------------------------------------------------------------------------------------------------------


def head_table() -> str:
    rows = []
    for spread in (1, 2, 4, 8):
        noise, bias = map(float, head_noise(spread))
        rows.append([f"{spread}", *(f"{x:.4f}" for x in (noise, noise**2 / 2, bias))])
    header = ["logits' standard deviation", "noise of an FP8 logit", "half its variance", "bias of log-sum-exp"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8")
    parser.add_argument("--tokens", type=int, default=8192, help="in rows of 2,048")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program")
    parser.add_argument("--head", action="store_true", help="the head's table alone")
    parser.add_argument("--converge", action="store_true", help="the held-out losses alone")
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 512 tokens in a step of a training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--out", type=Path, default=Path("runs/llama-small"), help="folder for the text's tokens")
    parser.add_argument("--name", default="fp8", help="of the table's file, without its ending")
    options = parser.parse_args()
    if options.head:
        print(head_table())
        return
    if options.converge:
        print(heading(f"python -m benchmarks.fp8 --converge --steps {options.steps} --batch {options.batch}"))
        corpus = _held_out.load(options.out)
        training = lambda products: _held_out.training_of(
            options.steps, options.batch, dtype="bfloat16", kernels=KernelOptions(products=products)
        )
        products = {"bfloat16 products": None, "FP8 products": "fp8"}
        trainings = {name: _held_out.Trainings(corpus, training(kind)) for name, kind in products.items()}
        print(_held_out.compared(trainings, tuple(options.seeds)))
        return
    with concurrent.futures.ThreadPoolExecutor() as pool:
        steps = dict(zip(DOTS, pool.map(lambda dot: layer_step(dot, options.tokens), DOTS.values()), strict=True))
    ms = in_rounds({name: run for name, (run, _) in steps.items()}, rounds=options.rounds)
    rows = [
        [name, "yes" if steps[name][1] else "no", f"{time:.2f}", f"{ms['bfloat16, gated_mlp'] / time:.2f}"]
        for name, time in ms.items()
    ]
    print({name: round(time, 3) for name, time in ms.items()}, flush=True)
    step = table(["projections", "FP8 products in the program", "a layer's step, ms", "×"], rows)
    rows = []
    for name in ("q", "gate", "down"):
        times = product_ms(options.tokens, SHAPES[name], options.rounds)
        first = times["bfloat16"]
        rows.append([name, *(f"{time:.3f} ({first / time:.2f} ×)" for time in times.values())])
    products = table(["x·W", "bfloat16, ms", "FP8 from bfloat16, ms", "FP8 from FP8, ms"], rows)
    command = f"python -m benchmarks.fp8 --tokens {options.tokens}"
    save(options.name, "\n\n".join([heading(command), step, products, head_table()]))


if __name__ == "__main__":
    main()
