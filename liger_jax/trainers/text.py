"""The task of `liger-jax finetune`: each token is predicted from those before it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from liger_jax.trainers.task import Task
from liger_jax.training import loss_and_accuracy, score_sums, scored_tokens
from liger_jax.training.evaluation import mean_scores


class Text(Task):
    """Each token is predicted from those before it, with `FinetuneOptions`.

    Held-out rows are scored by their cross-entropy with either loss: "dft" is 0 for a token of probability 0.
    """

    figures = ("token_accuracy",)
    scored = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
    shown = ("loss", "token_accuracy", "tokens_per_second", "memory_gib")

    def loss(self, settings: Any, data: Any) -> Callable[..., Any]:
        """Their mean cross-entropy, or "dft"."""
        return functools.partial(loss_and_accuracy, token_scaling=settings.method.loss_type == "dft")

    def normalizer(self, settings: Any, data: Any) -> Callable[[Any], Any]:
        """The number of scored tokens."""
        return scored_tokens

    def sums(self, graph: Any, settings: Any, data: Any) -> Callable[..., Any]:
        """Loss, right predictions and scored tokens."""
        return score_sums(graph)

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The means of the sums, and the perplexity."""
        return mean_scores(totals)


TASK = Text()
