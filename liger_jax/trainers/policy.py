"""The task of `liger-jax grpo`: completions that are better than the average of their group become more likely."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import losses
from liger_jax.data import prompt_rows
from liger_jax.data.prompt_rows import PromptRows
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.lora import with_adapters
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.rollouts import OLD, SAMPLED, Rollouts, num_segments
from liger_jax.trainers.task import Task
from liger_jax.training import row_sizes, score_sums
from liger_jax.training.row_sizes import Size
from liger_jax.training.rows import ARGUMENTS

DIFFERENCE = "sampling/sampling_logp_difference/mean"  # TRL's name


def policy_loss(settings: Settings[GrpoOptions], data: Any) -> Callable[..., Any]:
    """The loss function of a run: of a model, a batch of `Rollouts`, and its denominator and number of tokens.

    It returns the loss and figures that add up over micro-batches. Where a rollout has one update, the policy which
    sampled is the one that is trained, without gradient. Nothing is computed for rows without tokens.
    """

    method = settings.method

    def loss(model: Any, batch: Mapping[str, Any], denominators: Any) -> Any:
        denominator, num_tokens = denominators
        ids, labels = batch["segment_ids"], batch["labels"]
        mask = losses.shifted_labels(labels, ids) != IGNORE_INDEX
        arguments = {name: batch[name] for name in ARGUMENTS}
        arguments["temperature"] = method.temperature

        def of_tokens():
            reference = None
            if method.beta:
                reference = jax.lax.stop_gradient(with_adapters(model, False).log_probs(**arguments).log_probs)
            log_probs, old, importance, figures = model.log_probs(**arguments).log_probs, batch.get(OLD), None, {}
            segments = dict(segment_ids=ids, num_segments=num_segments(settings.recipe.batch, settings.rows.length))
            if method.importance_sampling:
                ours, sampled = jax.lax.stop_gradient(log_probs) if old is None else old, batch[SAMPLED]
                options = dict(mode=method.importance_sampling, clip_max=method.importance_max, **segments)
                importance = losses.importance_sampling_ratio(ours, sampled, mask=mask, **options)
                figures[DIFFERENCE] = jnp.sum(jnp.where(mask, jnp.abs(ours - sampled), 0.0)) / num_tokens
            output = losses.policy_loss(
                log_probs,
                old,
                batch["advantages"],
                mask=mask,
                **segments,
                importance_ratio=importance,
                reference_log_probs=reference,
                denominator=denominator,
                **method.loss_options(),
            )
            means = {"kl": output.kl} if method.beta else {}
            means |= {"clip_ratio/low_mean": output.clipped_low, "clip_ratio/high_mean": output.clipped_high}
            share = jnp.sum(mask) / num_tokens
            return output.loss, figures | {name: share * mean for name, mean in means.items()}

        if settings.recipe.num_micro_batches == 1:
            return of_tokens()
        zero = jnp.zeros((), jnp.float32)
        return jax.lax.cond(jnp.any(mask), of_tokens, lambda: (zero, dict.fromkeys(_figures(method), zero)))

    return loss


def _figures(method: GrpoOptions) -> tuple[str, ...]:
    """The names of the figures of `policy_loss`."""
    corrected = (DIFFERENCE,) if method.importance_sampling else ()
    penalised = ("kl",) if method.beta else ()
    return (*corrected, *penalised, "clip_ratio/low_mean", "clip_ratio/high_mean")


class GroupSampling:
    """The model that is trained samples a group of completions for each prompt, and these are rewarded."""

    def rows(self, settings: Settings[GrpoOptions]) -> int:
        """Devices split both the rows of an update and the prompts that are sampled."""
        recipe = settings.recipe
        return math.gcd(recipe.rows_at_once, recipe.batch // settings.method.group)

    def prepared(self, settings: Settings[GrpoOptions], tokenizer: Tokenizer, sources: Any = None) -> PromptRows:
        """The rows are prompts, each repeated for every completion of its group."""
        recipe, method = settings.recipe, settings.method
        return prompt_rows.prepared(
            settings.rows.subset, recipe.batch, recipe.seed, method.group, method.prompt_length, tokenizer, sources
        )

    def updates(self, settings: Settings[GrpoOptions]) -> int:
        """A step may have several updates on the same completions."""
        return settings.method.updates

    def sizes(self, settings: Settings[GrpoOptions], steps: int, shards: int) -> list[Size]:
        """With one micro-batch, a few numbers of rows, so that few of those that packing leaves empty are computed."""
        recipe, length = settings.recipe, settings.rows.length
        if recipe.num_micro_batches > 1:  # the loss passes over those that are empty
            return [Size(length, recipe.rows_at_once, recipe.num_micro_batches)]
        # How many rows completions fill is not known in advance: each number is taken to be as likely.
        needs = -(-np.arange(1, recipe.batch + 1) // shards) * shards
        program = row_sizes.of_a_program() * recipe.batch / (steps * settings.method.updates)
        places = np.arange(recipe.batch + 1) * float(length)
        return [Size(length, rows) for rows in row_sizes.levels(needs, places, program)]

    def begin(
        self, settings: Settings[GrpoOptions], data: PromptRows, tokenizer: Tokenizer, place: Any, sizes: Sequence[Size]
    ) -> Rollouts:
        """The object that samples, rewards and packs."""
        return Rollouts(settings, data, tokenizer, place, sizes)


class Policy(Task):
    """Completions that the run samples and rewards become more likely if they are better than their group's average."""

    sampling = GroupSampling()
    figures = (
        "reward", "reward_std", "frac_reward_zero_std", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", DIFFERENCE,
        "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "completions/mean_terminated_length",
    )  # fmt: skip
    shown = ("reward", "reward_std", "completions/mean_length", "tokens_per_second", "memory_gib")
    main_figure = "reward"

    def loss(self, settings: Settings[GrpoOptions], data: Any) -> Callable[..., Any]:
        """`policy_loss`."""
        return policy_loss(settings, data)

    def normalizer(self, settings: Settings[GrpoOptions], data: Any) -> Callable[[Any], Any]:
        """The denominator that `Rollouts` has put into the batch."""
        return lambda batch: (batch["denominator"], batch["num_tokens"])

    def sums(self, graph: Any, settings: Settings[GrpoOptions], data: Any) -> Callable[..., Any]:
        """The prompts' cross-entropy, which shows whether parameters are finite."""
        return score_sums(graph)

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The mean of the cross-entropy."""
        return {"eval_loss": totals[0] / max(totals[2], 1.0)}


TASK = Policy()
