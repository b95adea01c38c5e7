"""The task of `liger-jax distill`: a student learns the probabilities that its teacher gives the next token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.data.training_rows import TrainingRows
from liger_jax.losses import shifted_labels
from liger_jax.models.core.embedding import logit_options_of
from liger_jax.models.core.experts import without_router_loss
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.quantized import is_quantized
from liger_jax.ops import fused_linear_distillation, fused_linear_topk_distillation
from liger_jax.planner.architectures import Architecture
from liger_jax.trainers import stored_top_k
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.stored_top_k import COLUMNS
from liger_jax.trainers.task import Task
from liger_jax.trainers.teacher import Teacher, found
from liger_jax.training import scored_tokens
from liger_jax.training.rows import ARGUMENTS, INPUTS


def divergence(
    model: Any, batch: Mapping[str, Any], denominator: jax.Array, *, vocab_size: int, hard_weight: float, **options: Any
) -> jax.Array:
    """The student's divergence from its teacher, summed over scored tokens, over a denominator. The teacher is
    `model.teacher`, unless the batch has `stored_top_k.COLUMNS`.
    """
    shifted = batch.get("shift_labels")  # where devices share rows, and the next label may be on another one
    targets = shifted_labels(batch["labels"], batch.get("segment_ids")) if shifted is None else shifted
    rows = {name: batch[name] for name in INPUTS if name in batch}
    common: dict[str, Any] = dict(hard_weight=hard_weight, **options)
    of_student = logit_options_of(model.config)
    hidden, layout = model.hidden_states(**rows), model.kernels.mesh_layout

    def from_stored(hidden, targets, token_ids, log_probs, denominator, head):
        stored = token_ids, log_probs
        of_call = dict(labels=targets, denominator=denominator, **of_student, **common)
        return fused_linear_topk_distillation(hidden, head[:vocab_size], *stored, **of_call), ()

    def from_teacher(hidden, targets, taught, denominator, head, teacher_head):
        named = {f"student_{name}": value for name, value in of_student.items()}
        named |= {f"teacher_{name}": value for name, value in logit_options_of(model.teacher.config).items()}
        of_call = dict(labels=targets, denominator=denominator, **named, **common)
        heads = head[:vocab_size], teacher_head[:vocab_size]
        return fused_linear_distillation(hidden, heads[0], taught, heads[1], **of_call), ()

    if set(COLUMNS) <= set(batch):
        split = hidden, targets, *(batch[name] for name in COLUMNS)
        return layout.run_sum(from_stored, split, (denominator, _dense(model.head, hidden)))[0]
    taught = jax.lax.stop_gradient(model.teacher.hidden_states(**rows))
    whole = denominator, _dense(model.head, hidden), jax.lax.stop_gradient(_dense(model.teacher.head, taught))
    return layout.run_sum(from_teacher, (hidden, targets, taught), whole)[0]


def loss_of(options: DistillOptions, vocab_size: int) -> Callable[..., Any]:
    """The loss of a run, a mean over scored tokens, for `make_step` with `has_aux=True`."""
    of_call = dict(vocab_size=vocab_size, hard_weight=options.hard_weight, **options.divergence_options())

    def loss(model: Any, batch: Mapping[str, Any], denominator: Any = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        denominator = scored_tokens(batch) if denominator is None else denominator
        return divergence(model, batch, denominator, **of_call), {}

    return loss


def _dense(head: Any, hidden: jax.Array) -> jax.Array:
    return head.astype(hidden.dtype) if is_quantized(head) else head


class Distillation(Task):
    """A student learns its teacher's probabilities of the next token. The teacher runs in each step, or has scored the
    rows before the first one.
    """

    scored = ("eval_loss", "eval_divergence", "eval_nll_loss", "eval_token_accuracy")
    shown = ("loss", "tokens_per_second", "memory_gib")
    compared = ("eval_divergence",)

    def __init__(self, teacher: Teacher, hard_weight: float):
        self.teacher, self._vocab_size, self._hard_weight = teacher, teacher.vocab_size, hard_weight
        self._stored: list[stored_top_k.Stored] = []

    def add_columns(self, settings: Settings[DistillOptions], data: TrainingRows) -> None:
        """Adds the teacher's stored tokens, if it does not run in each step."""
        if not self.teacher.stays:
            self._stored += stored_top_k.add_columns(settings, data)

    def loss(self, settings: Settings[DistillOptions], data: TrainingRows) -> Callable[..., Any]:
        """`loss_of`."""
        return loss_of(settings.method, self._vocab_size)

    def normalizer(self, settings: Settings[DistillOptions], data: TrainingRows) -> Callable[[Any], Any]:
        """The number of scored tokens."""
        return scored_tokens

    def sums(self, graph: Any, settings: Settings[DistillOptions], data: TrainingRows) -> Callable[..., Any]:
        """Divergence, negative log-likelihood, right predictions and scored tokens."""
        options = dict(vocab_size=self._vocab_size, hard_weight=0.0, **settings.method.divergence_options())

        @jax.jit
        def sums(params, frozen, batch):
            model = without_router_loss(nnx.merge(graph, params, frozen))
            rows = {name: batch[name] for name in (*ARGUMENTS, "shift_labels") if name in batch}
            out = model(**rows, loss_normalizer=1.0, return_metrics=True)
            tokens, of_teacher = out.metrics.num_tokens, divergence(model, batch, jnp.float32(1), **options)
            return jnp.stack([of_teacher, out.loss, tokens * out.metrics.accuracy, tokens])

        return sums

    def before(
        self, settings: Settings[DistillOptions], data: TrainingRows, model: Any, made_of: Mapping[str, str]
    ) -> None:
        """Lets the teacher score the rows, if it does not run in each step."""
        if not self.teacher.stays:
            stored_top_k.fill(self._stored, self.teacher, settings, data, model, made_of)

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The means of the sums, and the loss that follows from them."""
        of_teacher, of_labels, right = (total / totals[-1] for total in totals[:-1])
        loss = (1 - self._hard_weight) * of_teacher + self._hard_weight * of_labels
        return dict(zip(self.scored, (loss, of_teacher, of_labels, right), strict=True))


def of_run(settings: Settings[DistillOptions], source: Source, student: Architecture) -> Task:
    """The task of a run with this student."""
    return Distillation(found(settings, source, student), settings.method.hard_weight)
