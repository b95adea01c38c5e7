"""How documents are laid into the rows of a run's steps, and what the run prints about it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from liger_jax.data.step_rows import Laying, StepRows
from liger_jax.data.training_rows import TrainingRows
from liger_jax.ops import DynamicRope, LongRope
from liger_jax.trainers import outlook, result
from liger_jax.trainers.options import Settings
from liger_jax.training import Checkpoints, meshes, row_sizes
from liger_jax.user_errors import counted

LAYOUT = {"rows_of_a_step": "without padding"}  # the value in checkpoints of runs whose steps are laid in this way
_FEW = 4096  # tokens of a step on each device, below which kernels do not fill a GPU


def laying(settings: Settings, config: Any, teacher: Any, devices: meshes.Devices) -> Laying:
    """The settings by which the rows of a run are laid; its model has this config, and it may have a teacher."""
    configs = [config, *([] if teacher is None else [teacher.config])]
    return laying_of(
        settings,
        configs[0].hidden_size,
        whole=jax.default_backend() == "cpu" or any(config.num_recurrent_layers > 0 for config in configs),
        longest=min(Laying.longest, *(config.longest_sequence for config in configs)),
        in_segments=any(reads_largest_position(config, settings.rows.length) for config in configs),
        shards=meshes.shards_of_batch(devices.sizes),
    )


def reads_largest_position(config: Any, length: int) -> bool:
    """Whether the rotary embedding follows from the largest position of a call, which must then be a document's."""
    scaling = config.rope_scaling
    return isinstance(scaling, DynamicRope | LongRope) and length > scaling.original_max_position_embeddings


def laying_of(
    settings: Settings,
    width: int,
    *,
    whole: bool,
    longest: int = Laying.longest,
    takes_segments: bool = True,
    in_segments: bool = False,
    shards: int = 1,
) -> Laying:
    """The same for a model of this width. `whole`: whether attention computes all of a row, not only within documents.

    For each place XLA's attention takes 4·D operations per place of the row, beside about 24·D² of the layer's
    matrices; a recurrent layer passes through a row in order.
    """
    padded = not settings.rows.pack and not takes_segments or _began_padded(settings)
    return Laying(
        batch=settings.recipe.batch,
        micro_batches=settings.recipe.num_micro_batches,
        shards=shards,
        padded=padded,
        whole_batches=settings.method.takes_whole_batches,
        alone=settings.placement.remat == "offload_attention",
        longest=longest,
        in_segments=in_segments and not padded,
        growth=1 / (6 * width) if whole else 0.0,
        program=row_sizes.of_a_program(),
    )


def lines(
    settings: Settings, data: TrainingRows, steps: int, laying: Laying, takes_segments: bool = True
) -> Iterator[str]:
    """Lines that a run prints about its steps."""
    in_steps, recipe = data.in_steps, settings.recipe
    assert in_steps is not None
    own_rows = f"rows: each document has its own row of {settings.rows.length:,} places"
    if not (takes_segments or settings.rows.pack):
        yield f"{own_rows}; they share rows if the model's hidden_states takes segment_ids and positions"
    elif _began_padded(settings) and not settings.rows.pack:
        yield (
            f"{own_rows}, as when the run began; with --fresh, or in another --out, documents share rows, with the "
            "same loss in less time"
        )
    if not (laying.padded or settings.rows.pack) and _has_padded(settings):
        yield (
            "rows: documents share rows now, where the earlier run in this folder had a padded row for each; the loss "
            "is the same"
        )
    if not isinstance(in_steps, StepRows):
        of = counted(recipe.batch, "row" if settings.rows.pack else "piece")
        yield f"steps: {steps:,} of {of}, in rows × places of {' or '.join(map(str, in_steps.sizes))}"
        return
    each = [f"{size} ({counted(in_steps.steps_of(size), 'step')})" for size in in_steps.sizes]
    tokens, padding = in_steps.tokens / steps, 1 - in_steps.tokens / in_steps.places
    what = "row" if settings.rows.pack else data.laid[0].tokens.kind
    epochs = recipe.epochs_to_train or steps / math.ceil(data.num_in_epoch / recipe.batch)
    yield (
        f"steps: {steps:,} of {counted(min(recipe.batch, data.num_in_epoch), what)}, "
        f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}; "
        f"{counted(round(tokens), 'token')} a step in rows × places of {' and '.join(each)}, "
        f"{padding:.1%} of them padding"
    )
    factor = 2 ** math.ceil(math.log2(max(1.0, _FEW * laying.shards / tokens)))
    while factor > 1 and (recipe.batch * factor > data.num_in_epoch or outlook.FEW * factor > steps):
        factor //= 2
    if factor > 1:
        rate = settings.peak_rate * math.sqrt(factor)
        busy = "" if jax.default_backend() == "cpu" else " and the device is not busy"
        fewer = "" if recipe.steps is None else f" --steps {math.ceil(steps / factor)}"
        yield (
            f"a step has few tokens, so that gradients are noisy{busy}: --batch "
            f"{recipe.batch * factor} --learning-rate {rate:.1e}{fewer} trains on the same documents"
        )


def _began_padded(settings: Settings) -> bool:
    """Whether the run resumes from a checkpoint of a version in which documents did not share rows by default."""
    return not settings.folder.fresh and _has_padded(settings)


def _has_padded(settings: Settings) -> bool:
    """Whether the folder has such a checkpoint."""
    before = Checkpoints(Path(settings.folder.out) / result.CHECKPOINTS, {}).latest_settings
    return bool(before) and not LAYOUT.items() <= before.items()


def identity(data: Any, laying: Laying | None) -> dict[str, str]:
    """The value in checkpoints that says how rows are laid."""
    return LAYOUT if isinstance(data, TrainingRows) and laying is not None and not laying.padded else {}
