"""How tensors come from files to devices: mapped into memory, and transposed on the device or by the host's threads.

A CPU's array is made by the host, since it may share its memory. Any other device gets tensors as they are stored.
"""

import collections
import functools
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# By safetensors' names: floats, and the codes of quantised weights.
_DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "U8": np.uint8}
BLOCK, _APART = 256, 32  # rows and columns that are transposed at a time, and numbers between such rows
_ALIGNMENT = 64  # bytes
_LEAST_BYTES = 2**20  # of a tensor that several threads copy
THREADS = min(8, os.cpu_count() or 1)
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_IN_FLIGHT = 2  # tensors on their way to a device
Change = Callable[[Any], Any] | None  # of each number on its way
# A part of an array: its place (an index or a slice for each axis), its values, and whether it is stored transposed.
Slice = tuple[tuple[Any, ...], np.ndarray, bool]


class MappedTensor:
    """A tensor in a file, which is read like a safetensors slice, as views of the mapped file."""

    def __init__(self, dtype: str, array: np.ndarray):
        self._dtype, self._array = dtype, array

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self._array.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype by safetensors' name."""
        return self._dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """A read-only slice of the tensor."""
        return self._array[index]


def is_cpu(devices: Iterable[Any]) -> bool:
    """Whether devices compute in the host's memory."""
    return next(iter(devices)).platform == "cpu"


def is_for_host(sharding: Any) -> bool:
    """Whether an array of this sharding, or on the default device, stays in the host's memory."""
    return is_cpu(jax.device_put(np.zeros(())).devices() if sharding is None else sharding.device_set)


def mapped_tensors(path: pathlib.Path) -> dict[str, MappedTensor]:
    """The floats and bytes in a safetensors file that was opened before, and so has a right header, by their names."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    known = {name: fields for name, fields in header.items() if fields["dtype"] in _DTYPES}
    if not known:
        return {}
    content, tensors = np.asarray(np.memmap(path, np.uint8, "r")), {}
    for name, fields in known.items():
        first, last = (8 + size + offset for offset in fields["data_offsets"])
        array = content[first:last].view(_DTYPES[fields["dtype"]]).reshape(fields["shape"])
        tensors[name] = MappedTensor(fields["dtype"], array)
    return tensors


def aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array for values to come, which a CPU's device takes as it is: XLA copies those that begin elsewhere."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def copy(tensors: Iterable[tuple[np.ndarray, np.ndarray, bool]], change: Change = None) -> None:
    """Copies tensors into arrays, or their transposes, by bands of rows on a few threads.

    `tensors`: sources, targets, and whether the target is the transpose. A source is let go once the next but one is
    asked for. `change`: what is made of each number on its way.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        before: list[Any] = []
        for source, target, transposed in tensors:
            copied = [pool.submit(part) for part in _bands(source, target, transposed, change)]
            for part in before:
                part.result()
            before = copied
        for part in before:
            part.result()


def _bands(source: np.ndarray, target: np.ndarray, transposed: bool, change: Change) -> Iterator[Callable[[], None]]:
    """Functions that copy a tensor together."""
    source, target = as_integers(source, target)
    if source.ndim < 2 or source.nbytes < _LEAST_BYTES:
        yield functools.partial(_put_all, source.T if transposed else source, target, change)
        return
    size = -(-len(source) // (THREADS * BLOCK)) * BLOCK
    for first in range(0, len(source), size):
        band = slice(first, first + size)
        if transposed:
            yield functools.partial(transpose, source[band], target[..., band], change)
        else:
            yield functools.partial(_put_all, source[band], target[band], change)


def _put_all(source: np.ndarray, target: np.ndarray, change: Change) -> None:
    target[...] = source if change is None else change(source)


def as_integers(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one dtype as integers of its size, which NumPy copies without Python's lock; others as they are."""
    if source.dtype == target.dtype and source.dtype.itemsize in _INTEGERS:
        return source.view(_INTEGERS[source.dtype.itemsize]), target.view(_INTEGERS[target.dtype.itemsize])
    return source, target


def transpose(source: np.ndarray, target: np.ndarray, change: Change = None) -> None:
    """Writes the transpose of a matrix, by blocks that stay in the processor's cache.

    A block is first copied to rows that do not begin a power of 2 apart, which would share the cache's lines.
    """
    held = np.empty((BLOCK, BLOCK + _APART), target.dtype)
    rows, columns = source.shape
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            values = source[row : row + BLOCK, column : column + BLOCK]
            block = held[: values.shape[0], : values.shape[1]]
            block[...] = values if change is None else change(values)
            target[column : column + BLOCK, row : row + BLOCK] = block.T


def in_turn(read: Callable[..., Any], each: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The results of calls one after another, of which the last two may be on their way to a device."""
    results: list[Any] = []
    for arguments in each:
        jax.block_until_ready(results[-2:-1])  # the host holds what is on its way to a device
        results.append(read(*arguments))
    return jax.block_until_ready(results)


def at_once(read: Callable[..., Any], each: Iterable[tuple[Any, ...]], count: int) -> list[Any]:
    """The results of calls of which a few run at the same time, each until its result is on the device."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  # made at run time

    def waited(arguments: tuple[Any, ...]) -> Any:
        with jax.default_device(device):  # a setting of each thread
            return jax.block_until_ready(read(*arguments))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(waited, each))


def placed(
    shape: tuple[int, ...],
    dtype: Any,
    slices: Callable[[tuple[slice, ...]], Iterable[Slice]],
    sharding: Any,
    change: Change = None,
) -> jax.Array:
    """An array on its devices, each of whose shards is made once. The host of CPUs makes theirs.

    `slices`: a function that gets the place of a shard, and gives the slices that cover it. `sharding`: `None` for the
    default device.
    """

    def make(index: tuple[slice, ...], device: Any) -> Any:
        own = tuple(len(range(*axis.indices(size))) for axis, size in zip(index, shape, strict=True))
        if not for_host:
            return _made_on_device(own, dtype, slices(index), device, change)
        whole = aligned(own, dtype)
        copy(((values, whole[target], transposed) for target, values, transposed in slices(index)), change)
        return whole

    for_host = is_for_host(sharding)
    if sharding is None:
        everything = make((slice(None),) * len(shape), None)
        return jax.device_put(everything) if for_host else everything
    shards: dict[str, Any] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        known = shards.get(str(index))
        if known is None:
            known = shards[str(index)] = make(index, device)
        arrays.append(jax.device_put(known, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _made_on_device(
    shape: tuple[int, ...], dtype: Any, slices: Iterable[Slice], device: Any, change: Change
) -> jax.Array:
    """An array of slices that are sent as they are stored, one after another, and transposed on the device."""
    whole, in_flight = None, collections.deque()
    for target, values, transposed in slices:
        values = values if values.dtype == dtype else values.astype(dtype)
        sent = jax.device_put(values, device)
        starts = [axis if isinstance(axis, int) else axis.start for axis in target]
        sizes = tuple(1 if isinstance(axis, int) else axis.stop - axis.start for axis in target)
        if sizes == shape:
            return _turned(sent, sizes, transposed, change)
        if whole is None:
            whole = jnp.zeros(shape, dtype, device=device)
        whole = _put(whole, sent, np.asarray(starts, np.int32), sizes, transposed, change)
        in_flight.append(sent)
        if len(in_flight) > _IN_FLIGHT:
            in_flight.popleft().block_until_ready()
    assert whole is not None
    return whole


def _oriented(sent: jax.Array, sizes: tuple[int, ...], transposed: bool, change: Any) -> jax.Array:
    sent = sent if change is None else change(sent)
    return (sent.T if transposed else sent).reshape(sizes)


_turned = jax.jit(_oriented, static_argnums=(1, 2, 3))


@functools.partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _put(whole: Any, sent: Any, starts: Any, sizes: tuple[int, ...], transposed: bool, change: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, _oriented(sent, sizes, transposed, change), tuple(starts))
