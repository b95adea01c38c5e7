"""What `liger-jax dpo` trains for: that of two answers the chosen one becomes more likely than the rejected one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax import losses
from liger_jax.commands import _references, _unpaired_task
from liger_jax.commands._pair_settings import PairSettings
from liger_jax.commands._pair_tokenizer import PairTokenizer
from liger_jax.commands._preference import Pairs, Preference
from liger_jax.commands._responses import responses, sides
from liger_jax.commands._task import Task
from liger_jax.commands._training_rows import TrainingRows
from liger_jax.models.lora import with_adapters
from liger_jax.ops.labels import IGNORE_INDEX

_FIGURES = (  # TRL's names
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
    "nll_loss",
)  # fmt: skip


def loss_of(preference: Preference, num_segments: int) -> Callable[..., Any]:
    """The loss of a run, a mean over pairs, for `make_step` with `has_aux=True`.

    Args:
        preference: the loss by its name, with its options.
        num_segments: the most segments of a row. Each odd one is a chosen answer, and the next one its rejected answer.

    Returns:
        A function of the model, the batch and `normalizer_of`'s denominators, `None` for the batch's own. It returns
        the loss and the figures by name, all of which add up over micro-batches.
    """
    normalizer, ld_alpha = normalizer_of(preference), preference.ld_alpha

    def reference_of(model: Any, batch: Mapping[str, Any]) -> jax.Array:
        if _references.NAME in batch:
            return batch[_references.NAME]
        return responses(with_adapters(model, False), batch, num_segments, ld_alpha=ld_alpha).log_probs

    def loss(model: Any, batch: Mapping[str, Any], denominators: Any = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        counts = normalizer(batch) if denominators is None else denominators
        found = responses(model, batch, num_segments, ld_alpha=ld_alpha, prompts=preference.reads_prompts)
        references = jnp.zeros_like(found.log_probs)
        if preference.needs_reference:
            references = jax.lax.stop_gradient(jnp.where(found.tokens > 0, reference_of(model, batch), 0.0))
        (chosen, rejected), (chosen_tokens, rejected_tokens) = sides(found.log_probs), sides(found.tokens)
        exist = (chosen_tokens > 0) & (rejected_tokens > 0)
        nll = sides(found.nll)[0] * counts["pairs"] / counts["tokens"]
        pairs = Pairs(chosen, rejected, chosen_tokens, rejected_tokens, exist, nll, sides(references))
        out = preference.losses(pairs, counts["tokens"] / counts["pairs"])
        mean = lambda x: jnp.sum(jnp.where(exist, x, 0.0)) / counts["pairs"]
        first = jnp.arange(exist.size) < jnp.sum(exist) if preference.sorts else exist  # what is no pair is sorted last
        told = out.chosen_rewards, out.rejected_rewards, out.margins, out.margins > 0, chosen, rejected, nll
        figures = {name: jax.lax.stop_gradient(mean(x)) for name, x in zip(_FIGURES, told, strict=True)}
        return jnp.sum(jnp.where(first, out.losses, 0.0)) / counts["pairs"], figures

    return loss


def normalizer_of(preference: Preference) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """The denominators of the loss.

    Args:
        preference: the loss by its name, with its options.

    Returns:
        A function of a whole batch: how many `pairs` it has, and how many `tokens` the likelihood of their chosen
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


def _sums(graph: Any, settings: PairSettings, data: TrainingRows) -> Any:
    """A part's figures, each times its number of pairs, and that number."""
    preference = settings.preference
    loss, normalizer = loss_of(preference, data.num_segments), normalizer_of(preference)

    @jax.jit
    def sums(params, frozen, batch):
        value, figures = loss(nnx.merge(graph, params, frozen), batch)
        pairs = normalizer(batch)["pairs"]
        return pairs * jnp.stack([value, *(figures[name] for name in _FIGURES), jnp.ones(())])

    return sums


def _scores(totals: Sequence[float]) -> dict[str, float]:
    return {name: total / totals[-1] for name, total in zip(TASK.scored, totals[:-1], strict=True)}


TASK = Task(
    tokenizer=PairTokenizer,
    loss=lambda settings, data: loss_of(settings.preference, data.num_segments),
    alone=True,
    normalizer=lambda settings, data: normalizer_of(settings.preference),
    sums=_sums,
    scores=_scores,
    figures=_FIGURES,
    scored=("eval_loss", *(f"eval_{name}" for name in _FIGURES)),
    shown=("loss", "rewards/margins", "rewards/accuracies", "tokens_per_second", "memory_gib"),
    add_columns=_references.add_columns,
    before=_references.fill,
)


def of_run(settings: PairSettings, *model: Any) -> Task:
    """The task of a run: of pairs, or by its loss of single answers.

    Args:
        settings: the run.
        *model: the model's folder and architecture, which say nothing more.

    Returns:
        The task.
    """
    return TASK if settings.unpaired is None else _unpaired_task.task_of(settings)
