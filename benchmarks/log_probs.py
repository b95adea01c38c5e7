"""Fused log-probabilities beside the fused loss that they share kernels with: time, memory and rounding.

    python -m benchmarks.log_probs [--heads llama_8b qwen2_half_b] [--tokens 8192] [--no-times | --no-picture]

Two programs are timed, of 8,192 tokens in bfloat16: the forward alone, and the forward with the gradients by hidden and
by the weight. All programs of a head have their turn in each round (`_measure.in_rounds`). The loss is the sum over
tokens in mode "lean". The log-probabilities are differentiated through Σ a·log_probs + b·entropy with random a and b.

Errors are RMS, of values (N,) and of dW in 512 random rows of the vocabulary, against float64 from the same bfloat16
values. "Unfused" is plain JAX. It rounds logits to bfloat16.

The picture is of memory from 1,024 to 65,536 tokens, by the compiler for an H200 that need not be there.
"""

import argparse
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _figures
from benchmarks._measure import RESULTS, heading, in_rounds, save, table
from liger_jax import TokenLogProbs, fused_linear_cross_entropy, fused_linear_log_probs

HEADS = {"llama_8b": (4096, 128256), "qwen2_half_b": (896, 151936), "tiny": (64, 1024)}  # D, V
TOKENS = (1024, 4096, 16384, 65536)
DOCS = RESULTS.parent.parent / "docs"


class Data(NamedTuple):
    """A head's inputs, and the cotangents of the log-probabilities and of the entropies, each (N,)."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    log_prob_factors: jax.Array
    entropy_factors: jax.Array


def make_data(n: int, d: int, v: int) -> Data:
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (v, d), jnp.bfloat16) * (2.0 * d**-0.5)
    factors = [jax.random.normal(key, (n,)) for key in keys[3:]]
    return Data(hidden, weight.astype(jnp.bfloat16), jax.random.randint(keys[2], (n,), 0, v), *factors)


# --- programs ---------------------------------------------------------------------------------------------------------


def unfused(hidden: jax.Array, weight: jax.Array, labels: jax.Array, *, entropy: bool) -> Any:
    """Plain JAX: all logits, rounded to bfloat16."""
    log_p = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32), axis=1)
    log_probs = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_p) * log_p, axis=1) if entropy else None


def fused(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: bool) -> Any:
    found: TokenLogProbs = fused_linear_log_probs(hidden, weight, labels, **options)
    return found.log_probs, found.entropy, found.max_logit, found.predicted_tokens, found.log_sum_of_squares


def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: bool) -> Any:
    return fused_linear_cross_entropy(hidden, weight, labels, mode="lean", reduction="sum", **options)


def differentiated(function: Callable[..., Any], hidden, weight, labels, a, b) -> Any:
    """The function's values, and the gradients by hidden and weight."""

    def total(hidden, weight):
        found = function(hidden, weight, labels)
        if not isinstance(found, tuple):
            return found, found
        log_probs, entropy = found[:2]
        return jnp.sum(a * log_probs) + (0.0 if entropy is None else jnp.sum(b * entropy)), found

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)
    return found, gradients


LOSS, LOG_PROBS, ENTROPY = "fused loss, lean", "log_probs, metrics=False", "log_probs and entropy, metrics=False"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    LOSS: loss,
    LOG_PROBS: functools.partial(fused, metrics=False),
    "log_probs": fused,
    ENTROPY: functools.partial(fused, entropy=True, metrics=False),
    "log_probs and entropy": functools.partial(fused, entropy=True),
    "unfused log_probs": functools.partial(unfused, entropy=False),
    "unfused log_probs and entropy": functools.partial(unfused, entropy=True),
}


# --- truth ------------------------------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """The values (N,), and dW[rows] for the log-probabilities alone and with the entropies, all in float64."""

    log_probs: np.ndarray
    entropy: np.ndarray
    rows: np.ndarray
    weight_gradients: dict[bool, np.ndarray]


def make_truth(data: Data) -> Truth:
    """Computed in slices of the vocabulary with 256 MiB of logits each."""
    n, slice_size = len(data.hidden), max(1, 2**25 // len(data.hidden))
    rows = np.sort(np.random.default_rng(0).choice(len(data.weight), min(512, len(data.weight)), replace=False))
    with jax.enable_x64(True):
        hidden = data.hidden.astype(jnp.float64)
        logits = jax.jit(lambda h, w: h @ w.astype(jnp.float64).T)
        starts = range(0, len(data.weight), slice_size)
        lse, mean = jnp.full((n,), -jnp.inf), jnp.zeros(n)
        for start in starts:
            lse = jnp.logaddexp(lse, jax.nn.logsumexp(logits(hidden, data.weight[start : start + slice_size]), axis=1))
        of_slice = jax.jit(lambda h, w, lse: jnp.sum(jnp.exp((z := logits(h, w)) - lse[:, None]) * z, axis=1))
        for start in starts:
            mean += of_slice(hidden, data.weight[start : start + slice_size], lse)
        log_probs = jnp.einsum("nd,nd->n", hidden, data.weight[data.labels].astype(jnp.float64)) - lse
        log_p = logits(hidden, data.weight[rows]) - lse[:, None]
        a, b = (x.astype(jnp.float64)[:, None] for x in (data.log_prob_factors, data.entropy_factors))
        entropy = lse - mean
        of_log_probs = a * ((data.labels[:, None] == rows) - jnp.exp(log_p))
        of_entropy = -b * jnp.exp(log_p) * (log_p + entropy[:, None])
        gradients = {False: of_log_probs.T @ hidden, True: (of_log_probs + of_entropy).T @ hidden}
        return Truth(np.asarray(log_probs), np.asarray(entropy), rows, {k: np.asarray(x) for k, x in gradients.items()})


def errors(found: Any, gradients: Any, truth: Truth) -> list[float | None]:
    """RMS errors of log-probabilities, entropies and dW."""
    rms = lambda x, y: float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - y))))
    if not isinstance(found, tuple):
        return [None] * 3
    log_probs, entropy = found[:2]
    dw = gradients[1][truth.rows].astype(jnp.float32)
    of_entropy = None if entropy is None else rms(entropy, truth.entropy)
    return [rms(log_probs, truth.log_probs), of_entropy, rms(dw, truth.weight_gradients[entropy is not None])]


# --- the table --------------------------------------------------------------------------------------------------------


def head_lines(name: str, n: int) -> list[list[str]]:
    data = make_data(n, *HEADS[name])

    def compiled(function):
        steps = (function, data[:3]), (functools.partial(differentiated, function), data)
        return [jax.jit(step).lower(*args).compile() for step, args in steps]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = dict(zip(FUNCTIONS, pool.map(compiled, FUNCTIONS.values()), strict=True))
    truth = make_truth(data)
    found = {who: errors(*both(*data), truth=truth) for who, (_, both) in programs.items()}
    runs = {
        f"{who}, {i}": functools.partial(program, *(data if i else data[:3]))
        for who, pair in programs.items()
        for i, program in enumerate(pair)
    }
    times = in_rounds(runs, rounds=4, seconds=0.3)
    lines = []
    for who, pair in programs.items():
        shown = []
        for i in range(2):
            own, unit = times[f"{who}, {i}"], times[f"{LOSS}, {i}"]
            shown += [f"{own:.2f}", f"{own / unit:.3f}"]
        shown += [f"{program.memory_analysis().temp_size_in_bytes / 2**20:,.1f}" for program in pair]
        lines.append([name, who, *shown, *("–" if x is None else f"{x:.1e}" for x in found[who])])
        print(*lines[-1], flush=True)
    return lines


HEADER = [
    "head",
    "who",
    "fwd ms",
    "× loss",
    "fwd+bwd ms",
    "× loss",
    "fwd extra MiB",
    "fwd+bwd extra MiB",
    "log_probs error",
    "entropy error",
    "dW error",
]


# --- the picture ------------------------------------------------------------------------------------------------------


def extra_mib(function: Callable[..., Any], n: int, d: int, v: int) -> float:
    """What a training step needs beside inputs and gradients, compiled for an H200."""
    from liger_jax.planner.compilers import compile_for, gpu_devices

    shapes = ((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32), ((n,), jnp.float32), ((n,), jnp.float32)
    step = functools.partial(differentiated, function)
    return compile_for(step, shapes, gpu_devices("h200")[0], "gpu").memory_analysis().temp_size_in_bytes / 2**20


def draw(head: str) -> str:
    """Writes docs/log_probs.png, and returns its table."""
    d, v = HEADS[head]
    shown = {"log_probs": fused, "log_probs and entropy": functools.partial(fused, entropy=True)}
    shown["unfused log_probs"] = FUNCTIONS["unfused log_probs"]
    figures = {who: [extra_mib(function, n, d, v) for n in TOKENS] for who, function in shown.items()}
    figures["one float32 array of hidden's size"] = [4 * n * d / 2**20 for n in TOKENS]
    title = f"Forward and backward, D = {d:,}, V = {v:,}, bfloat16, compiled for an H200"
    styles = "o-", "s-", "^-", ":"
    _figures.memory_against_tokens(figures, styles, TOKENS, title, DOCS / "log_probs.png", yscale="log")
    return table(
        ["extra MiB", *(f"{n:,}" for n in TOKENS)], [[w, *(f"{x:,.0f}" for x in xs)] for w, xs in figures.items()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log_probs")
    parser.add_argument("--heads", nargs="+", choices=tuple(HEADS), default=["llama_8b", "qwen2_half_b"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--no-times", action="store_true", help="draw the picture only, which needs no GPU")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args()
    if not options.no_times:
        lines = [line for head in options.heads for line in head_lines(head, options.tokens)]
        command = f"python -m benchmarks.log_probs --heads {' '.join(options.heads)} --tokens {options.tokens}"
        save("log_probs", heading(command) + "\n" + table(HEADER, lines))
    if not options.no_picture:
        save(
            "log_probs_memory",
            heading("python -m benchmarks.log_probs --no-times", "compiled for an H200") + "\n" + draw("llama_8b"),
        )


if __name__ == "__main__":
    main()
