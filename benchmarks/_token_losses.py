"""Training steps of losses of log-probabilities, in JAX and torch: times, memory, and errors against float64.

A loss here is a function of (hidden, weight, labels), of N tokens in a row. Its step is the loss with the gradients by
hidden and by the weight. `make_exact` makes log-probabilities and entropies in float64 from the same bfloat16 values,
and `Truth` has the loss and 512 random rows of dW.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure, _peers

HEADS = {"llama_8b": (4096, 128256), "qwen2_half_b": (896, 151936), "tiny": (64, 1024)}  # D, V
HEADER = ["head", "who", "ms a step", "× unit", "extra MiB", "loss − truth", "dW's error"]

Loss = Callable[..., Any]


# --- data and truth ---------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Hidden states (N, D) and a head (V, D) of random normals in bfloat16, whose logits have variance 1."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array


def make_data(n: int, d: int, v: int) -> Data:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (v, d), jnp.bfloat16) * d**-0.5).astype(jnp.bfloat16)
    return Data(hidden, weight, jax.random.randint(keys[2], (n,), 0, v))


class Exact(NamedTuple):
    """The log-normalisers, the labels' log-probabilities and the entropies in float64, each (N,)."""

    log_normalizers: np.ndarray
    log_probs: np.ndarray
    entropies: np.ndarray


def make_exact(data: Data) -> Exact:
    """Computed in slices of the vocabulary with 256 MiB of logits each."""
    n, slice_size = len(data.hidden), max(1, 2**25 // len(data.hidden))
    with jax.enable_x64(True):
        logits = lambda h, w: h @ w.astype(jnp.float64).T
        normalizer = jax.jit(lambda h, w: jax.nn.logsumexp(logits(h, w), axis=1))
        mean_logit = jax.jit(lambda h, w, lse: jnp.sum(jnp.exp((z := logits(h, w)) - lse[:, None]) * z, axis=1))
        hidden, lse, mean = data.hidden.astype(jnp.float64), jnp.full((n,), -jnp.inf), jnp.zeros(n)
        slices = [data.weight[start : start + slice_size] for start in range(0, len(data.weight), slice_size)]
        for rows in slices:
            lse = jnp.logaddexp(lse, normalizer(hidden, rows))
        for rows in slices:
            mean += mean_logit(hidden, rows, lse)
        target = jnp.einsum("nd,nd->n", hidden, data.weight[data.labels].astype(jnp.float64))
        return Exact(np.asarray(lse), np.asarray(target - lse), np.asarray(lse - mean))


class Truth(NamedTuple):
    """The true loss and dW[rows], in float64."""

    loss: float
    rows: np.ndarray
    weight_gradient: np.ndarray


def make_truth(data: Data, exact: Exact, loss_of: Callable[[jax.Array, jax.Array], jax.Array]) -> Truth:
    """The truth of a loss that is a function of the log-probabilities and the entropies, each (N,)."""
    v = len(data.weight)
    rows = np.sort(np.random.default_rng(0).choice(v, min(512, v), replace=False))
    with jax.enable_x64(True):
        hidden = data.hidden.astype(jnp.float64)
        loss, factors = jax.jit(jax.value_and_grad(loss_of, (0, 1)))(exact.log_probs, exact.entropies)
        a, b = (factor[:, None] for factor in factors)
        log_p = hidden @ data.weight[rows].astype(jnp.float64).T - exact.log_normalizers[:, None]
        of_log_probs = a * ((data.labels[:, None] == rows) - jnp.exp(log_p))
        of_entropies = -b * jnp.exp(log_p) * (log_p + exact.entropies[:, None])
        return Truth(float(loss), rows, np.asarray((of_log_probs + of_entropies).T @ hidden))


def plain_log_probs(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unfused log-probabilities and entropies: all logits, rounded to bfloat16."""
    log_p = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32), axis=1)
    return jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """What was measured of a loss's step."""

    who: str
    ms: float
    extra_mib: float | None
    loss_error: float | None = None  # relative to the true loss
    weight_error: float | None = None  # the RMS of (dW − truth) over that of the truth


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def row_of(who: str, ms: float, extra_mib: float | None, loss: float, dw: np.ndarray, truth: Truth | None) -> Row:
    """The row of a loss, with errors if there is a truth."""
    if truth is None:
        return Row(who, ms, extra_mib)
    loss_error = abs(loss - truth.loss) / abs(truth.loss)
    return Row(who, ms, extra_mib, loss_error, rms(dw - truth.weight_gradient) / rms(truth.weight_gradient))


def compiled_steps(
    losses: dict[str, Loss], data: Sequence[jax.Array], pool: concurrent.futures.Executor
) -> dict[str, Any]:
    """The steps of JAX's losses, as futures of compiled programs: all at once, before any of them is timed."""

    def compiled(who: str, loss: Loss) -> Any:
        start = time.perf_counter()
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*data).compile()
        print(f"  compiled {who} in {time.perf_counter() - start:.0f} s", flush=True)
        return step

    return {who: pool.submit(compiled, who, loss) for who, loss in losses.items()}


def jax_rows(steps: dict[str, Any], data: Sequence[jax.Array], truths: dict[str, Truth], rounds: int = 4) -> list[Row]:
    """Rows of compiled steps, which have their turns in the same rounds. A step that failed has none."""
    programs, checked = {}, {}
    for who, future in steps.items():
        try:
            step = future.result()
            loss, (_, dw) = step(*data)
        except Exception as error:  # that something cannot run here is a result, too
            print(f"  {who}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        programs[who] = functools.partial(step, *data)
        truth = truths.get(who)
        rows = np.zeros((0, 1)) if truth is None else np.asarray(dw[truth.rows].astype(jnp.float32), np.float64)
        extra_mib = step.memory_analysis().temp_size_in_bytes / 2**20
        checked[who] = functools.partial(row_of, who, extra_mib=extra_mib, loss=float(loss), dw=rows, truth=truth)
        del loss, dw
    times = _measure.in_rounds(programs, rounds=rounds, seconds=0.3)
    return [make(ms=times[who]) for who, make in checked.items()]


def torch_rows(losses: dict[str, Loss], data: Data, truth: Truth | None, rounds: int = 3) -> list[Row]:
    """Rows of torch's losses. One that fails is a printed line and no row."""
    if not losses:
        return []
    inputs, rows = _peers.torch_inputs(*data, "both"), []
    for who, loss in losses.items():
        step = _peers.TorchStep(loss, inputs)
        try:
            start = time.perf_counter()
            step.both()  # compiles
            step.wait()
            print(f"  {who}: first run {time.perf_counter() - start:.0f} s", flush=True)
            extra_mib = step.extra_mib(step.both)
            ms = _measure.in_rounds({who: step.both}, step.wait, rounds=rounds, seconds=0.3)[who]
            value = float(step.both())
            dw = step.weight_gradient(np.arange(0) if truth is None else truth.rows)
            rows.append(row_of(who, ms, extra_mib, value, dw, truth))
        except Exception as error:
            print(f"  {who}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        finally:
            step.free()
    return rows


def installed(peers: dict[str, Callable[[], dict[str, Loss]]]) -> dict[str, Loss]:
    """The losses of the peers that can be imported; a line for each that cannot."""
    losses = {}
    for name, peer in peers.items():
        try:
            losses |= peer()
        except Exception as error:  # some packages raise more than ImportError when a GPU or a version is wrong
            print(f"without {name}: {type(error).__name__}: {error}", flush=True)
    return losses


def lines(head: str, rows: list[Row], unit: str) -> list[list[str]]:
    """A table's lines, and prints them. The unit is one of the rows, by name."""
    unit_ms = next((row.ms for row in rows if row.who == unit), float("nan"))
    shown = lambda x, form: "–" if x is None else format(x, form)
    table = [
        [
            head,
            row.who,
            f"{row.ms:.2f}",
            f"{row.ms / unit_ms:.3f}",
            shown(row.extra_mib, ",.0f"),
            shown(row.loss_error, ".0e"),
            shown(row.weight_error, ".1e"),
        ]
        for row in rows
    ]
    for line in table:
        print(*line, sep=" | ", flush=True)
    gc.collect()
    return table
