"""Mixtures of experts on one GPU: the grouped product's three directions, and the feed-forward, beside peers.

    python -m benchmarks.experts [--rows 65536 --experts 128 --products 2048,1536 768,2048] [--ragged-dot]

The unit is XLA's dense product of the same number of operations. Sizes of groups are drawn by a router whose experts
differ: the softmax of normal numbers of deviation 0.5. "even", "one group" and "half" are other sizes for the first
product. torch's `_grouped_mm`, tokamax's `ragged_dot` and Liger's fused mixture are timed where they are installed,
`jax.lax.ragged_dot` on request, since it may need the memory of a product for each group. Errors are RMS ones against
float64, over the RMS of the truth, at sampled entries; a product rounded to bfloat16 has about 1.7e-3. All programs of
a line take turns in rounds.
"""

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import heading, in_rounds, save, table, versions
from liger_jax import grouped_matmul, moe_mlp

DIRECTIONS = ("forward", "dX", "dW")


def drawn_sizes(kind: str, m: int, num_groups: int) -> np.ndarray:
    """Rows of each group, of sum m, the same in each run."""
    rng = np.random.default_rng(0)
    if kind == "one group":
        return np.where(np.arange(num_groups) == num_groups // 2, m, 0)
    if kind == "half":
        return np.where(np.arange(num_groups) % 2 == 0, m // (num_groups // 2), 0)
    shares = np.exp(0.5 * rng.standard_normal(num_groups)) if kind == "router" else np.ones(num_groups)
    return rng.multinomial(m, shares / shares.sum()) if kind == "router" else np.full(num_groups, m // num_groups)


def normal(i: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(i), shape)).astype(jnp.bfloat16)


def products(x, w, dy, sizes, implementation) -> dict[str, Callable[[], Any]]:
    """The three directions of an implementation, compiled."""
    op = functools.partial(grouped_matmul, implementation=implementation)
    if implementation == "ragged_dot":
        op = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes)
    if implementation == "tokamax":
        op = lambda x, w, sizes: importlib.import_module("tokamax").ragged_dot(x, w, sizes)
    if implementation == "dense":
        w, op = w[0], lambda x, w, sizes: x @ w
    functions = {
        "forward": op,
        "dX": lambda x, w, sizes, dy: jax.vjp(lambda x: op(x, w, sizes), x)[1](dy)[0],
        "dW": lambda x, w, sizes, dy: jax.vjp(lambda w: op(x, w, sizes), w)[1](dy)[0],
    }
    runs = {}
    for name, function in functions.items():
        arguments = (x, w, sizes) if name == "forward" else (x, w, sizes, dy)
        runs[name] = functools.partial(jax.jit(function).lower(*arguments).compile(), *arguments)
    return runs


def relative_error(result: Any, truth: np.ndarray) -> float:
    difference = np.asarray(result, np.float64) - truth
    return float(np.sqrt(np.mean(difference**2) / np.mean(truth**2)))


def errors(x, w, dy, sizes, runs) -> dict[str, float]:
    """The relative RMS errors of 48 rows of result and dX, and of 48 rows of the largest group's dW."""
    ends = np.cumsum(sizes)
    rows = np.random.default_rng(1).integers(0, ends[-1], 48)
    groups = np.searchsorted(ends, rows, side="right")
    wide = lambda a: np.asarray(a.astype(jnp.float32), np.float64)
    kernels = {g: wide(w[g]) for g in {*groups.tolist()}}
    y = np.stack([wide(x[r]) @ kernels[g] for r, g in zip(rows, groups, strict=True)])
    dx = np.stack([wide(dy[r]) @ kernels[g].T for r, g in zip(rows, groups, strict=True)])
    largest = int(np.argmax(sizes))
    own = slice(ends[largest] - sizes[largest], ends[largest])
    dw = wide(x[own, :48]).T @ wide(dy[own])
    results = {name: run() for name, run in runs.items()}
    checked = {"forward": results["forward"][rows], "dX": results["dX"][rows], "dW": results["dW"][largest, :48]}
    truths = {"forward": y, "dX": dx, "dW": dw}
    return {name: relative_error(x.astype(jnp.float32), truths[name]) for name, x in checked.items()}


def wait(result: Any) -> None:
    """Until a result of JAX or of torch is there."""
    if isinstance(result, jax.Array | tuple | list):
        jax.block_until_ready(result)
    else:
        importlib.import_module("torch").cuda.synchronize()


def torch_products(m, k, n, sizes) -> dict[str, Callable[[], Any]]:
    """The three directions by torch's grouped product; its weights lie as in transformers, and as (E, K, N)."""
    torch = importlib.import_module("torch")
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, w, dy = draw(m, k), draw(len(sizes), k, n), draw(m, n)
    offsets = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
    product = torch._grouped_mm
    return {
        "forward": lambda: product(x, w, offs=offsets),
        "dX": lambda: product(dy, w.transpose(1, 2), offs=offsets),
        "dW": lambda: product(x.t(), dy, offs=offsets),
    }


def torch_moe(n, d, f, num_experts, k, experts) -> dict[str, Callable[[], Any]]:
    """The mixture over torch's grouped product, as transformers' experts path orders it, forward and with gradients."""
    torch = importlib.import_module("torch")
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, weights, dy = draw(n, d).requires_grad_(), torch.rand(n, k, device="cuda").requires_grad_(), draw(n, d)
    gate_up, down = draw(num_experts, d, 2 * f).requires_grad_(), draw(num_experts, f, d).requires_grad_()
    chosen = torch.tensor(np.asarray(experts), device="cuda").reshape(-1)
    leaves = x, weights, gate_up, down

    def forward():
        order = torch.argsort(chosen, stable=True)
        sizes = torch.bincount(chosen, minlength=num_experts)
        offsets = torch.cumsum(sizes, 0, dtype=torch.int32)
        token = order // k
        gate, up = torch._grouped_mm(x[token], gate_up, offs=offsets).chunk(2, dim=-1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=offsets)
        y = y * weights.reshape(-1)[order, None].to(y.dtype)
        return y[torch.argsort(order)].view(n, k, d).sum(dim=1)

    return _alone_and_with_gradients(torch, forward, leaves, dy)


def liger_moe(n, d, f, num_experts, k, experts) -> dict[str, Callable[[], Any]]:
    """The mixture by Liger's kernels, forward and with gradients; its weights lie as (E, out, in)."""
    torch = importlib.import_module("torch")
    apply = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, weights, dy = draw(n, d).requires_grad_(), torch.rand(n, k, device="cuda").requires_grad_(), draw(n, d)
    gate_up, down = draw(num_experts, 2 * f, d).requires_grad_(), draw(num_experts, d, f).requires_grad_()
    chosen = torch.tensor(np.asarray(experts, np.int32), device="cuda")
    leaves = x, weights, gate_up, down
    forward = lambda: apply(x, gate_up, down, chosen, weights)
    return _alone_and_with_gradients(torch, forward, leaves, dy)


def _alone_and_with_gradients(torch, forward, leaves, dy) -> dict[str, Callable[[], Any]]:
    def alone():
        with torch.no_grad():
            return forward()

    return {"forward": alone, "both": lambda: dict(gradients=torch.autograd.grad(forward(), leaves, dy))}


def tried(make: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[], Any]]:
    """The programs of a peer that run here; says why, where one does not."""
    try:
        runs = make(*arguments)
    except Exception as error:
        print(f"{make.__name__}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return {}
    working = {}
    for name, run in runs.items():
        try:
            wait(run())
            working[name] = run
        except Exception as error:
            print(f"{make.__name__} {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return working


def product_lines(m, num_groups, k, n, kind, others) -> list[list[str]]:
    sizes = drawn_sizes(kind, m, num_groups)
    x, w, dy = normal(0, m, k), normal(1, num_groups, k, n, scale=k**-0.5), normal(2, m, n)
    arguments = x, w, dy, jnp.asarray(sizes, jnp.int32)
    runs = {name: products(*arguments, None if name == "ours" else name) for name in ("dense", "ours", *others)}
    own_errors = errors(x, w, dy, sizes, runs["ours"])
    runs["torch"] = tried(torch_products, m, k, n, sizes)
    runs["tokamax"] = tried(products, *arguments, "tokamax")
    lines = []
    for direction in DIRECTIONS:
        times = in_rounds({name: r[direction] for name, r in runs.items() if direction in r}, wait, 3, 0.1)
        unit, ours = times["dense"], times["ours"]
        peers = ", ".join(f"{name} {1e3 * t:.0f}" for name, t in times.items() if name not in ("dense", "ours"))
        lines.append(
            [
                f"{m}, {num_groups} of {k} → {n}, {kind}", direction, f"{1e3 * unit:.0f}", f"{1e3 * ours:.0f}",
                f"{unit / ours:.2f}", f"{2e-9 * m * k * n / ours:.0f}", peers or "–", f"{own_errors[direction]:.1e}",
            ]
        )  # fmt: skip
    return lines


def moe_lines(n, d, f, num_experts, k) -> list[list[str]]:
    logits = jax.random.normal(jax.random.key(5), (n, num_experts)) + 0.5 * jax.random.normal(
        jax.random.key(6), (1, num_experts)
    )
    chosen, experts = jax.lax.top_k(logits, k)
    arrays = (
        normal(0, n, d), jax.nn.softmax(chosen), normal(1, num_experts, d, 2 * f, scale=d**-0.5),
        normal(2, num_experts, f, d, scale=f**-0.5),
    )  # fmt: skip
    dy = normal(3, n, d)

    def forward(x, weights, gate_up, down):
        return moe_mlp(x, weights, experts, gate_up, down, activation="silu")

    def both(dy, *arrays):
        y, pullback = jax.vjp(forward, *arrays)
        return y, *pullback(dy)

    compiled = {
        "forward": (jax.jit(forward).lower(*arrays).compile(), arrays),
        "both": (jax.jit(both).lower(dy, *arrays).compile(), (dy, *arrays)),
    }
    ours = {name: functools.partial(function, *arguments) for name, (function, arguments) in compiled.items()}
    token = int(n // 2)
    wide = lambda a: np.asarray(a.astype(jnp.float32), np.float64)
    truth = 0.0
    for j in range(k):
        e = int(experts[token, j])
        gate, up = np.split(wide(arrays[0][token]) @ wide(arrays[2][e]), 2)
        truth += float(arrays[1][token, j]) * ((gate / (1 + np.exp(-gate)) * up) @ wide(arrays[3][e]))
    error = relative_error(ours["forward"]()[token].astype(jnp.float32), np.asarray(truth))
    peers = {"torch": tried(torch_moe, n, d, f, num_experts, k, experts)}
    peers["Liger"] = tried(liger_moe, n, d, f, num_experts, k, experts)
    lines = []
    for what, run in ours.items():
        of_peers = {name: runs[what] for name, runs in peers.items() if what in runs}
        times = in_rounds({"ours": run} | of_peers, wait, 3, 0.1)
        operations = 6 * n * k * d * f * (1 if what == "forward" else 3)
        extra = compiled[what][0].memory_analysis().temp_size_in_bytes / 2**20
        lines.append(
            [
                f"{n} tokens, {num_experts} experts, top {k}, D {d}, F {f}", what, f"{times['ours']:.2f}",
                f"{1e-9 * operations / times['ours']:.0f}", *(f"{times[x]:.2f}" if x in times else "–" for x in peers),
                f"{extra:.0f}", f"{error:.1e}" if what == "forward" else "–",
            ]
        )  # fmt: skip
    return lines


def main():
    parser = argparse.ArgumentParser()
    pair = lambda text: tuple(map(int, text.split(",")))
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--products", nargs="+", type=pair, default=[(2048, 1536), (768, 2048)])
    parser.add_argument("--ragged-dot", action="store_true")
    arguments = parser.parse_args()
    others = ["ragged_dot"] if arguments.ragged_dot else []
    cases = [(*shape, "router") for shape in arguments.products]
    cases += [(*arguments.products[0], kind) for kind in ("even", "one group", "half")]
    lines = []
    for k, n, kind in cases:
        lines += product_lines(arguments.rows, arguments.experts, k, n, kind, others)
        print(lines[-3:], flush=True)
    header = ["rows, groups, sizes", "what", "dense, µs", "ours, µs", "of dense", "TFLOP/s", "others, µs", "error"]
    peers = versions("torch", "liger-kernel", "tokamax")
    text = heading("python -m benchmarks.experts") + peers + "\n\n" + table(header, lines)
    header = ["moe_mlp, bf16", "what", "ours, ms", "TFLOP/s", "torch, ms", "Liger, ms", "extra MiB", "error"]
    text += "\n" + table(header, moe_lines(arguments.rows // 8, 2048, 768, arguments.experts, 8))
    save("experts", text)


if __name__ == "__main__":
    main()
