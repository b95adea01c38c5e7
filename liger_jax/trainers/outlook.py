"""What a run prints of its plan before it waits, beside its memory, what is trained, its data and their rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from liger_jax.trainers.options import Settings
from liger_jax.training.row_sizes import Size
from liger_jax.user_errors import counted

FEW = 10  # updates, of which fewer hardly change a model


def lines(
    settings: Settings,
    steps: int,
    target: Path | None = None,
    *,
    updates: int = 0,
    sizes: Sequence[Size] = (),
    stops: bool = True,
) -> Iterator[str]:
    """Lines about a run's steps. `target`: where its result goes. `updates`: of a step that samples its batch, else 0.
    `sizes`: those that its rows may have. `stops`: whether some token ends a text.

    >>> from liger_jax.trainers.finetune_options import FinetuneOptions
    >>> settings = Settings.of(FinetuneOptions, model="m", data="d", eval_share=0.0)
    >>> print(*lines(settings, 1, Path("out/model")), sep="\\n")
    rate: 1.0e-05 at its peak, schedule cosine; nothing is held out, so nothing is scored
    result: out/model
    1 update in all: pass more --epochs, or a smaller --batch
    """
    recipe, every = settings.recipe, settings.folder.every
    number = steps * max(1, updates)
    scored = f"held-out data is scored before step 1, after every {every} steps and at the end"
    if updates:
        of_rows = f", in rows × places of {' or '.join(map(str, sizes))}" if sizes else ""
        yield f"steps: {steps:,}, each with {counted(updates, 'update')}{of_rows}"
        scored = "nothing is held out: rewards are of the completions of each step"
    elif not settings.rows.are_scored:
        scored = "nothing is held out, so nothing is scored"
    yield f"rate: {settings.peak_rate:.1e} at its peak, schedule {recipe.schedule}; {scored}"
    if not settings.folder.is_kept:
        yield "result: only in result.model, since there is no out"
    elif target is not None:
        yield f"result: {target}"
    if not stops:
        yield (
            "no token ends a text: the tokenizer names no eos_token in tokenizer_config.json, nor the model an "
            "eos_token_id. The model learns no end, and writes until --max-new-tokens"
        )
    if recipe.steps is None and number < FEW:
        yield f"{counted(number, 'update')} in all: pass more --epochs, or a smaller --batch"
