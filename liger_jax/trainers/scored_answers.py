"""The task of `liger-jax dpo`: good answers become more likely relative to bad ones, compared with a reference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from liger_jax.data.tokenizer import Tokenizer
from liger_jax.data.training_rows import TrainingRows
from liger_jax.trainers import reference_log_probs
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import Task

GOOD = "is_good"  # the column (rows, S) of labels, 1 for a good answer and 0 for a bad one


@runtime_checkable
class Objective(Protocol):
    """A loss of the answers' scores, with its figures. A row has at most `num_segments` of them."""

    @property
    def tokenizer(self) -> type[Tokenizer]:
        """What encodes the answers."""
        ...

    def loss(self, num_segments: int) -> Callable[..., Any]:
        """The loss function, as `make_step` takes it with `has_aux=True`."""
        ...

    def normalizer(self, num_segments: int) -> Callable[[Any], Any]:
        """What makes the loss's denominators of a batch."""
        ...

    def sums(self, model: Any, batch: Mapping[str, Any], num_segments: int) -> jax.Array:
        """The sums over some rows, from which `scores` are computed."""
        ...

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The scores, from the sums over all rows."""
        ...

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with itself as the run finds it."""
        ...

    @property
    def reads_labels(self) -> bool:
        """Whether the loss reads the column `GOOD`."""
        ...

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of what the loss function returns beside the loss."""
        ...

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the figures in the progress bar."""
        ...


class ScoredAnswers(Task):
    """An objective of scores: of pairs, or of single answers with labels."""

    def __init__(self, objective: Objective):
        self._objective, self.tokenizer, self.figures = objective, objective.tokenizer, objective.figures
        self.scored = ("eval_loss", *(f"eval_{name}" for name in objective.figures))
        self.shown = ("loss", *objective.shown, "tokens_per_second", "memory_gib")
        self.compared = tuple(f"eval_{name}" for name in objective.shown)
        # A model has no margins to itself, its reference: their signs are those of roundings.
        self.only_after = ("eval_rewards/accuracies",) if objective.has_reference else ()

    def add_columns(self, settings: Settings[PairOptions], data: TrainingRows) -> None:
        """Adds the columns of the reference and of the labels, if the loss reads them."""
        reference_log_probs.add_columns(settings, data)
        for laid in data.laid if self._objective.reads_labels else ():
            laid.beside[GOOD] = laid.of_pieces(laid.tokens.are_good(laid.pieces), data.num_stored)

    def loss(self, settings: Settings[PairOptions], data: TrainingRows) -> Callable[..., Any]:
        """The objective's."""
        return self._objective.loss(data.num_segments)

    def normalizer(self, settings: Settings[PairOptions], data: TrainingRows) -> Callable[[Any], Any]:
        """The objective's."""
        return self._objective.normalizer(data.num_segments)

    def sums(self, graph: Any, settings: Settings[PairOptions], data: TrainingRows) -> Callable[..., Any]:
        """The objective's."""
        of_rows = self._objective.sums

        @jax.jit
        def sums(params, frozen, batch):
            return of_rows(nnx.merge(graph, params, frozen), batch, data.num_segments)

        return sums

    def before(
        self, settings: Settings[PairOptions], data: TrainingRows, model: Any, made_of: Mapping[str, str]
    ) -> None:
        """Lets the reference score the answers, if there is a column for it."""
        reference_log_probs.fill(settings, data, model, made_of)

    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The objective's."""
        return self._objective.scores(totals)
