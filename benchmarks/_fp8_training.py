"""What FP8 products cost `make train`'s model in its held-out loss, on a GPU or on a CPU, which rounds to FP8 alike.

A seed draws the model's first weights and the order of the text; the held-out text is always the same. Both trainings
of a seed begin with the same weights and read the same text. Beside them bfloat16 is trained once more, from weights
that are larger by one in ten thousand: what that changes is chance.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks._measure import table
from examples._lib import text
from examples.train_llama import HELD_OUT_TOKENS, SIZES, make_optimizer
from liger_jax.models import KernelOptions, LlamaConfig, LlamaForCausalLM
from liger_jax.training import language_model_loss, make_step

SIZE = SIZES["small"]
PRODUCTS = {"bfloat16": None, "FP8": "fp8"}  # by what a table calls them
NUDGE = 1e-4  # of the weights that begin chance's training
STEPS_BETWEEN_LINES = 10


class Trainings:
    """Trainings that differ in their seed alone, compiled once.

    Args:
        corpus: the text.
        steps: of a training.
        batch: sequences of a step.
        products: as `KernelOptions` takes it.
    """

    def __init__(self, corpus: text.Text, steps: int, batch: int, products: Any):
        self.corpus, self.products = corpus, products
        self.training = dataclasses.replace(SIZE.training, steps=steps, batch=batch)
        self.optimizer = make_optimizer(self.training)
        graph = nnx.split(self.model(0))[0]
        self.step = jax.jit(make_step(graph, self.optimizer), donate_argnums=0)
        self.loss = jax.jit(lambda params, tokens: language_model_loss(nnx.merge(graph, params), tokens))

    def model(self, seed: int) -> LlamaForCausalLM:
        vocab, length = self.corpus.vocab_size, self.training.length
        config = LlamaConfig(
            vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=length, **SIZE.model
        )  # the model of `examples.train_llama`
        kernels = KernelOptions(products=self.products)
        return LlamaForCausalLM(config, dtype=jnp.bfloat16, kernels=kernels, rngs=nnx.Rngs(seed))

    def held_out_loss(self, seed: int, nudge: float = 0.0) -> float:
        """The held-out loss at the end of a seed's training, from weights that are larger by this share."""
        batch, length, steps = self.training.batch, self.training.length, self.training.steps
        params = jax.tree.map(lambda x: x * (1 + nudge), nnx.split(self.model(seed))[1])
        state = params, self.optimizer.init(params)
        for step in range(steps):
            state, loss = self.step(state, self.corpus.batch(1_000_000 * seed + step, batch, length))
            if (step + 1) % STEPS_BETWEEN_LINES == 0:
                print(f"{time.strftime('%X')} seed {seed}, step {step + 1}: loss {float(loss):.4f}", flush=True)
        scored = self.corpus.held_out_batches(batch, length, most=max(1, HELD_OUT_TOKENS // batch // length))
        return float(np.mean([self.loss(state[0], tokens) for tokens in scored]))


def converged(steps: int, batch: int, seeds: tuple[int, ...], out: Path) -> str:
    """The table of held-out losses at the end of trainings, one after another.

    Args:
        steps: of a training.
        batch: sequences of a step.
        seeds: a row for each.
        out: folder for the text's tokens.

    Returns:
        The table of held-out losses.
    """
    corpus = text.load(None, SIZE.vocab, out, SIZE.characters)
    trainings = [Trainings(corpus, steps, batch, products) for products in PRODUCTS.values()]
    rows, shares = [], []
    for seed in seeds:
        losses = [training.held_out_loss(seed) for training in trainings]
        losses.append(trainings[0].held_out_loss(seed, NUDGE))
        shares.append([100 * (loss / losses[0] - 1) for loss in losses[1:]])
        rows.append([str(seed), *(f"{loss:.4f}" for loss in losses), *(f"{share:+.2f} %" for share in shares[-1])])
        print(rows[-1], flush=True)
    means, errors = np.mean(shares, axis=0), np.std(shares, axis=0, ddof=1) / len(seeds) ** 0.5
    ours = [f"{mean:+.2f} ± {error:.2f} %" for mean, error in zip(means, errors, strict=True)]
    rows.append(["mean and its standard error", "", "", "", *ours])
    names = [*(f"{name} products" for name in PRODUCTS), f"bfloat16, weights × {1 + NUDGE:g}"]
    return table(["seed", *names, *(f"{name} against bfloat16" for name in ("FP8", "chance"))], rows)
