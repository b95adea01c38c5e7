"""The step that the planner chooses beside those of full, dots and none: tokens a second, and memory.

    python -m benchmarks.remat [--rows llama-3-8b:lora:4:2048 llama-3-8b:nf4:4:2048:24GiB …] [--remat auto full none]

A row is a model, what is trained ("all" in bfloat16, with moments in bfloat16; "lora": adapters of rank 16 beside
bfloat16 weights; "nf4": beside nf4 ones), the rows of a batch and their tokens, and a memory that the planner has to
keep to, if it is not the card's. A step is loss, gradients and AdamW on random weights that are made on the device.
Ways that the plan says do not fit are left out, and the choice, in bold, is timed once if it is one of the others. All
programs are compiled before the first one runs. Those of a row run in turn, on one state, and times are medians over
rounds. The peak is the allocator's, and known for the first program alone.
"""

import argparse
import concurrent.futures
import dataclasses
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, save, table
from benchmarks.lora import filled
from liger_jax.planner import compile_run
from liger_jax.planner.choosing import chosen
from liger_jax.planner.compilers import Compiled
from liger_jax.planner.devices import GIB, target
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.speed import speed
from liger_jax.planner.step import AUTO, Run, as_remat

ROWS = ["llama-3-8b:lora:4:2048", "llama-3-8b:nf4:4:2048", "llama-3.2-1b:lora:8:2048", "llama-3.2-1b:all:8:2048"]
ROWS += ["llama-3-8b:nf4:4:2048:24GiB", "llama-3-8b:lora:16:2048:80GiB", "llama-3-8b:all:4:4096"]
KINDS: dict[str, dict[str, Any]] = {
    "all": dict(param_dtype="bfloat16", state_dtype="bfloat16"),
    "lora": dict(lora=16, param_dtype="bfloat16"),
    "nf4": dict(lora=16, param_dtype="bfloat16", quantize="nf4"),
}
HEADER = ["model", "trained", "batch", "memory", "remat", "micro-batches", "ms a step", "tokens/s", "× the fastest"]
HEADER += ["estimated ms", "GiB, compiled", "allocator's peak"]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of a row's step."""

    row: str
    run: Run
    is_chosen: bool  # by the planner
    compiled: Compiled


def ways(row: str, remats: list[str], device: str) -> list[tuple[Run, bool]]:
    """The runs of a row that fit, the chosen one marked."""
    model, kind, batch, seq, *memory = row.split(":")
    run = make_run(
        model, batch=int(batch), seq=int(seq), device=device, memory=memory[0] if memory else None, **KINDS[kind]
    )
    choice = chosen(run) if AUTO in remats else None
    runs = [] if choice is None else [choice.run]
    for remat in remats:
        own = chosen(dataclasses.replace(run, remat=as_remat(remat)), remat_is_open=False) if remat != AUTO else None
        if own is not None and own.run not in runs:
            runs.append(own.run)
    return [(each, choice is not None and each == choice.run) for each in runs]


def compiled(args: argparse.Namespace, device: str) -> list[Way]:
    """All ways of all rows, compiled side by side."""
    each = [(row, *way) for row in args.rows for way in ways(row, args.remat, device)]

    def one(row: str, run: Run, is_chosen: bool) -> Way:
        begun = time.perf_counter()
        way = Way(row, run, is_chosen, compile_run(run, jax.devices()[:1]))
        print(f"compiled {row} {run.remat} in {time.perf_counter() - begun:.0f} s", flush=True)
        return way

    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        return list(pool.map(lambda way: one(*way), each))


def _zeros(x: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def timed(group: list[Way], rounds: int, seconds: float) -> list[list[str]]:
    """The lines of a row's ways, which run in turn on one state."""
    (weights, opt_state), tokens, *frozen = group[0].compiled.program.in_avals[0]
    state = filled(weights), jax.tree.map(_zeros, opt_state)
    frozen = [filled(each) for each in frozen]
    run = group[0].run
    tokens = jax.random.randint(jax.random.key(1), tokens.shape, 0, run.model.config.vocab_size)
    times: list[list[float]] = [[] for _ in group]
    loss = peak = None
    for turn in range(-1, rounds):  # the first one warms up
        for way, own in zip(group, times, strict=True):
            count = 2 if turn < 0 else max(1, math.ceil(seconds / speed(way.run).seconds))
            begun = time.perf_counter()
            for _ in range(count):
                state, loss = way.compiled.program(state, tokens, *frozen)
            jax.block_until_ready(loss)
            if peak is None:
                peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
            if turn >= 0:
                own.append((time.perf_counter() - begun) / count)
    assert loss is not None and bool(jnp.isfinite(loss)), loss
    for x in jax.tree.leaves((state, frozen)):
        x.delete()
    medians = [statistics.median(own) for own in times]
    lines = []
    for way, took in zip(group, medians, strict=True):
        model, kind, batch, seq, *memory = way.row.split(":")
        name = f"**{way.run.remat}**" if way.is_chosen else f"{way.run.remat}"
        size = [model, kind, f"{batch} × {int(seq):,}", *(memory or ["the card's"]), name, f"{way.run.micro_batches}"]
        speeds = [f"{1e3 * took:.0f}", f"{way.run.batch * way.run.seq / took:,.0f}", f"{min(medians) / took:.3f}"]
        speeds += [f"{1e3 * speed(way.run).seconds:.0f}", f"{way.compiled.total / GIB:.2f}"]
        lines.append([*size, *speeds, f"{peak / GIB:.2f}" if peak and way is group[0] else "–"])
        print("RESULT | " + " | ".join(lines[-1]) + " |", flush=True)
    return lines


def main() -> None:
    """Compiles, times and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--remat", nargs="+", default=[AUTO, "full", "dots", "none"])
    parser.add_argument("--device", default="h200", help="the card, by the planner's names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.2, help="of a turn")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no row is begun")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--save", help="a name in benchmarks/results")
    args = parser.parse_args()
    begun = time.perf_counter()
    print("card", target(args.device).capacity_bytes / GIB, "GiB", flush=True)
    all_ways, lines, first = compiled(args, args.device), [], True
    for row in args.rows:
        group = [way for way in all_ways if way.row == row]
        if not group or time.perf_counter() - begun > args.until:
            print(f"left out: {row}", flush=True)
            continue
        own = timed(group, args.rounds, args.seconds)
        lines += own if first else [[*line[:-1], "–"] for line in own]
        first = False
        print(f"{row}: {time.perf_counter() - begun:.0f} s", "estimated GiB", estimate(group[0].run).total / GIB)
    text = table(HEADER, lines)
    if args.save:
        save(args.save, heading("python -m benchmarks.remat") + "\n" + text)
    print(text)


if __name__ == "__main__":
    main()
