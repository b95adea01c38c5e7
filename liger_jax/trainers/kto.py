"""Answers with labels, for `--loss kto`: good ones become more likely, and bad ones less likely."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.data.answers import UnpairedTokenizer, UnpairedWithOthers
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.trainers import reference_log_probs
from liger_jax.trainers.preference_losses import Unpaired
from liger_jax.trainers.reference_log_probs import responses, sides
from liger_jax.trainers.scored_answers import GOOD

# TRL's names. Each is a mean over the answers that are counted under the second name.
_FIGURES = {
    "rewards/chosen": "desirable", "rewards/rejected": "undesirable",
    "logps/chosen": "desirable", "logps/rejected": "undesirable", "kl": "answers",
}  # fmt: skip
_COUNTS = ("answers", "desirable", "undesirable")


def sums_of(
    unpaired: Unpaired, num_segments: int, model: Any, batch: Mapping[str, Any]
) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """What some rows add to the loss and its figures.

    `num_segments`: the most segments of a row. With a baseline, each odd one is an answer, and the next one the same
    prompt with an answer to another.
    """
    scored = responses(model, batch, num_segments)
    reference = reference_log_probs.of_batch(model, batch, num_segments)
    reference = jax.lax.stop_gradient(jnp.where(scored.tokens > 0, reference, 0.0))
    numbers = scored.log_probs, reference, scored.tokens, batch[GOOD]
    kl = jnp.zeros(())
    if unpaired.needs_others:
        answers, others = zip(*map(sides, numbers), strict=True)
        is_there = others[2] > 0
        kl = jnp.sum(jnp.where(is_there, others[0] - others[1], 0.0)) / jnp.maximum(jnp.sum(is_there), 1)
    else:
        answers = tuple(x.ravel() for x in numbers)
    log_probs, references, tokens, is_good = answers
    out = unpaired.losses(log_probs, references, is_good > 0, kl)
    exist = tokens > 0
    good, bad = exist & (is_good > 0), exist & (is_good == 0)
    total = lambda x, where: jax.lax.stop_gradient(jnp.sum(jnp.where(where, x, 0.0)))
    values = (out.rewards, good), (out.rewards, bad), (log_probs, good), (log_probs, bad), (out.kl, exist)
    figures = {name: total(*each) for name, each in zip(_FIGURES, values, strict=True)}
    counts = {name: total(1.0, where) for name, where in zip(_COUNTS, (exist, good, bad), strict=True)}
    return jnp.sum(jnp.where(exist, out.losses, 0.0)), figures, counts


def loss_of(unpaired: Unpaired, num_segments: int) -> Callable[..., Any]:
    """The loss of a run, a mean over answers, for `make_step` with `has_aux=True`: a function of the model, the batch
    and `normalizer_of`'s denominators, `None` for the batch's own. Loss and figures add up over micro-batches. A figure
    of good answers, or of bad ones, is NaN where the batch has none.
    """

    def loss(model: Any, batch: Mapping[str, Any], denominators: Any = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, figures, counts = sums_of(unpaired, num_segments, model, batch)
        counts = counts if denominators is None else denominators
        means = {name: jnp.where(counts[of] > 0, figures[name] / counts[of], jnp.nan) for name, of in _FIGURES.items()}
        return value / jnp.maximum(counts["answers"], 1.0), _with_margins(unpaired, means)

    return loss


def normalizer_of(unpaired: Unpaired, num_segments: int) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """The denominators of the loss and its figures.

    Returns a function of a whole batch: how many answers it has, and how many good and bad ones; () float32 each.
    """

    def normalizer(batch):
        segments, is_good = batch["segment_ids"], batch[GOOD]
        begins = (segments > 0) & (batch["positions"] == 0)
        if unpaired.needs_others:
            begins, is_good = begins & (segments % 2 == 1), sides(is_good)[0]
        answers, good = jnp.sum(begins), jnp.sum(is_good > 0)
        numbers = answers, good, answers - good
        return {name: number.astype(jnp.float32) for name, number in zip(_COUNTS, numbers, strict=True)}

    return normalizer


def _with_margins(unpaired: Unpaired, means: dict[str, Any]) -> dict[str, Any]:
    margins = {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}
    kept = {name: mean for name, mean in means.items() if name != "kl" or unpaired.needs_others}
    return {name: (kept | margins)[name] for name in figures_of(unpaired)}


def figures_of(unpaired: Unpaired) -> tuple[str, ...]:
    """The names of the figures."""
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
    return (*names, "kl") if unpaired.needs_others else names


@dataclasses.dataclass(frozen=True)
class OfAnswers:
    """The objective of single answers: good ones become more likely, and bad ones less likely."""

    unpaired: Unpaired
    reads_labels = has_reference = True
    shown = ("rewards/margins",)

    @property
    def tokenizer(self) -> type[Tokenizer]:
        """A tokenizer; where the loss has a baseline, one that adds the answer to another prompt to each answer."""
        return UnpairedWithOthers if self.unpaired.needs_others else UnpairedTokenizer

    @property
    def figures(self) -> tuple[str, ...]:
        """`figures_of`."""
        return figures_of(self.unpaired)

    def loss(self, num_segments: int) -> Callable[..., Any]:
        """`loss_of`."""
        return loss_of(self.unpaired, num_segments)

    def normalizer(self, num_segments: int) -> Callable[[Any], Any]:
        """`normalizer_of`."""
        return normalizer_of(self.unpaired, num_segments)

    def sums(self, model: Any, batch: Mapping[str, Any], num_segments: int) -> jax.Array:
        """Loss, figures and numbers of answers, all of them sums."""
        value, figures, counts = sums_of(self.unpaired, num_segments, model, batch)
        return jnp.stack([value, *figures.values(), *counts.values()])

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The means; without those of good answers, or of bad ones, where there are none."""
        value, *others = totals
        counts = dict(zip(_COUNTS, others[-len(_COUNTS) :], strict=True))
        sums = dict(zip(_FIGURES, others[: len(_FIGURES)], strict=True))
        without = {name for name, of in _FIGURES.items() if not counts[of]}
        without |= {"rewards/margins"} if without else set()
        means = {name: sums[name] / max(counts[of], 1.0) for name, of in _FIGURES.items()}
        shown = {f"eval_{name}": x for name, x in _with_margins(self.unpaired, means).items() if name not in without}
        return {"eval_loss": value / max(counts["answers"], 1.0)} | shown
