"""How even is attention where devices share packed rows? Three divisions of rows, counted from packings.

    python -m benchmarks.row_division [--rows 64] [--name row_division]

A row's positions see the earlier ones of their own document, and attention's work is the number of pairs that see each
other, counted in whole tiles of 64 queries and 64 keys, as kernels compute them. A row is divided

    as one pair    2c chunks, of which device i of c has the chunks i and 2c − 1 − i
    as it is       a long row as two pairs, as `ops.layout.in_chunks` does it
    in stripes     of 512 positions, which devices take in turn

The first three figures are the busiest device's work over the mean, less 1: rows follow one another, and devices wait
for each other in each of them. The last three are what a layer of LLaMA-3-8B loses by it: the same, times attention's
share of the layer's products.

Documents have lengths whose logarithms are normally distributed with a standard deviation of 1. They are packed by
`training.pack`; a longer document than a row is cut.
"""

import argparse

import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from liger_jax.ops.layout import in_chunks
from liger_jax.planner.architectures import architecture
from liger_jax.training import pack

TILE, STRIPE, SPREAD = 64, 512, 1.0
LENGTHS, DEVICES, MEANS = (8192, 32768, 131072), (2, 4, 8), (512, 2048, 8192, 32768, None)
DIVISIONS = ("as one pair", "as it is", "in stripes")


def rows_of(length: int, mean: int | None, count: int, rng: np.random.Generator) -> np.ndarray:
    """Where the document of each position begins, (count, length); with no mean each row is one document."""
    if mean is None:
        return np.zeros((count, length), np.int64)
    number = 2 * count * length // mean + 16
    sizes = np.maximum(1, rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, number)).astype(int)
    positions = pack([np.zeros(size, np.int32) for size in sizes], length)["positions"][:count]
    return np.arange(length) - positions


def work(starts: np.ndarray) -> np.ndarray:
    """The pairs that the tiles of each TILE queries compute, (rows, length // TILE)."""
    tiles = starts.reshape(len(starts), -1, TILE)
    first = tiles.min(axis=2) // TILE  # documents follow one another: the first key is that of the first query
    return (np.arange(tiles.shape[1]) + 1 - first) * TILE * TILE


def owners(length: int, devices: int) -> dict[str, np.ndarray]:
    """The device of each TILE positions, by each of DIVISIONS."""
    first = np.arange(length // TILE) * TILE
    chunk = first // (length // (2 * devices))
    device = np.empty(length, np.int64)
    device[np.asarray(in_chunks(jnp.arange(length), 0, devices))] = np.repeat(np.arange(devices), length // devices)
    every = np.minimum(chunk, 2 * devices - 1 - chunk), device[::TILE], first // STRIPE % devices
    return dict(zip(DIVISIONS, every, strict=True))


def imbalance(tiles: np.ndarray, owner: np.ndarray, devices: int) -> float:
    """The busiest device's work over the mean, less 1, summed over rows."""
    of_each = np.stack([tiles[:, owner == device].sum(axis=1) for device in range(devices)], axis=1)
    return float(of_each.max(axis=1).sum() / of_each.mean(axis=1).sum() - 1)


def share_of_attention(starts: np.ndarray, model: str = "llama-3-8b") -> float:
    """Attention's products beside all of a layer's, by the pairs that see each other."""
    found = architecture(model)
    config = found.config
    tables = 2 * config.vocab_size * config.hidden_size
    layer = 2 * (found.num_parameters - tables) / config.num_hidden_layers
    seen = float((np.arange(starts.shape[1]) - starts + 1).mean())
    attention = 4 * config.num_attention_heads * config.head_dim * seen
    return attention / (attention + layer)


def lines(count: int) -> list[list[str]]:
    """A row for each length of rows, mean of documents and number of devices."""
    rng, rows = np.random.default_rng(0), []
    for length in LENGTHS:
        for mean in MEANS:
            if mean is not None and mean > length:
                continue
            starts = rows_of(length, mean, count, rng)
            tiles, share = work(starts), share_of_attention(starts)
            for devices in DEVICES:
                uneven = [imbalance(tiles, owner, devices) for owner in owners(length, devices).values()]
                row = [f"{length:,}", f"{mean:,}" if mean else "one document", str(devices)]
                row += [f"{each:.0%}" for each in uneven] + [f"{share:.0%}"]
                rows.append(row + [f"{each * share:.1%}" for each in uneven])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_division")
    parser.add_argument("--rows", type=int, default=64, help="of each kind")
    parser.add_argument("--name", help="of a file under results/")
    arguments = parser.parse_args()
    text = f"`python -m benchmarks.row_division --rows {arguments.rows}`, counted: nothing is run.\n\n"
    text += "The busiest device's attention beyond the mean, and what a layer of LLaMA-3-8B loses by it.\n\n"
    header = ["tokens in a row", "documents' mean", "devices", *DIVISIONS, "attention's share"]
    header += ["a layer loses as one pair", *DIVISIONS[1:]]
    text += _measure.table(header, lines(arguments.rows))
    _measure.show_or_save(arguments.name, text)


if __name__ == "__main__":
    main()
