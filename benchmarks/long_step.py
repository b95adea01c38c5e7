"""Steps of long rows on a GPU: time, MFU with attention counted, and the allocator's peak beside the compiler's figure.

    python -m benchmarks.long_step [--rows 65536:8:offload 65536:8:full 32768:8:offload:4 …] [--model llama-3.1-8b]

A row is its tokens, the model's layers, where their inputs lie ("offload": in the host's memory; "full": on the
device), and into how many documents it is packed. A step is QLoRA of rank 32 on all seven projections, nf4, AdamW, with
random weights. All programs are compiled before the first one runs. Each runs once before it is timed. The peak is the
allocator's, and known for the first program alone; fill the table from several processes for more.

MFU counts 4·(parameters in matrix products)·T FLOP, forward and to the input, since frozen weights have no gradient,
and 6·L·D·T² of causal attention, over time and the card's published peak; packed documents count by their own lengths.
What is computed twice, because layers keep only their inputs, counts once.
"""

import argparse
import collections
import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import heading, save, table
from benchmarks.lora import filled
from liger_jax.models.core.stretched import stretched
from liger_jax.pallas_kernels.devices import GPUS
from liger_jax.planner import compile_run
from liger_jax.planner.compilers import Compiled
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import Run

ROWS = ["65536:8:offload", "65536:8:full", "32768:8:offload"]
HEADER = ["tokens", "layers", "documents", "layers' inputs", "s a step", "tokens/s", "MFU", "compiled, GiB"]
HEADER += ["allocator's peak, GiB", "host, GiB", "loss"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table, as the command names it."""

    seq: int
    layers: int
    remat: str
    documents: int = 1

    @classmethod
    def of(cls, text: str) -> "Row":
        seq, layers, remat, *documents = text.split(":")
        return cls(int(seq), int(layers), remat, *map(int, documents))

    def run(self, model: str, device: str) -> Run:
        run = make_run(model, batch=1, seq=1024, device=device, remat=self.remat, lora=32, quantize="nf4")
        config = stretched(dataclasses.replace(run.model.config, num_hidden_layers=self.layers), self.seq, "llama3")
        model_run = dataclasses.replace(run.model, config=config)
        return dataclasses.replace(run, model=model_run, seq=self.seq, packed=self.documents > 1)

    def flops(self, run: Run) -> float:
        """The FLOP of the model's step, each product counted once."""
        config = run.model.config
        projections = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
        layer = config.hidden_size * (projections + 3 * config.intermediate_size)
        products = self.layers * layer + config.vocab_size * config.hidden_size
        scores = config.num_attention_heads * config.head_dim * self.seq**2 / self.documents
        return 4.0 * products * self.seq + 6.0 * self.layers * scores

    def batch(self, run: Run) -> Any:
        tokens = jax.random.randint(jax.random.key(1), (1, self.seq), 0, run.model.config.vocab_size, jnp.int32)
        if self.documents == 1:
            return tokens
        each = self.seq // self.documents
        count = np.arange(self.seq, dtype=np.int32)[None]
        number = np.minimum(count // each, self.documents - 1)
        return dict(input_ids=tokens, labels=tokens, segment_ids=1 + number, positions=count - number * each)


def timed(row: Row, run: Run, compiled: Compiled, count: int) -> tuple[float, float, float]:
    """Seconds a step, the loss of the last one, and the allocator's peak in GiB."""
    adapters, opt_state = compiled.program.in_avals[0][0]
    frozen = filled(compiled.program.in_avals[0][2])
    state = filled(adapters), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), opt_state)
    batch, seconds, loss = row.batch(run), [], float("nan")
    for _ in range(1 + count):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(compiled.program(state, batch, frozen))
        seconds.append(time.perf_counter() - start)
        print(row, f"{seconds[-1]:.3f} s", flush=True)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return min(seconds[1:] or seconds), float(loss), peak / GIB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="TOKENS:LAYERS:REMAT[:DOCUMENTS]")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h200", help="by the planner's name")
    parser.add_argument("--count", type=int, default=2, help="timed steps; with 0 the first one is timed")
    parser.add_argument("--name", default="long_step", help="of the file under results/")
    arguments = parser.parse_args()
    rows = [Row.of(text) for text in arguments.rows]
    runs = [row.run(arguments.model, arguments.device) for row in rows]
    start = time.perf_counter()
    # One after the other: what XLA has tuned for one program, it knows for the next.
    compiled = [compile_run(run, jax.devices()[:1]) for run in runs]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', compiled[0].program.as_text()))
    print("the first one calls", dict(calls), flush=True)  # which says whose attention runs
    peak_flops = GPUS[arguments.device].peak_flops
    lines: list[list[str]] = []
    for row, run, program in zip(rows, runs, compiled, strict=True):
        seconds, loss, peak = timed(row, run, program, arguments.count)
        speed = [f"{seconds:.3f}", f"{row.seq / seconds:,.0f}", f"{row.flops(run) / seconds / peak_flops:.1%}"]
        needed = program.total / GIB
        held = "–" if lines or not peak else f"{peak:.2f} ({peak / needed - 1:+.1%})"
        sizes = [f"{row.seq:,}", f"{row.layers}", f"{row.documents}", row.remat]
        lines.append([*sizes, *speed, f"{needed:.2f}", held, f"{estimate(run).host / GIB:.1f}", f"{loss:.3f}"])
        print(lines[-1], flush=True)
    command = f"python -m benchmarks.long_step --model {arguments.model} --rows {' '.join(arguments.rows)}"
    save(arguments.name, heading(command) + "\n" + table(HEADER, lines))


if __name__ == "__main__":
    main()
