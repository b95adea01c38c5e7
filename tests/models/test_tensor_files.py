"""Safetensors files that are written tensor by tensor have the bytes that the library writes."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save

from liger_jax.models import LlamaForCausalLM
from liger_jax.models.hugging_face import tensor_files, transfers
from liger_jax.models.hugging_face.tensor_files import Stored
from tests.models._llama import make_model
from tests.ops._oracle import first

SMALL = {
    name: np.ones((2, 3), name if hasattr(np, name) else getattr(ml_dtypes, name)) for name in tensor_files._DTYPES
}
SHAPES = [(), (1,), (0, 3), (3, 0), (1, 1), (5, 1, 2), (2049, 1100), (300, 14_000)]


def of_library(tensors):
    arrays = {name: np.ascontiguousarray(x.fetch() if isinstance(x, Stored) else x) for name, x in tensors.items()}
    # ascontiguousarray makes an array of one number of a number
    arrays = {name: x.reshape(tensors[name].shape) for name, x in arrays.items()}
    return save(arrays, {"format": "pt"})


def test_header_and_order_are_the_library_s(tmp_path):
    odd = {name: np.zeros(n, np.float32) for n, name in enumerate(("b", "a", 'é"\\\n\x7f/\u2028', "Z.10", "Z.9"))}
    for tensors in (SMALL | odd, {}, odd, dict(reversed(SMALL.items()))):
        tensor_files.write(tmp_path / "file", tensors)
        assert (tmp_path / "file").read_bytes() == of_library(tensors)


@pytest.mark.parametrize("dtype", first(2, ["float32", "bfloat16", "float64", "int8", "complex64"]))
def test_values_are_the_library_s_whatever_their_order_in_memory(dtype, tmp_path, rng):
    make = lambda shape: jnp.dtype(dtype).type(0) + rng.integers(-100, 100, shape).astype(dtype)
    tensors = {}
    for shape in SHAPES:
        values = make(shape)
        tensors |= (
            {f"{shape}": values, f"{shape} transposed": values.T, f"{shape} part": values[..., 1:]} if shape else {}
        )
        tensors[f"{shape} later"] = Stored(values.T.shape, values.dtype, lambda values=values: values.T)
        if dtype not in ("float64", "complex64"):
            of_device = jnp.asarray(values)
            tensors[f"{shape} of a device"] = Stored(shape, values.dtype, lambda values=of_device: values)
    tensor_files.write(tmp_path / "file", tensors)
    assert (tmp_path / "file").read_bytes() == of_library(tensors)


@pytest.mark.parametrize("bad", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float16)], ids=["shape", "dtype"])
def test_values_that_the_header_does_not_describe_are_not_written(bad, tmp_path):
    with pytest.raises(AssertionError, match="wrong"):
        tensor_files.write(tmp_path / "file", {"wrong": Stored((2, 3), np.float32, lambda: bad)})


def test_what_fails_in_a_thread_or_in_a_fetch_reaches_the_caller(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("full")

    with pytest.raises(MemoryError):
        tensor_files.write(tmp_path / "file", {"a": np.zeros(3), "b": Stored((2, 3), np.float64, fail)})
    monkeypatch.setattr(transfers, "transpose", fail)
    many = {f"{i}": np.zeros((8, 600_000), np.float32).T for i in range(3)}
    with pytest.raises(MemoryError):
        tensor_files.write(tmp_path / "file", many)


def test_tensors_are_fetched_one_ahead_and_in_one_order_by_all_processes(tmp_path):
    fetched = []

    def fetch(name):
        fetched.append(name)
        return np.zeros((2, 2), np.float32)

    names = ["b", "c", "a"]
    tensors = {name: Stored((2, 2), np.float32, lambda name=name: fetch(name)) for name in names}
    tensors["d"] = Stored((1,), np.float64, lambda: fetch("d")[:1, 0].astype(np.float64))
    tensor_files.write(tmp_path / "file", tensors)
    of_writer = fetched.copy()
    fetched.clear()
    tensor_files.fetch_all(tensors)
    assert fetched == of_writer == ["d", "a", "b", "c"]


def test_a_tensor_is_not_copied_whole(tmp_path):
    values = np.zeros((1000, 50_000), np.float32)
    tracemalloc.start()
    try:
        tensor_files.write(tmp_path / "file", {"a": values.T, "b": values})
        assert tracemalloc.get_traced_memory()[1] < values.nbytes // 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(1, 1), (256, 256), (257, 300), (1000, 3), (3, 1000), (40, 513)])
@pytest.mark.parametrize("dtypes", [("uint16", "uint16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_transpose_is_numpy_s(shape, dtypes, rng):
    source = rng.normal(size=shape).astype(jnp.dtype(dtypes[0]))
    target = np.zeros(shape[::-1], jnp.dtype(dtypes[1]))
    transfers.transpose(source, target)
    np.testing.assert_array_equal(target, source.T.astype(target.dtype))


def test_a_cpu_shares_the_memory_of_what_is_read(rng):
    for shape in ((3,), (5, 7), (300, 400), (0, 4)):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            array = transfers.aligned(shape, dtype)
            assert array.shape == shape and array.dtype == dtype
            assert array.ctypes.data % 64 == 0 or not array.size
    array = transfers.aligned((1000, 1000), np.float32)
    array[...] = rng.normal(size=array.shape)
    before, on_device = array.copy(), jax.device_put(array, jax.devices("cpu")[0])
    assert on_device.unsafe_buffer_pointer() == array.ctypes.data
    jax.jit(lambda x: x + 1, donate_argnums=0)(on_device).block_until_ready()
    np.testing.assert_array_equal(array, before)


def test_a_model_that_was_read_can_be_donated(tmp_path):
    make_model().save_pretrained(tmp_path)
    state = nnx.state(LlamaForCausalLM.from_pretrained(tmp_path))
    before = jax.tree.map(np.array, state)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)
    doubled = step(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b * 2), doubled, before)))
