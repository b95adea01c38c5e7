"""Grain's loader in front of this library's training step, with this library's packing as one of its transformations.

    python -m examples.integrations_grain

It needs `pip install grain`. Grain shuffles documents, packs each few hundred of them into rows, and batches the rows,
so that every batch has one shape and the step is compiled once. Its iterator's state says which document comes next:
store it beside a checkpoint.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import adamw, make_step, pack

VOCAB, LENGTH, ROWS = 128, 32, 4


def documents(count=400, seed=0):
    """Documents of 2 to 24 tokens that count upwards."""
    rng = np.random.default_rng(seed)
    return [np.arange(start, start + length) % VOCAB for start, length in rng.integers(2, 24, (count, 2))]


def batches(source, group=64):
    """Packed batches of documents, as an iterator of grain's.

    Args:
        source: documents, in anything with a length and indices.
        group: how many documents are packed together; with more of them fewer places stay empty.

    Returns:
        An endless iterator of the model's arguments, int32 arrays of (ROWS, LENGTH).
    """
    import grain  # pyright: ignore[reportMissingImports]
    from grain import experimental  # pyright: ignore[reportMissingImports]

    @dataclasses.dataclass(frozen=True)
    class Pack(experimental.FlatMapTransform):
        """Rows of a group of documents, one element each."""

        max_fan_out: int = group  # a document needs no more than one row here

        def flat_map(self, element):
            packed = pack(element, LENGTH)
            return [{name: x[row] for name, x in packed.items()} for row in range(len(packed["input_ids"]))]

    groups = grain.MapDataset.source(source).shuffle(seed=0).repeat().batch(group, batch_fn=list)
    rows = experimental.apply_transformations(groups.to_iter_dataset(), [Pack()])
    return iter(rows.batch(ROWS, drop_remainder=True))


def train(loader, steps):
    """Trains on the next batches of a loader.

    Args:
        loader: an iterator of the model's arguments.
        steps: how many batches.

    Returns:
        Each step's loss.
    """
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    graph, params = nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
    optimizer = adamw(1e-2)
    step, state, losses = jax.jit(make_step(graph, optimizer)), (params, optimizer.init(params)), []
    for batch in itertools.islice(loader, steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def main(steps=20):
    """Trains on packed documents.

    Args:
        steps: how many batches.

    Returns:
        Each step's loss.
    """
    losses = train(batches(documents()), steps)
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
