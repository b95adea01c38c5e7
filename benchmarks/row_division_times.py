"""What each device of a row takes for attention, in one pair of chunks or several, measured on one GPU.

    python -m benchmarks.row_division_times [--length 131072] [--devices 8] [--means 8192 0] [--heads 32] [--rows 4]

The GPU plays all devices one after the other: each gets its chunks of a packed row's queries, and all keys. Time is
that of attention, forward and backward, of all calls. All devices wait for the slowest, so a division is as good as its
slowest device is fast. Figures are means over rows, which are those of `benchmarks.row_division`; a mean of 0 is one
document. Heads are LLaMA-3-8B's 32 of queries with 8 of keys.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from benchmarks.row_division import rows_of
from liger_jax.ops.attention import in_chunks
from liger_jax.pallas_kernels.attention.intervals import Segments

WIDTH, RUNS = 128, 3


def starts_of(length: int, devices: int, pairs: int) -> np.ndarray:
    """Where the chunks of each device begin, (devices, 2 · pairs)."""
    size, device = length // (2 * devices * pairs), np.arange(devices)
    chunks = [(2 * devices * i + device, 2 * devices * (i + 1) - 1 - device) for i in range(pairs)]
    return size * np.stack([chunk for pair in chunks for chunk in pair], axis=1).astype(np.int32)


@jax.jit
def forward_and_backward(q, k, v, ids, starts, dout):
    attend = lambda q, k, v: in_chunks(q, k, v, Segments.of(ids), list(starts))
    out, back = jax.vjp(attend, q, k, v)
    return out, back(dout)


def times(begins: np.ndarray, devices: int, heads: int, pairs: int) -> list[float]:
    """Milliseconds of each device, for a row of which it is known where the document of each position begins."""
    length = len(begins)
    ids = jnp.asarray(np.cumsum(begins == np.arange(length))[None], jnp.int32)
    normal = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    q, dout = (normal(i, (1, length // devices, heads, WIDTH)) for i in range(2))
    k, v = (normal(2 + i, (1, length, max(1, heads // 4), WIDTH)) for i in range(2))
    found = []
    for starts in starts_of(length, devices, pairs):
        run = functools.partial(forward_and_backward, q, k, v, ids, jnp.asarray(starts), dout)
        found.append(_measure.wall_ms(run, jax.block_until_ready, iterations=RUNS))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_division_times")
    parser.add_argument("--length", type=int, default=131072, help="tokens in a row")
    parser.add_argument("--devices", type=int, default=8, help="that share it")
    parser.add_argument("--means", type=int, nargs="+", default=[8192, 0], help="of documents' lengths; 0 for one")
    parser.add_argument("--heads", type=int, nargs="+", default=[32], help="of queries, four for each of keys")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2, 4], help="of chunks, for each device")
    parser.add_argument("--rows", type=int, default=4, help="of each kind")
    parser.add_argument("--name", help="of a file under results/")
    arguments = parser.parse_args()
    rows, length = [], arguments.length
    text = _measure.heading(" ".join(["python -m benchmarks.row_division_times", *sys.argv[1:]]))
    print(text, flush=True)
    for heads in arguments.heads:
        for pairs in arguments.pairs:
            for mean in arguments.means:
                begins = rows_of(length, mean or None, arguments.rows if mean else 1, np.random.default_rng(0))
                found = np.array([times(row, arguments.devices, heads, pairs) for row in begins])
                row = [f"{heads}", f"{mean:,}" if mean else "one document", f"{pairs}"]
                row.append(f"{length // (2 * arguments.devices * pairs):,}")
                rows.append([*row, f"{found.max(axis=1).mean():.1f}", f"{found.mean():.1f}"])
                print(rows[-1], flush=True)
    header = ["heads", "documents' mean", "pairs", "tokens in a chunk", "slowest device, ms", "mean device, ms"]
    text += f"\nRows of {length:,} tokens over {arguments.devices} devices.\n\n{_measure.table(header, sorted(rows))}"
    _measure.show_or_save(arguments.name, text)


if __name__ == "__main__":
    main()
