"""Log-probabilities of a run's answers under its reference: the model before the first step.

Where the adapters are new, a step switches them off. Else the numbers are computed once, before the first step, and
stored in OUT/references.f32 for the next start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax import losses
from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.step_rows import StepRows
from liger_jax.data.training_rows import TrainingRows
from liger_jax.models.lora import with_adapters
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.trainers import keyed_file
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.options import Settings
from liger_jax.training import processes
from liger_jax.training.meshes import devices_of
from liger_jax.training.rows import ARGUMENTS
from liger_jax.training.waiting import telling

NAME = "references"  # the column (rows, S), and the files
# Options on which the numbers depend.
_READ = ("model", "adapters", "length", "rope_scaling", "pack", "dtype", "param_dtype", "quantize", "ld_alpha")


def add_columns(settings: Settings[PairOptions], data: TrainingRows) -> None:
    """Adds the column to a run's rows, if the run needs it. Its numbers are NaN until `fill`."""
    if settings.method.needs_columns(settings):
        for laid in data.laid:
            laid.beside[NAME] = np.full((laid.num_rows, data.num_stored), np.nan, np.float32)


def fill(settings: Settings[PairOptions], data: TrainingRows, model: Any, made_of: Mapping[str, str]) -> None:
    """Fills the column, from the file of an earlier start if that is whole and of the same model and rows."""
    columns = [laid.beside[NAME] for laid in data.laid if NAME in laid.beside]
    if not columns:
        return
    path = Path(settings.folder.out) / f"{NAME}.f32"
    key = keyed_file.key(settings, _READ, made_of, data.laid, data.num_stored)
    if keyed_file.is_whole(path, key):
        numbers = np.fromfile(path, np.float32)
    else:
        with telling(f"computing the reference of {sum(map(len, columns)):,} rows"):
            log_probs = [_computed(settings, data, laid, model) for laid in data.laid]
        numbers = np.concatenate([each.ravel() for each in log_probs]).astype(np.float32)
        keyed_file.write(path, key, [numbers.tobytes()], "The log-probabilities of the reference", numbers.nbytes)
    for column in columns:
        column[:] = numbers[: column.size].reshape(column.shape)
        numbers = numbers[column.size :]


def _computed(settings: Settings[PairOptions], data: TrainingRows, laid: LaidRows, model: Any) -> np.ndarray:
    (graph, state), devices = nnx.split(model), devices_of(model)
    ld_alpha, stored = settings.method.ld_alpha, data.num_stored
    num_segments = stored if laid.packed else stored * settings.recipe.rows_at_once  # all may be in one row
    assert isinstance(data.in_steps, StepRows)

    @jax.jit
    def log_probs(state, rows):
        return responses(nnx.merge(graph, state), rows, num_segments, ld_alpha=ld_alpha).log_probs

    numbers = np.zeros((laid.num_rows, stored), np.float32)
    for rows, _, places in data.in_steps.in_order(laid):
        scored = processes.whole(log_probs(state, devices.place({name: rows[name] for name in ARGUMENTS})))
        for bundle, row, segment, _ in places:
            numbers[bundle] = scored[row, segment : segment + stored]
    return numbers


class Responses(NamedTuple):
    """Numbers of each segment, (B, S) float32, and 0 where a row has fewer."""

    log_probs: jax.Array  # the answer's log-probability, summed over its tokens
    tokens: jax.Array  # how many they are
    nll: jax.Array  # the negative log-likelihood of the answer, or of prompt and answer


def responses(
    model: Any, batch: Mapping[str, Any], num_segments: int, *, ld_alpha: float | None = None, prompts: bool = False
) -> Responses:
    """A model's log-probabilities of the answers in some rows.

    `num_segments`: S, the most segments of a row, which is even: segments 1 and 2 are a pair, and so on. `ld_alpha`:
    weight of an answer's tokens beyond the shorter answer of its pair; `None` weighs all alike.
    """
    segment_ids, labels = batch["segment_ids"], batch["labels"]
    if prompts:
        labels = jnp.where(segment_ids > 0, batch["input_ids"], IGNORE_INDEX)
    rows = {name: batch[name] for name in ARGUMENTS} | {"labels": labels}
    log_probs = model.log_probs(**rows).log_probs
    where = losses.shifted_labels(batch["labels"], segment_ids) != IGNORE_INDEX
    segments: Any = dict(segment_ids=segment_ids, num_segments=num_segments)
    tokens = losses.sequence_log_probs(where.astype(jnp.float32), where, **segments)
    nll = -losses.sequence_log_probs(log_probs, None if prompts else where, **segments)
    if ld_alpha is None:
        return Responses(losses.sequence_log_probs(log_probs, where, **segments), tokens, nll)
    shorter = jnp.minimum(tokens[:, 0::2], tokens[:, 1::2]).astype(jnp.int32)
    segments |= dict(ld_alpha=ld_alpha, shared_tokens=jnp.repeat(shorter, 2, axis=1))
    return Responses(losses.sequence_log_probs(log_probs, where, **segments), tokens, nll)


def of_batch(model: Any, batch: Mapping[str, Any], num_segments: int, *, ld_alpha: float | None = None) -> jax.Array:
    """The log-probabilities of a batch's answers under the reference: its column, or the model's without adapters."""
    if NAME in batch:
        return batch[NAME]
    return responses(with_adapters(model, False), batch, num_segments, ld_alpha=ld_alpha).log_probs


def sides(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers of segments, (B, S), as those of chosen and of rejected answers, (B·S/2,) each."""
    return x[:, 0::2].ravel(), x[:, 1::2].ravel()
