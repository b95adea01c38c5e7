"""The adapters that `liger-jax finetune` trains: new ones by its options, or those of a folder that it goes on from."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from liger_jax.models.hugging_face import adapter_files
from liger_jax.models.hugging_face.adapted_source import base_of, is_adapted
from liger_jax.models.hugging_face.adapter_targets import ALL_LINEAR
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.models.lora import EXPERT_PARAMETERS, add_lora, load_adapters, with_dropout
from liger_jax.trainers.options import Settings
from liger_jax.training.rows import Rows
from liger_jax.user_errors import UserError, of_option

PIECES, STEP = "dropout_pieces", "dropout_step"  # in a batch of a run with dropout
# Options that adapters in a folder have already.
_OF_NEW = ("lora", "lora_alpha", "lora_targets", "lora_experts", "rslora", "dora")


def found(settings: Settings) -> tuple[Settings, Source]:
    """The run's model. If `--model` is a folder of adapters, it is theirs, and training goes on from them.

    Returns the run, whose `model` names a model and whose `adapters` the folder, if there is one; and the model's
    folder.
    """
    with of_option("--model"):
        source = find(settings.model)
    if not is_adapted(source):
        return settings, source
    if given := [name for name in _OF_NEW if getattr(settings, name) not in (None, False)]:
        raise UserError(
            f"--{given[0].replace('_', '-')} is for new adapters, and {settings.model} holds adapters, which are "
            "trained as they are. Leave it out."
        )
    config, tensors = adapter_files.read(source.folder)
    base, name = base_of(source)
    rank = max([config.of(each)[0] for each in adapter_files.adapted_names(tensors)], default=config.rank)
    dropout = config.dropout if settings.lora_dropout is None else settings.lora_dropout
    changed: dict[str, Any] = dict(lora=rank, lora_dropout=dropout, dora=config.dora)
    changed |= dict(lora_experts=any(map(adapter_files.EXPERTS.search, tensors)))
    return dataclasses.replace(settings, model=name, adapters=str(source.folder), **changed), base


def tuned(settings: Settings, source: Source) -> list[Path]:
    """The folders that the run must not replace: that of the model, and that of the adapters that it goes on from."""
    return [source.folder, *([] if settings.adapters is None else [Path(settings.adapters)])]


def add(model: Any, settings: Settings) -> None:
    """Adds the run's adapters to a model, in place."""
    assert settings.lora is not None
    if settings.adapters is not None:
        load_adapters(model, settings.adapters, dropout=settings.lora_dropout)
        return
    add_lora(
        model,
        settings.lora,
        alpha=settings.lora_alpha or 2 * settings.lora,
        targets=targets(settings.lora_targets),
        parameters=EXPERT_PARAMETERS if settings.lora_experts else (),
        dropout=settings.lora_dropout or 0.0,
        rslora=settings.rslora,
        dora=settings.dora,
        rngs=nnx.Rngs(settings.seed),
    )


def targets(text: str | None) -> tuple[str, ...] | str | None:
    """What `--lora-targets` means: names with commas between them, "all-linear", or a regular expression.

    >>> targets("q_proj,v_proj"), targets(r".*[02]\\.mlp\\..*")
    (('q_proj', 'v_proj'), '.*[02]\\\\.mlp\\\\..*')
    """
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    is_names = all(re.fullmatch(r"[\w.-]+", name) for name in names)
    return names if is_names and names != (ALL_LINEAR,) else text


def files(settings: Settings) -> dict[str, bytes | None]:
    """The contents of the adapters that training goes on from, by name; none without."""
    if settings.adapters is None:
        return {}
    names = (adapter_files.CONFIG, adapter_files.WEIGHTS)
    return {name: (Path(settings.adapters) / name).read_bytes() for name in names}


def loss_of(settings: Settings, loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss that is trained: with dropout in the adapters, where the run has some."""
    if not settings.lora_dropout:
        return loss

    def loss_with_dropout(model: nnx.Module, batch: Mapping[str, Any], normalizer: Any = None) -> Any:
        arguments = dict(batch)
        key = jax.random.fold_in(jax.random.key(settings.seed), arguments.pop(STEP))
        return loss(with_dropout(model, key, arguments.pop(PIECES)), arguments, normalizer)

    return loss_with_dropout


def numbered(batch: Rows, pieces: np.ndarray, step: int) -> dict[str, Any]:
    """A step's batch, with what its dropout needs.

    `pieces`: for each token of the first rows, which may be fewer than B, the number of its piece in the step. Returns
    the batch with (B, T) numbers in `PIECES` and a number in `STEP`.
    """
    numbers = np.zeros(batch["input_ids"].shape, np.uint32)
    numbers[: len(pieces)] = pieces.astype(np.uint32)
    return {**batch, PIECES: numbers, STEP: np.uint32(step % 2**32)}
