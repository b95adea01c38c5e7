"""What `liger-jax finetune` trains for: that each token is predicted from those before it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from liger_jax.trainers.task import Task
from liger_jax.training import loss_and_accuracy, score_sums, scored_tokens
from liger_jax.training.evaluation import mean_scores


class Text(Task):
    """That each token is predicted from those before it, of `FinetuneOptions`.

    What is held out is scored by its cross-entropy, whatever the loss: by "dft" a token of probability 0 would have
    none.
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
        """Their means, and the perplexity."""
        return mean_scores(totals)


TASK = Text()
