"""What tests of trainers read of a run's folder, and a model whose log-probabilities they know."""

import csv
import types

import jax.numpy as jnp

from liger_jax import losses


def figures_of(out):
    """The steps of a run, each with the figures of its log that are not empty, by their names."""
    with (out / "log.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


class Model:
    """A model whose token log-probabilities are these, wherever a label is scored."""

    def __init__(self, log_probs):
        self._log_probs = log_probs

    def log_probs(self, input_ids, labels, segment_ids, positions):
        scored = losses.shifted_labels(labels, segment_ids) != -100
        return types.SimpleNamespace(log_probs=jnp.where(scored, self._log_probs, 0.0))
