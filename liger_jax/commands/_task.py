"""What differs between the commands that train: a run asks its task, and all else of `_run` is the same for them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liger_jax.commands._teacher import Teacher
from liger_jax.commands._tokenizer import Tokenizer
from liger_jax.commands._training_rows import TrainingRows, prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run trains for.

    Attributes:
        tokenizer: what encodes documents: `Tokenizer`, or a kind of it.
        prepared: makes the rows of a run, as `_training_rows.prepared` does.
        loss: the loss function of a run and its rows, as `make_step` takes it with `has_aux=True`. The run is
            `Settings`, here and below, or the command's kind of them.
        normalizer: what makes the loss's denominator, of a run and its rows, as `make_step` takes it.
        sums: what some rows add to the scores, of the model's structure, a run and its rows: a jitted function of
            parameters, frozen variables and some rows, which returns an array.
        scores: the scores by the names of `scored`, from the sums over all rows.
        figures: names of what the loss function returns beside the loss.
        scored: names of the scores, among them "eval_loss".
        shown: names of the figures in the progress bar.
        told: name of the figure whose first and last value end the run's words.
        add_columns: adds columns to a run's rows, which `before` may fill.
        before: is called before the first step with the run, its rows, the model as it was read, and texts by which
            model and data can be told from others.
        played: where the model that is trained makes a step's batch: of a run, its rows, their tokenizer, and a
            function that puts a batch on the run's devices, an object with an `example` of such a batch, and `columns`
            for its own figures. Its `goes_on(log)` is called with what is saved beside the state, before the first
            step. Its `step(graph, compiled, state, rows, frozen)` makes a batch from rows and their step's `number`,
            and takes the step. `None` where the rows are the batch.
        rows: of a run, the number that must be divided by as many devices as split its batch.
        updates: how many updates a step of the run has, which share its learning rate.
        teacher: a frozen model that the loss reads as the model's attribute `teacher`, where it stays; `None` for none.
        scan_layers: whether the model's layers are stacked.
        alone: whether it is a run of one process, whose rows no devices share.
    """

    tokenizer: type[Tokenizer] = Tokenizer
    prepared: Callable[..., Any] = prepared
    loss: Callable[[Any, TrainingRows], Callable[..., Any]]
    normalizer: Callable[[Any, TrainingRows], Callable[[Any], Any]]
    sums: Callable[[Any, Any, TrainingRows], Any]
    scores: Callable[[Sequence[float]], dict[str, float]]
    figures: tuple[str, ...]
    scored: tuple[str, ...]
    shown: tuple[str, ...]
    told: str = "loss"
    add_columns: Callable[[Any, TrainingRows], None] = lambda settings, data: None
    before: Callable[[Any, TrainingRows, Any, Mapping[str, str]], None] = lambda settings, data, model, made_of: None
    played: Callable[..., Any] | None = None
    rows: Callable[[Any], int] = lambda settings: settings.batch // settings.num_parts
    updates: Callable[[Any], int] = lambda settings: 1
    teacher: Teacher | None = None
    scan_layers: bool = True
    alone: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the run's table."""
        return ("step", "loss", *self.figures, "learning_rate", "tokens_per_second", "memory_gib", *self.scored)
