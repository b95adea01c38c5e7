"""Held-out losses of `make train`'s model, trained in several ways from the same weights on the same text.

A seed draws the model's first weights and the order of the text; the held-out text is always the same. All trainings of
a seed begin with the same weights and read the same text. The first way is trained once more from weights that are
larger by one in ten thousand: what that changes is chance.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks._measure import table
from examples._lib import text
from examples._lib.configuration import Training
from examples.train_llama import HELD_OUT_TOKENS, SIZES, make_optimizer
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import language_model_loss, make_step, meshes

SIZE = SIZES["small"]
STEPS_BETWEEN_LINES = 10
NUDGE = 1e-4  # of the weights from which chance's training begins


def training_of(steps: int, batch: int, **options: Any) -> Training:
    """`make train`'s training with other options; layers keep all for the backward, which is faster on a CPU.

    `steps`: of the training. `batch`: sequences of a step. `**options`: other fields of `Training`.
    """
    return dataclasses.replace(SIZE.training, steps=steps, batch=batch, remat="none", **options)


class Trainings:
    """Trainings that differ in their seed alone, compiled once.

    `corpus`: the text. `training`: how the model is trained. `mesh`: the devices, as `examples.train_llama --mesh`
    takes them; None for one.
    """

    def __init__(self, corpus: text.Text, training: Training, mesh: str | None = None):
        self.corpus, self.training, self.devices = corpus, training, meshes.Devices()
        if mesh is not None:
            abstract = lambda layout: nnx.eval_shape(lambda: self.model(0, layout))
            self.devices = meshes.chosen(mesh, jax.devices(), training.batch, abstract)
        self.optimizer = make_optimizer(training)
        graph, params = nnx.split(nnx.eval_shape(lambda: self.model(0, self.devices.layout)))
        types = params, jax.eval_shape(self.optimizer.init, params)
        self.step = self.devices.jitted(make_step(graph, self.optimizer), types, self.optimizer)
        self.loss = jax.jit(lambda params, tokens: language_model_loss(nnx.merge(graph, params), tokens))

    def model(self, seed: int, layout: Any) -> LlamaForCausalLM:
        """The model of `examples.train_llama` with a seed's weights."""
        vocab, length = self.corpus.vocab_size, self.training.length
        config = LlamaConfig(vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=length, **SIZE.model)
        options = self.training.model_options()
        options["kernels"] = dataclasses.replace(options["kernels"], layout=layout)
        return LlamaForCausalLM(config, **options, rngs=nnx.Rngs(seed))

    def held_out_loss(self, seed: int, nudge: float = 0.0) -> float:
        """The held-out loss at the end of a seed's training, from weights that are larger by this share."""
        batch, length, steps = self.training.batch, self.training.length, self.training.steps
        with self.devices.context():
            params = nnx.split(self.model(seed, self.devices.layout))[1]
            state = self.devices.started(jax.tree.map(lambda x: x * (1 + nudge), params), self.optimizer)
            for step in range(steps):
                tokens = self.corpus.batch(1_000_000 * seed + step, batch, length)
                state, loss = self.step(state, self.devices.place(tokens))
                loss.block_until_ready()  # a CPU's simulated devices can wait for each other if many steps are begun
                if (step + 1) % STEPS_BETWEEN_LINES == 0:
                    print(f"{time.strftime('%X')} seed {seed}, step {step + 1}: loss {float(loss):.4f}", flush=True)
            scored = self.corpus.held_out_batches(batch, length, most=max(1, HELD_OUT_TOKENS // batch // length))
            return float(np.mean([self.loss(state[0], self.devices.place(tokens)) for tokens in scored]))


def load(out: Path) -> text.Text:
    """`make train`'s text.

    `out`: folder for its tokens.
    """
    return text.load(None, SIZE.vocab, out, SIZE.characters)


def compared(trainings: dict[str, Trainings], seeds: tuple[int, ...]) -> str:
    """The table of held-out losses at the end of trainings, one after another.

    `trainings`: those to compare, by name. The others are compared with the first. `seeds`: a row for each.
    """
    first, *_ = trainings
    compared, rows, shares = [*trainings, "chance"], [], []
    for seed in seeds:
        losses = [training.held_out_loss(seed) for training in trainings.values()]
        losses.append(trainings[first].held_out_loss(seed, NUDGE))
        shares.append([100 * (loss / losses[0] - 1) for loss in losses[1:]])
        rows.append([str(seed), *(f"{loss:.4f}" for loss in losses), *(f"{share:+.2f} %" for share in shares[-1])])
        print(rows[-1], flush=True)
    if len(seeds) > 1:
        means, errors = np.mean(shares, axis=0), np.std(shares, axis=0, ddof=1) / len(seeds) ** 0.5
        ours = [f"{mean:+.2f} ± {error:.2f} %" for mean, error in zip(means, errors, strict=True)]
        rows.append(["mean, and its standard error", *[""] * len(compared), *ours])
    header = [*(f"held-out loss, {name}" for name in compared), *(f"{name} against {first}" for name in compared[1:])]
    return table(["seed", *header], rows)
