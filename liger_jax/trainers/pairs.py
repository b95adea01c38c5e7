"""Pairs of answers: the chosen one becomes more likely, relative to the rejected one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import losses
from liger_jax.data.answers import PairTokenizer
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.trainers import kto, reference_log_probs
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.preference_losses import Pairs, Preference, flag
from liger_jax.trainers.reference_log_probs import Responses, responses, sides
from liger_jax.trainers.scored_answers import ScoredAnswers
from liger_jax.user_errors import UserError

_FIGURES = (  # TRL's names
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
    "nll_loss",
)  # fmt: skip


def loss_of(preference: Preference, num_segments: int) -> Callable[..., Any]:
    """The loss of a run, a mean over pairs, for `make_step` with `has_aux=True`: a function of the model, the batch and
    `normalizer_of`'s denominators, `None` for the batch's own. Each odd segment of a row is a chosen answer, and the
    next one its rejected answer. Loss and figures add up over micro-batches.
    """
    normalizer = normalizer_of(preference)

    def loss(model: Any, batch: Mapping[str, Any], denominators: Any = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        counts = normalizer(batch) if denominators is None else denominators
        return _loss(preference, counts, *_scored(preference, num_segments, model, batch))

    return loss


def _scored(
    preference: Preference, num_segments: int, model: Any, batch: Mapping[str, Any]
) -> tuple[Responses, jax.Array]:
    """The answers' numbers, and their log-probabilities under the reference."""
    ld_alpha = preference.ld_alpha
    answers = responses(model, batch, num_segments, ld_alpha=ld_alpha, prompts=preference.reads_prompts)
    references = jnp.zeros_like(answers.log_probs)
    if preference.needs_reference:
        references = reference_log_probs.of_batch(model, batch, num_segments, ld_alpha=ld_alpha)
        references = jax.lax.stop_gradient(jnp.where(answers.tokens > 0, references, 0.0))
    return answers, references


def _loss(
    preference: Preference, counts: Mapping[str, Any], answers: Responses, references: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its figures, with these denominators."""
    (chosen, rejected), (chosen_tokens, rejected_tokens) = sides(answers.log_probs), sides(answers.tokens)
    exist = (chosen_tokens > 0) & (rejected_tokens > 0)
    nll = sides(answers.nll)[0] * counts["pairs"] / counts["tokens"]
    pairs = Pairs(chosen, rejected, chosen_tokens, rejected_tokens, exist, nll, sides(references))
    out = preference.losses(pairs, counts["tokens"] / counts["pairs"])
    mean = lambda x: jnp.sum(jnp.where(exist, x, 0.0)) / counts["pairs"]
    first = jnp.arange(exist.size) < jnp.sum(exist) if preference.sorts else exist  # others are sorted last
    values = out.chosen_rewards, out.rejected_rewards, out.margins, out.margins > 0, chosen, rejected, nll
    figures = {name: jax.lax.stop_gradient(mean(x)) for name, x in zip(_FIGURES, values, strict=True)}
    return jnp.sum(jnp.where(first, out.losses, 0.0)) / counts["pairs"], figures


def normalizer_of(preference: Preference) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """The denominators of the loss.

    Returns a function of a whole batch: how many `pairs` it has, and how many `tokens` the likelihood of their chosen
    answers counts; both are () float32, and 1 where there is none.
    """
    reads_prompts = preference.reads_prompts

    def normalizer(batch):
        labels, segments = batch["input_ids"] if reads_prompts else batch["labels"], batch["segment_ids"]
        begins = (segments > 0) & (batch["positions"] == 0)
        counted = (losses.shifted_labels(labels, segments) != IGNORE_INDEX) & (segments % 2 == 1)
        return {
            "pairs": jnp.maximum(jnp.sum(begins) // 2, 1).astype(jnp.float32),
            "tokens": jnp.maximum(jnp.sum(counted), 1).astype(jnp.float32),
        }

    return normalizer


@dataclasses.dataclass(frozen=True)
class OfPairs:
    """The objective of pairs: the chosen answer becomes more likely, relative to the rejected one."""

    preference: Preference
    tokenizer = PairTokenizer
    reads_labels = False
    figures = _FIGURES
    shown = "rewards/margins", "rewards/accuracies"

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads the reference."""
        return self.preference.needs_reference

    def loss(self, num_segments: int) -> Callable[..., Any]:
        """`loss_of`."""
        return loss_of(self.preference, num_segments)

    def normalizer(self, num_segments: int) -> Callable[[Any], Any]:
        """`normalizer_of`."""
        return normalizer_of(self.preference)

    def sums(self, model: Any, batch: Mapping[str, Any], num_segments: int) -> jax.Array:
        """The loss without the likelihood of chosen and what that adds, the figures, and the numbers of pairs and of
        tokens, all of them sums: the likelihood is a mean over tokens, whichever batches they are in.
        """
        scored, counts = _scored(self.preference, num_segments, model, batch), normalizer_of(self.preference)(batch)
        of = lambda tokens: _loss(self.preference, dict(pairs=jnp.float32(1), tokens=jnp.float32(tokens)), *scored)
        (without, _), (value, figures) = of(jnp.inf), of(1)
        return jnp.stack([without, value - without, *figures.values(), *counts.values()])

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The means of the loss and its figures, over pairs or over the tokens of chosen."""
        without, of_tokens, *figures, pairs, tokens = totals
        means = {name: total / pairs for name, total in zip(_FIGURES, figures, strict=True)}
        means["nll_loss"] *= pairs / tokens
        return {"eval_loss": without / pairs + of_tokens / tokens} | {f"eval_{name}": x for name, x in means.items()}


def of_run(settings: Settings[PairOptions], *model: Any) -> ScoredAnswers:
    """The task of a run: of pairs, or of single answers if its loss is one of these."""
    _check_trains(settings.method)
    unpaired = settings.method.unpaired
    return ScoredAnswers(OfPairs(settings.method.preference) if unpaired is None else kto.OfAnswers(unpaired))


def _check_trains(options: PairOptions) -> None:
    """Refuses a loss whose gradient at the first step has no square above 0 in float32.

    The optimizer and the clipping of gradients take squares: 0 and infinity both leave the model as it is. At the first
    step the policy is the reference.
    """
    chosen, unpaired = np.array([-20.0, -21.0, -22.0, -23.0], np.float32), options.unpaired

    def of_pairs(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        references, tokens = jax.lax.stop_gradient((chosen, rejected)), jnp.full(4, 10.0)
        pairs = Pairs(chosen, rejected, tokens, tokens, jnp.ones(4, bool), -chosen / tokens, references)
        return jnp.sum(options.preference.losses(pairs, jnp.float32(10)).losses)

    def of_answers(good: jax.Array, bad: jax.Array) -> jax.Array:
        assert unpaired is not None
        log_probs = jnp.concatenate([good, bad])
        references = jax.lax.stop_gradient(log_probs)
        return jnp.sum(unpaired.losses(log_probs, references, jnp.arange(8) < 4, jnp.float32(0)).losses)

    gradients = jax.jit(jax.grad(of_pairs if unpaired is None else of_answers, (0, 1)))(chosen, chosen[::-1])
    size, limits = np.abs(jax.device_get(gradients)).max(), jnp.finfo(jnp.float32)
    if not limits.tiny**0.5 <= size <= limits.max**0.5:
        names = ("loss_weights", "beta", "desirable_weight", "undesirable_weight")
        given = [
            f"{flag(name)}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name in names
            if (value := getattr(options, name)) is not None
        ]
        raise UserError(
            f"--loss={options.loss_type} with {' and '.join(given)} cannot change the model: at the first step "
            f"the loss has the gradient {size:.3g}, and its square must be above 0 and finite in float32. Pass other "
            "values, or leave them out."
        )
