"""The adapters that `liger-jax finetune` trains: new ones by its options, or those of a folder that it goes on from."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from liger_jax import _options
from liger_jax._options import above_0, option, share, within
from liger_jax.models.hugging_face import adapter_files
from liger_jax.models.hugging_face.adapted_source import base_of, is_adapted
from liger_jax.models.hugging_face.adapter_targets import ALL_LINEAR
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.models.lora import EXPERT_PARAMETERS, add_lora, load_adapters, with_dropout
from liger_jax.planner import defaults
from liger_jax.training.rows import Rows
from liger_jax.user_errors import UserError, of_option

PIECES, STEP = "dropout_pieces", "dropout_step"  # columns of a batch, in a run with dropout
# Options of new adapters, which those of a folder have already.
_OF_NEW = ("lora", "lora_alpha", "lora_targets", "lora_experts", "rslora", "dora")


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The adapters that are trained, if any are."""

    group_of_options: ClassVar = "adapters"

    lora: int | None = option(
        None, f"train adapters of this rank, or {defaults.RANK}, instead of all weights", check=within(1, 2**16),
        nargs="?", const=defaults.RANK, metavar="RANK", first=True
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "the adapters' alpha; they are scaled by alpha/rank (default: twice the rank)", check=above_0
    )
    lora_targets: str | None = option(
        None, "modules with adapters: q_proj,v_proj, all-linear or a regular expression (default: all seven)",
        metavar="NAMES",
    )  # fmt: skip
    lora_experts: bool = option(False, "also add adapters to the experts of a mixture")
    # `None`: no dropout, or that of the adapters' folder.
    lora_dropout: float | None = option(
        None, "dropout probability of the adapters' inputs (default: 0)", check=share("0 drops nothing")
    )
    rslora: bool = option(False, "scale the adapters by alpha/√rank")
    dora: bool = option(False, "weight-decomposed adapters: also train the norms of the weights' columns")
    adapters: str | None = None  # the folder of adapters that training goes on from, if `--model` was one

    def __post_init__(self):
        _options.check(self)


def found(model: str, options: AdapterOptions) -> tuple[str, AdapterOptions, Source]:
    """The run's model. If `--model` is a folder of adapters, it is theirs, and training goes on from them.

    Returns the model's name, the adapters with their folder, if there is one, and the model's folder.
    """
    with of_option("--model"):
        source = find(model)
    if not is_adapted(source):
        return model, options, source
    if given := [name for name in _OF_NEW if getattr(options, name) not in (None, False)]:
        raise UserError(
            f"--{given[0].replace('_', '-')} is for new adapters, and {model} holds adapters, which are "
            "trained as they are. Leave it out."
        )
    config, tensors = adapter_files.read(source.folder)
    base, name = base_of(source)
    rank = max([config.of(each)[0] for each in adapter_files.adapted_names(tensors)], default=config.rank)
    dropout = config.dropout if options.lora_dropout is None else options.lora_dropout
    changed: dict[str, Any] = dict(lora=rank, lora_dropout=dropout, dora=config.dora)
    changed |= dict(lora_experts=any(map(adapter_files.EXPERTS.search, tensors)))
    return name, dataclasses.replace(options, adapters=str(source.folder), **changed), base


def tuned(options: AdapterOptions, source: Source) -> list[Path]:
    """The folders that the run must not replace: the model's, and that of the adapters that it continues to train."""
    return [source.folder, *([] if options.adapters is None else [Path(options.adapters)])]


def add(model: Any, options: AdapterOptions, seed: int) -> None:
    """Adds the run's adapters to a model, in place."""
    assert options.lora is not None
    if options.adapters is not None:
        load_adapters(model, options.adapters, dropout=options.lora_dropout)
        return
    try:
        add_lora(
            model,
            options.lora,
            alpha=options.lora_alpha or 2 * options.lora,
            targets=targets(options.lora_targets),
            parameters=EXPERT_PARAMETERS if options.lora_experts else (),
            dropout=options.lora_dropout or 0.0,
            rslora=options.rslora,
            dora=options.dora,
            rngs=nnx.Rngs(_key(np.uint32(seed))),
        )
    except ValueError as error:
        if (text := str(error)).startswith("add_lora: parameters="):
            goes = "needs a mixture of experts, which --model is not"
            if not text.endswith("They are []."):
                goes = "goes with neither --dora nor --lora-dropout"
            raise UserError(f"--lora-experts {goes}. Leave it out.") from error
        if not (match := re.match(r"add_lora: targets=(\[.*?\]|'.*?')(:? .*)", str(error))):
            raise
        raise UserError(f"--lora-targets={options.lora_targets}{match[2]}") from error


_key = jax.jit(jax.random.key)  # as one program


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


def files(options: AdapterOptions) -> dict[str, bytes | None]:
    """The contents of the files of the adapters that training goes on from, by name; empty without such adapters."""
    if options.adapters is None:
        return {}
    names = (adapter_files.CONFIG, adapter_files.WEIGHTS)
    return {name: (Path(options.adapters) / name).read_bytes() for name in names}


def loss_of(options: AdapterOptions, seed: int, loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss that is trained: with dropout in the adapters, where the run has some."""
    if not options.lora_dropout:
        return loss

    def loss_with_dropout(model: nnx.Module, batch: Mapping[str, Any], normalizer: Any = None) -> Any:
        arguments = dict(batch)
        key = jax.random.fold_in(jax.random.key(seed), arguments.pop(STEP))
        return loss(with_dropout(model, key, arguments.pop(PIECES)), arguments, normalizer)

    return loss_with_dropout


def numbered(batch: Rows, pieces: np.ndarray, step: int) -> dict[str, Any]:
    """A step's batch, with the columns that its dropout reads.

    `pieces`: for each token of the first rows, which may be fewer than B, the number of its piece in the step. Returns
    the batch with (B, T) numbers in `PIECES` and a number in `STEP`.
    """
    numbers = np.zeros(batch["input_ids"].shape, np.uint32)
    numbers[: len(pieces)] = pieces.astype(np.uint32)
    return {**batch, PIECES: numbers, STEP: np.uint32(step % 2**32)}
