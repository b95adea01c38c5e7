"""Log-probabilities of a run's answers under its reference: the model as the run finds it.

Where the adapters are new, a step switches them off. Else the numbers are computed once, before the first step, and lie
in OUT/references.f32 for the next start.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from liger_jax.commands._errors import UserError
from liger_jax.commands._laid_rows import RowParts
from liger_jax.commands._pair_settings import PairSettings
from liger_jax.commands._responses import responses
from liger_jax.commands._training_rows import TrainingRows
from liger_jax.training.files import read_json, write_json
from liger_jax.training.rows import ARGUMENTS
from liger_jax.training.waiting import telling

NAME = "references"  # the column (rows, S), and the files
# Options by which the numbers differ.
_READ = ("model", "adapters", "length", "rope_scaling", "pack", "dtype", "param_dtype", "quantize", "ld_alpha")


def add_columns(settings: PairSettings, data: TrainingRows) -> None:
    """Adds the column to a run's rows, if the run needs it. Its numbers are NaN until `fill`.

    Args:
        settings: the run.
        data: its rows.
    """
    if settings.needs_reference and not settings.switches_adapters_off:
        for laid in data.laid:
            laid.beside[NAME] = np.full((laid.num_rows, data.num_segments), np.nan, np.float32)


def fill(settings: PairSettings, data: TrainingRows, model: Any, made_of: Mapping[str, str]) -> None:
    """Fills the column, from the file of an earlier start if that is whole and of the same model and rows.

    Args:
        settings: the run.
        data: its rows.
        model: the model before its first step.
        made_of: texts by which model and data can be told from others.

    Raises:
        UserError: the file cannot be written.
    """
    columns = [laid.beside[NAME] for laid in data.laid if NAME in laid.beside]
    if not columns:
        return
    path = Path(settings.out) / f"{NAME}.f32"
    key = _key(settings, data, made_of)
    numbers = _read(path, key, sum(column.size for column in columns))
    if numbers is None:
        with telling(f"computing the reference of {sum(map(len, columns)):,} rows"):
            found = [_computed(settings, laid, model, data.num_segments) for laid in data.laid]
        numbers = np.concatenate([each.ravel() for each in found])
        _write(path, key, numbers)
    for column in columns:
        column[:] = numbers[: column.size].reshape(column.shape)
        numbers = numbers[column.size :]


def _computed(settings: PairSettings, laid: Any, model: Any, num_segments: int) -> np.ndarray:
    graph, state = nnx.split(model)
    ld_alpha = settings.ld_alpha

    @jax.jit
    def log_probs(state, rows):
        return responses(nnx.merge(graph, state), rows, num_segments, ld_alpha=ld_alpha).log_probs

    size = settings.batch // settings.num_parts
    parts = RowParts(laid, size)
    found = [np.asarray(log_probs(state, {name: part[name] for name in ARGUMENTS})) for part in parts]
    return np.concatenate(found)[: laid.num_rows]


def _key(settings: PairSettings, data: TrainingRows, made_of: Mapping[str, str]) -> str:
    """What the numbers are made of."""
    read = {name: getattr(settings, name) for name in _READ}
    order = [hashlib.sha256(np.ascontiguousarray(laid.pieces)).hexdigest() for laid in data.laid]
    return hashlib.sha256(json.dumps([read, dict(made_of), order, data.num_segments]).encode()).hexdigest()


def _read(path: Path, key: str, size: int) -> np.ndarray | None:
    about = read_json(path.with_suffix(".json"))
    if about.get("key") != key or not path.is_file():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != about.get("digest"):
        print(f"{path} is damaged, and is made anew")
        return None
    return np.frombuffer(content, np.float32, size)


def _write(path: Path, key: str, numbers: np.ndarray) -> None:
    content = numbers.astype(np.float32).tobytes()
    new = path.with_suffix(".new")
    try:
        new.write_bytes(content)
        new.replace(path)
        write_json(path.with_suffix(".json"), {"key": key, "digest": hashlib.sha256(content).hexdigest()})
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
