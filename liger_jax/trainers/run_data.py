"""The data of a training run: its rows, and the tokenizer that makes them."""

from pathlib import Path

import jax

from liger_jax.data import token_cache, training_rows
from liger_jax.data.prompt_rows import PromptRows
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.trainers import step_sizes
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import Task
from liger_jax.training import processes
from liger_jax.training.row_sizes import Size

RunRows = training_rows.TrainingRows | PromptRows


def prepared(settings: Settings, task: Task, source: Source, vocab_size: int, out: Path) -> tuple[Tokenizer, RunRows]:
    """Reads a run's data, which one process does before the others. Returns the tokenizer and the rows."""
    recipe, sources = settings.recipe, training_rows.sources_of(settings.rows)
    tokenizer = training_rows.tokenizer(source, vocab_size, task.tokenizer)
    with processes.first_before_others():
        if task.sampling is None:
            rows_of = settings.rows, recipe.batch, recipe.seed
            data: RunRows = training_rows.prepared(*rows_of, tokenizer, out / token_cache.FOLDER, sources)
        else:
            data = task.sampling.prepared(settings, tokenizer, sources)
        if jax.process_count() > 1 and processes.is_first():
            data.keep()  # the other processes read these
    return tokenizer, data


def largest_size(data: RunRows, settings: Settings, laying: step_sizes.Laying) -> Size:
    """The largest size of the rows of a run's steps."""
    assert isinstance(data, training_rows.TrainingRows)
    steps = settings.recipe.num_steps(data.num_in_epoch)
    in_steps = data.laid_in_steps(*settings.recipe.order, steps, laying).in_steps
    assert in_steps is not None
    return max(in_steps.sizes, key=lambda size: size.places)
