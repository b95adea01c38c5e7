"""Safetensors files, written tensor by tensor: no file is made in memory first, and no tensor is copied whole.

While a tensor is written, threads transpose the next rows, and a device sends the next tensor.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import queue
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from liger_jax.models.hugging_face import transfers

# By NumPy's names, in the order in which the library of safetensors writes them.
_DTYPES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_METADATA = {"format": "pt"}
_PART_BYTES = 2**22  # of rows that are transposed at a time
_AHEAD = transfers.THREADS + 1  # parts of a file that are made while another one is written


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor whose values are asked for when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], Any]  # returns the host's array, which may be a transpose, or a device's

    @property
    def nbytes(self) -> int:
        """The tensor's bytes in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


Tensors = Mapping[str, Stored | np.ndarray]


def write(path: pathlib.Path, tensors: Tensors) -> None:
    """Writes a safetensors file, and returns once it is on the disk."""
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(transfers.THREADS) as pool:
        _put(file, _header(tensors))
        buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(_AHEAD + 1):
            buffers.put(np.empty(_PART_BYTES, np.uint8))
        waiting: collections.deque[Any] = collections.deque()
        for part in _parts(tensors, buffers):
            waiting.append(pool.submit(part))
            if len(waiting) > _AHEAD:
                _put_part(file, waiting.popleft().result(), buffers)
        while waiting:
            _put_part(file, waiting.popleft().result(), buffers)
        os.fsync(file.fileno())


def fetch_all(tensors: Tensors) -> None:
    """Fetches what a process that writes fetches, in the same order."""
    for _ in _fetched(tensors):
        pass


def _fetched(tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors on the host, while the next one is on its way."""
    before = None
    for name in _in_order(tensors):
        tensor = tensors[name]
        values = tensor.fetch() if isinstance(tensor, Stored) else tensor
        if isinstance(values, jax.Array):
            values.copy_to_host_async()
        if before is not None:
            yield before[0], np.asarray(before[1])
        before = name, values
    if before is not None:
        yield before[0], np.asarray(before[1])


def _in_order(tensors: Tensors) -> list[str]:
    place = {name: number for number, name in enumerate(_DTYPES)}
    return sorted(tensors, key=lambda name: (place[np.dtype(tensors[name].dtype).name], name))


def _header(tensors: Tensors) -> bytes:
    fields, end = {"__metadata__": _METADATA}, 0
    for name in _in_order(tensors):
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        dtype = _DTYPES[np.dtype(tensor.dtype).name]
        fields[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _parts(tensors: Tensors, buffers: queue.SimpleQueue[np.ndarray]) -> Iterator[Callable[[], Any]]:
    """Functions that return the file's next bytes, and the buffer that holds them if there is one."""
    for name, values in _fetched(tensors):
        assert values.shape == tuple(tensors[name].shape) and values.dtype == tensors[name].dtype, name
        rows = _PART_BYTES // max(1, values.dtype.itemsize * values.shape[-1]) if values.ndim else 0
        if values.ndim == 2 and not values.flags.c_contiguous and rows:
            for first in range(0, len(values), rows):
                yield functools.partial(_transposed, values[first : first + rows].T, buffers)
        else:
            yield functools.partial(_whole, values)


def _whole(values: np.ndarray) -> tuple[np.ndarray, None]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8), None


def _transposed(values: np.ndarray, buffers: queue.SimpleQueue[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    buffer = buffers.get()
    content = buffer[: values.nbytes]
    transfers.transpose(*transfers.as_integers(values, content.view(values.dtype).reshape(values.shape[::-1])))
    return content, buffer


def _put_part(file: Any, part: tuple[np.ndarray, Any], buffers: queue.SimpleQueue[np.ndarray]) -> None:
    content, buffer = part
    _put(file, content)
    if buffer is not None:
        buffers.put(buffer)


def _put(file: Any, content: Any) -> None:
    """Writes all bytes, of which a call may take some."""
    left = memoryview(content)
    while len(left):
        left = left[file.write(left) :]
