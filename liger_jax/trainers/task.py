"""What differs between the commands that train: a run asks its task, and all else of `run` is the same for them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liger_jax.data.tokenizer import Tokenizer
from liger_jax.data.training_rows import TrainingRows, prepared
from liger_jax.trainers.teacher import Teacher
from liger_jax.training import loss_and_accuracy, score_sums, scored_tokens
from liger_jax.training.evaluation import mean_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run trains for."""

    tokenizer: type[Tokenizer] = Tokenizer  # what encodes documents: `Tokenizer`, or a kind of it
    # Makes the rows of a run, from its tokenizer, the folder of tokens and what its data name.
    prepared: Callable[..., Any] = lambda settings, *others: prepared(
        settings.rows, settings.recipe.batch, settings.recipe.seed, *others
    )
    # The loss function of a run and its rows, as `make_step` takes it with `has_aux=True`. The run is `Settings`, here
    # and below.
    loss: Callable[[Any, TrainingRows], Callable[..., Any]]
    # What makes the loss's denominator, of a run and its rows, as `make_step` takes it.
    normalizer: Callable[[Any, TrainingRows], Callable[[Any], Any]]
    # What some rows add to the scores, of the model's structure, a run and its rows: a jitted function of parameters,
    # frozen variables and some rows, which returns an array.
    sums: Callable[[Any, Any, TrainingRows], Any]
    # The scores by the names of `scored`, from the sums over all rows.
    scores: Callable[[Sequence[float]], dict[str, float]]
    figures: tuple[str, ...]  # names of what the loss function returns beside the loss
    scored: tuple[str, ...]  # names of the scores, among them "eval_loss"
    shown: tuple[str, ...]  # names of the figures in the progress bar
    main_figure: str = "loss"  # name of the figure whose first and last value end the run's words
    # Adds columns to a run's rows, which `before` may fill.
    add_columns: Callable[[Any, TrainingRows], None] = lambda settings, data: None
    # Is called before the first step with the run, its rows, the model as it was read, and texts by which model and
    # data can be told from others.
    before: Callable[[Any, TrainingRows, Any, Mapping[str, str]], None] = lambda settings, data, model, made_of: None
    # Where the model that is trained makes a step's batch: of a run, its rows, their tokenizer, and a function that
    # puts a batch on the run's devices, an object with an `example` of such a batch, and `columns` for its own figures.
    # Its `goes_on(log)` is called with what is saved beside the state, before the first step. Its `step(graph,
    # compiled, state, rows, frozen)` makes a batch from rows and their step's `number`, and takes the step. `None`
    # where the rows are the batch.
    rollouts: Callable[..., Any] | None = None
    # Of a run, the number that must be divided by as many devices as split its batch.
    rows: Callable[[Any], int] = lambda settings: settings.recipe.rows_at_once
    # How many updates a step of the run has, which share its learning rate.
    updates: Callable[[Any], int] = lambda settings: 1
    # A frozen model that the loss reads as the model's attribute `teacher`, where it stays; `None` for none.
    teacher: Teacher | None = None
    scan_layers: bool = True  # whether the model's layers are stacked
    alone: bool = False  # whether it is a run of one process, whose rows no devices share

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the run's table."""
        return ("step", "loss", *self.figures, "learning_rate", "tokens_per_second", "memory_gib", *self.scored)


# That each token is predicted from those before it, of `FinetuneOptions`. What is held out is scored by its
# cross-entropy, whatever the loss: by "dft" a token of probability 0 would have none.
TEXT = Task(
    loss=lambda settings, data: functools.partial(loss_and_accuracy, token_scaling=settings.method.loss_type == "dft"),
    normalizer=lambda settings, data: scored_tokens,
    sums=lambda graph, settings, data: score_sums(graph),
    scores=mean_scores,
    figures=("token_accuracy",),
    scored=("eval_loss", "eval_perplexity", "eval_token_accuracy"),
    shown=("loss", "token_accuracy", "tokens_per_second", "memory_gib"),
)
