"""Training steps of packed rows beside one segment, and with an attention softcap beside none.

    python -m benchmarks.packed_step [--cases llama-8x2048 ...]

A step is loss, gradients and plain SGD on random tokens in bfloat16, layers scanned, its state updated in place. Packed
rows have a boundary with probability 1/512 at each position, as in benchmarks.attention. Times are medians over rounds
in which both programs of a case have their turn.
"""

import argparse
import concurrent.futures
import dataclasses
import functools

import jax
import optax

from benchmarks._measure import heading, in_rounds, save, table
from benchmarks._models import SIZES, compiled_step, make_model, needed_bytes, runs
from benchmarks.attention import Case as Rows
from liger_jax.models import KernelOptions, LlamaConfig

LEARNING_RATE = 1e-4
MEAN = 512  # tokens of a segment


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and rows of tokens; what it is compared with is one segment, or no softcap."""

    model: str
    batch: int
    seq: int
    remat: str = "none"
    drops_softcap: bool = False

    def variants(self) -> dict[str, tuple[LlamaConfig, bool]]:
        """The case's variants by name: a config, and whether rows are packed."""
        config = SIZES[self.model]
        if self.drops_softcap:
            plain = dataclasses.replace(config, attn_logit_softcapping=None)
            return {"no softcap": (plain, False), "softcap": (config, False)}
        return {"one segment": (config, False), f"packed, mean {MEAN}": (config, True)}


CASES = {
    "llama-8x2048": Case("llama-3.2-1b", 8, 2048),
    "llama-2x8192": Case("llama-3.2-1b", 2, 8192),
    "gemma-4x2048": Case("gemma-2-2b", 4, 2048, remat="full", drops_softcap=True),
}


def rows_of(name: str, case: Case, pool: concurrent.futures.Executor) -> list[list[str]]:
    """A row for each variant of a case."""
    tokens = jax.random.randint(jax.random.key(1), (case.batch, case.seq), 0, SIZES[case.model].vocab_size)
    ids = Rows("", (case.batch, case.seq, 1, 1, 1), mean=MEAN).ids()
    variants = case.variants()
    batches = {
        who: dict(input_ids=tokens, labels=tokens) | (dict(segment_ids=ids) if is_packed else {})
        for who, (_, is_packed) in variants.items()
    }
    make = lambda config: functools.partial(make_model, config, KernelOptions(), remat=case.remat)
    optimizer = optax.sgd(LEARNING_RATE)
    futures = {who: pool.submit(compiled_step, make(v[0]), optimizer, batches[who]) for who, v in variants.items()}
    programs = {who: future.result() for who, future in futures.items()}
    times = in_rounds({who: runs(*program, batches[who]) for who, program in programs.items()})
    base = next(iter(times.values()))
    rows = []
    for who, ms in times.items():
        gib = needed_bytes(programs[who][1]) / 2**30
        rows.append([name, case.remat, who, f"{ms:.1f}", f"{tokens.size / ms * 1e3:,.0f}", f"{base / ms:.3f}"])
        rows[-1].append(f"{gib:.2f}")
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    arguments = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rows = [row for name in arguments.cases for row in rows_of(name, CASES[name], pool)]
    where = heading(f"python -m benchmarks.packed_step --cases {' '.join(arguments.cases)}")
    header = ["case", "remat", "rows", "ms a step", "tokens/s", "× the case's first", "GiB of the step"]
    save("packed_step", where + "\n" + table(header, rows))


if __name__ == "__main__":
    main()
