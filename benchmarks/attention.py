"""Causal attention by kernel, forward and backward: the evidence behind `ops.causal_attention`'s defaults.

    python -m benchmarks.attention [--cases packed] [--chunks]

Each row is measured against cuDNN's causal attention of the same shape, which knows no segments and no softcap. Packed
rows have a boundary with probability 1/mean at each position, so that short and long documents mix; the visible share
is that of the causal pairs. TFLOP/s count seven products over visible pairs: two forward, five backward. Times are
kernels' alone (CUPTI), temporaries the compiler's; cuDNN's workspace is not among them. `--chunks` adds XLA's chunks of
queries, which take minutes to compile.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import heading, program_ms, save, table
from liger_jax import causal_attention
from liger_jax.pallas_kernels.attention.reference import visible

SEED = 6  # whose packed rows see about what the mean row sees


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape and mask."""

    name: str
    shape: tuple[int, int, int, int, int]  # B, T, Q, K, H
    mean: int | None = None
    window: int | None = None
    softcap: float | None = None

    def ids(self) -> jax.Array | None:
        """Segment ids (B, T)."""
        if self.mean is None:
            return None
        boundaries = np.random.default_rng(SEED).random(self.shape[:2]) < 1 / self.mean
        return jnp.asarray(np.cumsum(boundaries, axis=1), jnp.int32)

    def visible_share(self) -> float:
        """The share of the causal pairs that the mask lets see each other."""
        length, ids = self.shape[1], self.ids()
        rows = [None] if ids is None else [row[None] for row in ids]
        pairs = sum(int(jnp.sum(visible(length, row, self.window))) for row in rows)
        return pairs / len(rows) / (length * (length + 1) / 2)


CASES = (
    Case("one segment", (8, 2048, 32, 8, 64)),
    Case("one segment", (2, 8192, 32, 8, 128)),
    Case("packed, mean 512", (8, 2048, 32, 8, 64), mean=512),
    Case("packed, mean 512", (8, 2048, 14, 2, 64), mean=512),
    Case("packed, mean 512", (2, 8192, 32, 8, 64), mean=512),
    Case("packed, mean 512", (2, 8192, 32, 8, 128), mean=512),
    Case("packed, mean 4,096", (1, 32768, 32, 8, 128), mean=4096),
    Case("window 1,024", (2, 8192, 32, 8, 128), window=1024),
    Case("softcap 50, window 4,096", (2, 8192, 8, 4, 256), window=4096, softcap=50.0),
)


def program(case: Case, kernel: str, ids: jax.Array | None, window: int | None, softcap: float | None):
    """Milliseconds of the value and all gradients, and MiB of temporaries; NaNs where the kernel cannot run."""
    batch, length, query_heads, kv_heads, width = case.shape
    keys = jax.random.split(jax.random.key(1), 4)
    q, k, v, dout = (
        jax.random.normal(key, (batch, length, heads, width), jnp.bfloat16)
        for key, heads in zip(keys, (query_heads, kv_heads, kv_heads, query_heads), strict=True)
    )
    attend = functools.partial(causal_attention, window=window, softcap=softcap, implementation=kernel)

    def run(q, k, v, dout, ids):
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, pullback(dout)

    try:
        compiled = jax.jit(run).lower(q, k, v, dout, ids).compile()
    except ValueError as error:  # the op's reason why not
        print(error)
        return float("nan"), float("nan")
    return program_ms(compiled, q, k, v, dout, ids), compiled.memory_analysis().temp_size_in_bytes / 2**20


def row(case: Case, chunks: bool) -> list[str]:
    """The cells of one row of the table."""
    batch, length, query_heads, _, width = case.shape
    unit, unit_mib = program(case, "cudnn", None, None, None)
    own, own_mib = program(case, "mosaic_gpu", case.ids(), case.window, case.softcap)
    share = case.visible_share()
    tflops = 7 * 2 * batch * query_heads * width * share * length * (length + 1) / 2 / own / 1e9
    cells = [case.name, str(case.shape), f"{share:.3f}", f"{unit:.2f} ({unit_mib:.0f})"]
    cells += [f"{own:.2f} ({own_mib:.0f})", f"{own / unit:.2f}", f"{tflops:.0f}"]
    same = program(case, "cudnn", None, case.window, None)[0] if case.window and not case.softcap else float("nan")
    cells.append("–" if np.isnan(same) else f"{same:.2f}")
    if chunks:
        cells.append("{:.1f} ({:.0f})".format(*program(case, "xla", case.ids(), case.window, case.softcap)))
    print(cells, flush=True)
    return cells


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="", help="part of the cases' names")
    parser.add_argument("--chunks", action="store_true", help="measure XLA's chunks, too")
    args = parser.parse_args()
    header = ["mask", "(B, T, Q, K, H), bf16", "visible", "cuDNN causal, ms (MiB)", "ours, ms (MiB)", "× cuDNN"]
    header += ["ours, TFLOP/s", "cuDNN with the window, ms"] + ["chunks, ms (MiB)"] * args.chunks
    rows = [row(case, args.chunks) for case in CASES if args.cases in case.name]
    command = "python -m benchmarks.attention" + f" --cases {args.cases!r}" * bool(args.cases)
    save("attention", heading(command + " --chunks" * args.chunks) + "\n" + table(header, rows))


if __name__ == "__main__":
    main()
