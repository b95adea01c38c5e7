"""The teacher's most likely tokens at every scored position of a run's rows, in a file that is mapped into memory.

The teacher scores the rows once, before the first step. A later start reads OUT/teacher.bin if it is of the same
teacher and rows. An entry is a token's id and its log-probability, 8 bytes.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax.data.laid_rows import Column, LaidRows
from liger_jax.data.step_rows import StepRows
from liger_jax.data.training_rows import TrainingRows
from liger_jax.models.core.embedding import head_logits, logit_options_of
from liger_jax.models.quantized import is_quantized
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.ops.layout import from_chunks
from liger_jax.trainers import keyed_file
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import TEACHER
from liger_jax.trainers.teacher import Teacher
from liger_jax.training import disk, processes
from liger_jax.training.meshes import Devices, devices_of
from liger_jax.training.rows import INPUTS
from liger_jax.training.waiting import beside, telling
from liger_jax.user_errors import UserError

COLUMNS = {"token_ids": np.dtype(np.int32), "log_probs": np.dtype(np.float32)}  # (rows, length, K) each
_READ = ("length", "pack", "dtype", "temperature", "top_k", "teacher_quantize")  # by the numbers
_CHUNK = 256  # tokens whose logits are in memory at a time


class Stored:
    """The entries of one set of rows: 0 at places that are not scored, and everywhere before they are opened."""

    def __init__(self, laid: LaidRows, top_k: int):
        self.laid, self._top_k = laid, top_k
        self._entries: np.ndarray | None = None
        self._ends = np.zeros(0, np.int64)

    def open(self, path: Path, first: int, counts: np.ndarray) -> int:
        """Maps the file."""
        self._entries, self._ends = np.memmap(path, _entry(self._top_k), "r"), first + np.cumsum(counts)
        return int(self._ends[-1])

    def made(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a column."""
        column = np.zeros((len(rows), self.laid.length, self._top_k), COLUMNS[name])
        if self._entries is not None:
            for out, row, places in zip(column, rows.tolist(), scored_places(self.laid, rows), strict=True):
                end = int(self._ends[row])
                out[places] = self._entries[name][end - np.count_nonzero(places) : end]
        return column


def add_columns(settings: Settings[DistillOptions], data: TrainingRows) -> list[Stored]:
    """Adds the columns to a run's rows."""
    top_k = settings.method.top_k
    assert top_k is not None
    stores = [Stored(laid, top_k) for laid in data.laid]
    for stored in stores:
        shape = stored.laid.num_rows, settings.rows.length, top_k
        for name, dtype in COLUMNS.items():
            stored.laid.beside[name] = Column(functools.partial(stored.made, name), shape, dtype)
    return stores


def fill(
    some: list[Stored],
    teacher: Teacher,
    settings: Settings[DistillOptions],
    data: TrainingRows,
    model: Any,
    made_of: Mapping[str, str],
) -> None:
    """Fills the columns, from the file of an earlier start if that is whole and of the same teacher and rows."""
    top_k = settings.method.top_k
    assert top_k is not None
    path = Path(settings.folder.out) / f"{TEACHER}.bin"
    key = keyed_file.key(settings, _READ, made_of, (stored.laid for stored in some))
    counts = [_counts(stored.laid) for stored in some]
    if not keyed_file.is_whole(path, key):
        number = int(sum(each.sum() for each in counts))
        size = number * _entry(top_k).itemsize
        disk.check_space(path.parent, size, "the teacher's tokens")
        contents = _contents(some, teacher, settings, data, model, top_k)
        with telling(f"the teacher reads {number:,} scored tokens, once: {disk.size(size)}"):
            keyed_file.write(path, key, contents, "The teacher's tokens", size)
    first = 0
    for stored, of_rows in zip(some, counts, strict=True):
        first = stored.open(path, first, of_rows)


def scored_places(laid: LaidRows, rows: np.ndarray) -> np.ndarray:
    """The positions whose next token is scored, bool (rows, length), as by `losses.shifted_labels`."""
    labels, is_scored = laid.made("labels", rows), np.zeros((len(rows), laid.length), bool)
    is_scored[:, :-1] = labels[:, 1:] != IGNORE_INDEX
    if "segment_ids" in laid:
        segments = laid.made("segment_ids", rows)
        is_scored[:, :-1] &= segments[:, 1:] == segments[:, :-1]
    return is_scored


def top_k(model: Any, rows: Mapping[str, Any], k: int, temperature: float, vocab_size: int) -> tuple[Any, Any]:
    """The likeliest next tokens at each position.

    Returns their numbers int32 and log-probabilities float32, (B, T, K).
    """

    def local(hidden, head):
        def of_chunk(tokens):
            z = head_logits(tokens[None], head[:vocab_size])[0]
            z = z if softcap is None else softcap * jnp.tanh(z / softcap)
            return jax.lax.top_k(jax.nn.log_softmax(z * (scale / temperature)), k)

        flat = hidden.reshape(-1, hidden.shape[-1])
        chunks = jnp.pad(flat, ((0, -len(flat) % _CHUNK), (0, 0))).reshape(-1, _CHUNK, flat.shape[-1])
        log_probs, ids = jax.lax.map(of_chunk, chunks)
        unchunked = lambda x: x.reshape(-1, k)[: len(flat)].reshape(*hidden.shape[:-1], k)
        return unchunked(ids), unchunked(log_probs)

    scale, softcap = logit_options_of(model.config).values()
    hidden, head, layout = model.hidden_states(**rows), model.head, model.kernels.mesh_layout
    head = head.astype(hidden.dtype) if is_quantized(head) else head
    return layout.run(local, (hidden,), (head,), spec=layout.in_loss)


def _contents(
    some: list[Stored], teacher: Teacher, settings: Settings[DistillOptions], data: TrainingRows, model: Any, k: int
) -> Iterator[bytes]:
    """Reads the teacher. Returns the contents of the file, in the order of the rows, which are computed one by one."""
    devices = devices_of(model)
    with telling("reading the teacher's weights"):
        read = beside(teacher.read, str(jnp.dtype(model.model.dtype)), devices.mesh, model.kernels).result()
    return _taught(some, read, teacher.vocab_size, settings, data, devices, k)


def _taught(
    some: list[Stored],
    teacher: Any,
    vocab_size: int,
    settings: Settings[DistillOptions],
    data: TrainingRows,
    devices: Devices,
    k: int,
) -> Iterator[bytes]:
    (graph, state), shared = nnx.split(teacher), devices.sizes["sequence"]

    @jax.jit
    def teach(state, rows):
        top = top_k(nnx.merge(graph, state), rows, k, settings.method.temperature, vocab_size)
        return top if shared == 1 else tuple(from_chunks(x, 1, shared) for x in top)

    assert isinstance(data.in_steps, StepRows)
    for stored in some:
        for batch, _, places in data.in_steps.in_order(stored.laid):
            rows = {name: batch[name] for name in INPUTS if name in batch}
            top = [processes.whole(x) for x in teach(state, devices.place(rows))]
            is_scored = scored_places(stored.laid, np.array([bundle for bundle, *_ in places]))
            at = [
                (row, begin + np.flatnonzero(each)) for each, (_, row, _, begin) in zip(is_scored, places, strict=True)
            ]
            yield _entries(k, top, at)


def _entries(k: int, top: Sequence[Any], at: list[tuple[int, np.ndarray]]) -> bytes:
    """The file's entries of some rows, by the row and the places of each."""
    ids, log_probs = (np.concatenate([own[row, places] for row, places in at]) for own in map(np.asarray, top))
    if np.isnan(log_probs).any():
        raise UserError(
            "--teacher: its logits are NaN, so nothing can be learned from it. Its weights may not be finite, or "
            "results too large for --dtype."
        )
    content = np.empty(len(ids), _entry(k))
    content["token_ids"], content["log_probs"] = ids, log_probs
    return content.tobytes()


def _entry(k: int) -> np.dtype:
    return np.dtype([(name, dtype, (k,)) for name, dtype in COLUMNS.items()])


def _counts(laid: LaidRows) -> np.ndarray:
    """The number of scored places of each row, (rows,)."""
    blocks = np.array_split(np.arange(laid.num_rows), max(1, laid.num_rows // 64))
    return np.concatenate([scored_places(laid, rows).sum(axis=1) for rows in blocks])
