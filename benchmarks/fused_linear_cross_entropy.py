"""The fused loss against its peers on one GPU: time, memory and the rounding of dW.

    python -m benchmarks.fused_linear_cross_entropy [--shapes llama-3-8b-head 256,512,1024] [--peers …]

Each row is a whole training step of the mean loss: the loss, and its gradients by hidden and by the weight, as
`jax.jit(jax.value_and_grad(loss, (0, 1)))` and as torch's `loss.backward()`. Times are the host's around runs queued
one behind the other, medians over rounds in which all programs of a shape have their turn (`_measure.in_rounds`).
"Extra" memory is beside inputs and gradients: for JAX the compiler's figure, for torch the peak of its allocator. Three
matmuls are three times the faster of JAX's and torch's `x @ w.T` in bf16, on the same data in the same run. Torch runs
in a process of its own: a peer's illegal access ends only its own. With `--ours-alone` the unit is JAX's matmul alone,
which may be the slower one: such ratios are lower.

Liger's and QuACK's Hopper kernels need CUTLASS's package, and run together with liger-kernel 0.8.5, quack-kernels
0.6.5, nvidia-cutlass-dsl 4.7.1 and apache-tvm-ffi 0.1.15 (torch 2.11.0).

dW's error is the RMS of (dW − truth) over 512 random rows of the vocabulary, divided by that of the unfused bf16 step
("XLA full logits, bf16"). The truth is computed in float64 from the same bf16 values.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure, _peers
from benchmarks._loss_report import HEADER, REFERENCE, Results, Row, draw, notes, table_lines
from benchmarks._shapes import HEADS, SHAPES
from liger_jax import fused_linear_cross_entropy
from liger_jax.pallas_kernels.tiles import round_up

DEFAULT_SHAPES = [*HEADS, "small"]
MODES = ("fast", "bounded", "lean", "auto")
TRAINED = {"both": (0, 1), "frozen_head": (0,), "frozen_trunk": (1,), "forward": ()}


class Data(NamedTuple):
    """A shape's inputs, and the truth: the loss, and some rows of dW."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    rows: np.ndarray
    loss: float
    weight_gradient: np.ndarray


# --- data and truth ---------------------------------------------------------------------------------------------------


def make_inputs(shape: tuple[int, int, int], data: str, weight_dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden, weight and labels. A float32 weight has the bf16 one's values: products take them in bf16 anyway."""
    n, d, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (v, d), jnp.bfloat16) * d**-0.5
    labels = jax.random.randint(keys[2], (n,), 0, v)
    if data == "confident":
        hidden = (hidden + confident_lift(d, v) * weight[labels].astype(jnp.float32)).astype(jnp.bfloat16)
    return hidden, weight.astype(weight_dtype), labels


def confident_lift(d: int, v: int) -> float:
    """The multiple of the label's weight row that makes a token's mean loss about 2.4, as in a trained model.

    Logits are normal of variance 1, and the label's is higher by lift·|w|² ≈ lift. The others' log-sum-exp is
    ln V + ½ + lift²/2D, and softplus of a normal of mean 2.25 and variance 1 has the mean 2.4.
    """
    lift = math.log(v) + 0.5 - 2.25
    return max(0.0, lift + lift**2 / (2 * d))


def make_data(shape: tuple[int, int, int], data: str, weight_dtype: str) -> Data:
    hidden, weight, labels = make_inputs(shape, data, weight_dtype)
    rows = np.sort(np.random.default_rng(0).choice(shape[2], min(512, shape[2]), replace=False))
    return Data(hidden, weight, labels, rows, *truth(hidden, weight, labels, rows))


def truth(hidden: jax.Array, weight: jax.Array, labels: jax.Array, rows: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss and dW[rows] in float64, computed in slices of the vocabulary with 256 MiB of logits each."""
    n, slice_size = len(hidden), max(1, 2**25 // len(hidden))
    with jax.enable_x64(True):
        h, w = hidden.astype(jnp.float64), lambda index: weight[index].astype(jnp.float64)
        part = jax.jit(lambda h, w: jax.nn.logsumexp(h @ w.T, axis=1))
        lse = jnp.full((n,), -jnp.inf)
        for start in range(0, len(weight), slice_size):
            lse = jnp.logaddexp(lse, part(h, w(slice(start, start + slice_size))))
        loss = jnp.mean(lse - jnp.einsum("nd,nd->n", h, w(labels)))
        softmax = jnp.exp(h @ w(rows).T - lse[:, None])
        gradient = (softmax - (labels[:, None] == rows)).T @ h / n
        return float(loss), np.asarray(gradient)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# --- one row ----------------------------------------------------------------------------------------------------------


def full_logits(hidden, weight, labels, *, accumulate=None):
    """Plain JAX, unfused: logits rounded to bf16, or with `accumulate=float32` kept as the matmul sums them."""
    weight = weight.astype(hidden.dtype)
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=accumulate).astype(jnp.float32)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - target)


class JaxPrograms:
    """JAX losses on one shape, compiled and checked, then timed together; one program may serve several names."""

    def __init__(self, data: Data, what: str):
        self.data, self.what = data, what
        self.checked: dict[str, concurrent.futures.Future[Row]] = {}
        matmul_arguments = data.hidden, data.weight.astype(jnp.bfloat16)
        matmul = jax.jit(lambda x, w: x @ w.T).lower(*matmul_arguments).compile()
        self.programs: dict[str, Callable[[], Any]] = {"matmul": lambda: matmul(*matmul_arguments)}

    def row(
        self,
        who: str,
        family: str,
        loss: Callable[..., jax.Array],
        weight_layout: str = "vd",
        data: Data | None = None,
    ) -> Row:
        """A row of the loss on the shape's own data, or on other data."""
        data = data or self.data
        weight = data.weight if weight_layout == "vd" else jnp.array(data.weight.T)
        args = data.hidden, weight, data.labels
        forward = jax.jit(loss).lower(*args)
        step = jax.jit(jax.value_and_grad(loss, TRAINED[self.what])).lower(*args) if TRAINED[self.what] else forward
        future = concurrent.futures.Future()
        claimed = self.checked.setdefault(step.as_text(), future)
        if claimed is future:
            try:
                future.set_result(self._check(who, forward, step, args, weight_layout, data))
            except Exception as error:
                future.set_exception(error)
        return dataclasses.replace(claimed.result(), who=who, family=family)

    def _check(self, key: str, forward, step, args, weight_layout: str, data: Data) -> Row:
        """Measures all but the times, for which the programs wait until `times`."""
        forward, row = forward.compile(), Row("", "", key=key, true_loss=data.loss)
        row.loss = float(forward(*args))
        self.programs[f"forward {row.key}"] = lambda: forward(*args)
        step = step.compile() if TRAINED[self.what] else forward
        row.extra_mib = step.memory_analysis().temp_size_in_bytes / 2**20
        if not TRAINED[self.what]:
            return row
        self.programs[f"both {row.key}"] = lambda: step(*args)
        row.loss, gradients = step(*args)
        row.loss = float(row.loss)
        if 1 in TRAINED[self.what]:
            dw = gradients[-1] if weight_layout == "vd" else gradients[-1].T
            dw = np.asarray(dw[data.rows].astype(jnp.float32), np.float64)
            row.weight_error = rms(dw - data.weight_gradient)
        return row

    def times(self, rows: list[Row], rounds: int) -> float:
        """Measures all programs and writes their times into the rows; returns one matmul's."""
        times = _measure.in_rounds(self.programs, rounds=rounds)
        for row in rows:
            row.forward_ms, row.both_ms = times.get(f"forward {row.key}"), times.get(f"both {row.key}")
        return times["matmul"]


def torch_row(who: str, loss: Callable[..., Any], inputs: _peers.TorchInputs, data: Data, what: str) -> Row:
    """Measures a torch loss; without a GPU no memory."""
    step, row = _peers.TorchStep(loss, inputs), Row(who, "torch")
    try:
        row.loss = float(step.forward())
        run = step.both if TRAINED[what] else step.forward
        row.extra_mib = step.extra_mib(run)
        times = _measure.in_rounds({"forward": step.forward, "both": run}, step.wait, rounds=3)
        row.forward_ms = times["forward"]
        if TRAINED[what]:
            row.both_ms = times["both"]
            row.loss = float(step.both())
        if 1 in TRAINED[what]:
            row.weight_error = rms(step.weight_gradient(data.rows) - data.weight_gradient)
    finally:
        step.free()
    return row


def attempt(who: str, family: str, measure: Callable[[], Row]) -> Row:
    """A row in any case: that something cannot run here is a result, too."""
    try:
        row = measure()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        row = Row(who, family, failure=reason if len(reason) <= 300 else reason[:300] + " …")
    print(f"  {who}: {row.failure or f'loss {row.loss:.4f}, {row.extra_mib or 0:.0f} MiB'}", flush=True)
    return row


# --- all rows of a shape ----------------------------------------------------------------------------------------------


def our_rows(
    shape: tuple[int, int, int], options: argparse.Namespace, programs: JaxPrograms
) -> Iterator[Callable[[], Row]]:
    """Attempts at our rows. "Bounded" is the fast mode within the bytes of a 16-bit dW and 2,048 tokens' logits.

    Where another size stands beside a shape's own, both take part in the same rounds.
    """
    sizes = [(shape, programs.data, "")]
    if options.beside is not None and shape[2] % options.beside:
        v = round_up(shape[2], options.beside)
        sizes.append(((*shape[:2], v), make_data((*shape[:2], v), options.data, options.weight_dtype), f", V = {v:,}"))
    choices = itertools.product(options.modes, options.implementations, sizes)
    for mode, implementation, ((_, d, v), data, suffix) in choices:
        loss = functools.partial(
            fused_linear_cross_entropy,
            mode="fast" if mode == "bounded" else mode,
            memory_budget_bytes=2 * v * d + 4096 * v if mode == "bounded" else None,
            implementation=None if implementation == "auto" else implementation,
            chunk_size=options.chunk_size,
        )
        who = f"liger-jax {mode}, {implementation}{suffix}"
        row = functools.partial(programs.row, who, "liger-jax", loss, data=data)
        yield functools.partial(attempt, who, "liger-jax", row)
    for mib in options.budgets:
        loss = functools.partial(fused_linear_cross_entropy, memory_budget_bytes=mib * 2**20)
        who = f"liger-jax in {mib:,} MiB"
        yield functools.partial(attempt, who, "liger-jax", functools.partial(programs.row, who, "liger-jax", loss))


def jax_rows(options: argparse.Namespace, programs: JaxPrograms, absent: set[str]) -> Iterator[Callable[[], Row]]:
    """Attempts at the rows of plain JAX and of peers in JAX."""
    plain = {} if options.ours_alone else {REFERENCE: full_logits}
    if options.peers:
        plain["XLA full logits, float32"] = functools.partial(full_logits, accumulate=jnp.float32)
    for who, loss in plain.items():
        yield functools.partial(attempt, who, "jax", functools.partial(programs.row, who, "jax", loss))
    for who, loss in peer_losses(options.peers, _peers.JAX_PEERS, absent):
        yield functools.partial(attempt, who, "jax", functools.partial(programs.row, who, "jax", loss, "dv"))


def torch_results(shape: tuple[int, int, int], options: argparse.Namespace) -> tuple[float | None, list[Row], set[str]]:
    """One matmul in ms where torch has the GPU, the rows, and the peers that cannot be imported."""
    data, absent = make_data(shape, options.data, options.weight_dtype), set()
    inputs = _peers.torch_inputs(data.hidden, data.weight, data.labels, options.what)
    weight = inputs.weight.detach().to(inputs.hidden.dtype)
    matmul = _peers.TorchStep(lambda hidden, _weight, _labels: hidden @ weight.T, inputs)
    matmul_ms = _measure.in_rounds({"matmul": matmul.forward}, matmul.wait)["matmul"]
    matmul.free()
    del weight, matmul
    rows = [
        attempt(who, "torch", functools.partial(torch_row, who, loss, inputs, data, options.what))
        for who, loss in peer_losses(options.peers, _peers.TORCH_PEERS, absent)
    ]
    return matmul_ms, rows, absent


def peer_losses(
    names: list[str], peers: dict[str, Callable[[], _peers.Losses]], absent: set[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names and losses of the peers that can be imported; the others go to `absent`."""
    for name in names:
        if name in peers:
            try:
                yield from peers[name]().items()
            except Exception as error:  # some packages raise more than ImportError when a GPU or a version is wrong
                absent.add(f"{name} ({type(error).__name__}: {error})")


def shape_results(shape: tuple[int, int, int], options: argparse.Namespace, absent: set[str]) -> Results:
    data = make_data(shape, options.data, options.weight_dtype)
    print(f"{shape}: loss {data.loss:.4f}", flush=True)
    programs = JaxPrograms(data, options.what)
    attempts = [*our_rows(shape, options, programs), *jax_rows(options, programs, absent)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # most of an attempt is compilation
        rows = list(pool.map(lambda attempt: attempt(), attempts))
    matmul_ms = programs.times(rows, options.rounds)
    print(f"{shape}: one matmul {matmul_ms:.3f} ms", flush=True)
    if options.ours_alone:
        return Results(3 * matmul_ms, rows, data.loss)
    if importlib.util.find_spec("torch") is None:
        absent.update(f"{name} (no torch)" for name in options.peers if name in _peers.TORCH_PEERS)
        return Results(3 * matmul_ms, rows, data.loss)
    try:
        torch_ms, torch_rows, torch_absent = _measure.in_own_process(torch_results, shape, options)
    except Exception as error:
        rows.append(Row("torch's process", "torch", failure=f"{type(error).__name__}: {error}"))
        return Results(3 * matmul_ms, rows, data.loss)
    absent.update(torch_absent)
    return Results(3 * min(matmul_ms, torch_ms or math.inf), rows + torch_rows, data.loss)


# --- the command ------------------------------------------------------------------------------------------------------


def versions(peers: list[str]) -> str:
    packages = [package for peer in peers for package in _peers.PACKAGES.get(peer, (peer,))]
    if any(peer in _peers.TORCH_PEERS for peer in peers):
        packages += ["torch", "triton"]
    return _measure.versions(*packages)


def parse_shape(name: str) -> tuple[int, int, int]:
    if name in SHAPES:
        return SHAPES[name]
    try:
        n, d, v = map(int, name.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name!r} is neither one of {list(SHAPES)} nor N,D,V") from None
    return n, d, v


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_linear_cross_entropy")
    defaults = [SHAPES[name] for name in DEFAULT_SHAPES]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=defaults, help=f"of {list(SHAPES)}, or N,D,V")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--implementations", nargs="*", default=["xla", "triton", "mosaic_gpu", "auto"])
    peers = [*_peers.JAX_PEERS, *_peers.TORCH_PEERS]
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--ours-alone", action="store_true", help="beside JAX's matmul alone; --peers without names")
    parser.add_argument("--budgets", nargs="*", type=int, default=[], help="our rows too with so many MiB at most")
    parser.add_argument("--beside", type=int, help="our rows too with the next vocabulary that is a multiple of it")
    parser.add_argument("--data", choices=("random", "confident"), default="random")
    parser.add_argument("--weight-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk-size", type=int, help="of our rows alone")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    parser.add_argument("--what", choices=list(TRAINED), default="both", help="what is trained")
    parser.add_argument("--name", default="fused_linear_cross_entropy", help="of the files, without their endings")
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    return parser.parse_args(arguments)


def report(
    options: argparse.Namespace, results: dict[tuple[int, int, int], Results], absent: set[str], command: str
) -> None:
    """Writes the table and the picture of the shapes so far."""
    heading = "; ".join(filter(None, (_measure.heading(command).rstrip(), versions(options.peers))))
    setting = f"Data: {options.data}; weight: {options.weight_dtype}; trained: {options.what}."
    methods = "Times: medians over rounds in which every program has its turn."
    lines = [table_lines(shape, result.three_ms, result.rows) for shape, result in results.items()]
    text = f"{heading}\n\n{setting} {methods}\n\n{_measure.table(HEADER, list(itertools.chain(*lines)))}\n"
    for shape, result in results.items():
        text += "".join(f"- {shape}: {note}\n" for note in notes(result.rows, result.loss))
    text += "".join(f"- not importable: {peer}\n" for peer in sorted(absent))
    _measure.save(options.name, text, options.folder)
    title = f"{heading.split(', `')[0]}. {setting}"
    draw(results, options.folder / f"{options.name}.png", title)


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = parse_options(sys.argv[1:])
    command = " ".join(["python -m benchmarks.fused_linear_cross_entropy", *sys.argv[1:]])
    results, absent = {}, set()
    for shape in options.shapes:
        results[shape] = shape_results(shape, options, absent)
        report(options, results, absent, command)


if __name__ == "__main__":
    main()
