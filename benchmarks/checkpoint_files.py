"""Reading and saving a checkpoint beside raw reads and writes of as many bytes.

A model with random weights is saved and read in turns with the raw operations, in one process, and a figure is the
median over the turns. A raw write puts 64 MiB at a time into one file, and waits until the file is on the disk, as a
save does. A raw read copies the saved files from the page cache in two threads, each half of a file: into new memory,
which is what a model needs, or as `cat` does, into a small buffer that stays in the processor's cache. Beside the time
stands the processor's time of all threads, which other programs on the machine change less. Peaks are of the process's
memory with the pages of mapped files, less what it had before the call. With `--nf4` the projections are codes of
random bits, as bitsandbytes writes them, and are read only.
"""

import argparse
import gc
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.models.hugging_face import tensor_files, weights
from liger_jax.ops.block_quantized import NF4

CHUNK = 2**26


def main() -> None:
    """Prints a row of the table for a model."""
    options = arguments()
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(options, folder)
    finally:
        shutil.rmtree(folder)


def measure(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Times all four in turns, and prints their medians."""
    model, path = model_of(options), folder / "model"
    model.save_pretrained(path, max_shard_bytes=options.shard_bytes)
    if options.nf4:
        as_nf4(path, model)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",)) if jax.device_count() > 1 else None
    specs = lambda _, shape: P(*[None] * (len(shape) - 1), "fsdp")
    how = {} if mesh is None else dict(mesh=mesh, partition_specs=specs)
    calls: dict[str, Callable[[], object]] = {
        "raw write": lambda: raw_write(folder / "raw", size),
        "save": lambda: save(model, path, options.shard_bytes),
        "raw read": lambda: raw_read(path),
        "cat": lambda: raw_read(path, is_kept=False),
        "read": lambda: LlamaForCausalLM.from_pretrained(path, scan_layers=not options.unrolled, **how),
    }
    if options.nf4:
        calls = {name: call for name, call in calls.items() if name in ("raw read", "cat", "read")}
    seconds, peaks = {name: [] for name in calls}, dict.fromkeys(calls, 0.0)
    processor = {name: [] for name in calls}
    for turn in range(options.turns + 1):
        for name, call in calls.items():
            taken, of_processor, peak = timed(call)
            if turn:  # the first turn gets the process's memory from the system
                seconds[name].append(taken)
                processor[name].append(of_processor)
                peaks[name] = max(peaks[name], peak)
    rates = {name: size / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    print(f"{size / 1e9:.2f} GB;", "; ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()))
    print("processor's s:", "; ".join(f"{name} {statistics.median(each):.2f}" for name, each in processor.items()))
    print("peak, GiB:", "; ".join(f"{name} {peaks[name]:.2f}" for name in ("save", "read") if name in peaks))
    if "save" in rates:
        print(f"save / raw write: {rates['save'] / rates['raw write']:.2f}")
    print("; ".join(f"read / {name}: {rates['read'] / rates[name]:.2f}" for name in ("raw read", "cat")))


def model_of(options: argparse.Namespace) -> LlamaForCausalLM:
    """A model of random weights."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=32, tie_word_embeddings=options.tied,
    )  # fmt: skip
    how = dict(dtype=options.dtype, param_dtype=options.dtype, scan_layers=not options.unrolled)
    graph, state = nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0), **how)))
    draw = np.random.default_rng(0).standard_normal
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(draw(x.shape, np.float32).astype(x.dtype)), state))


def as_nf4(folder: pathlib.Path, model: LlamaForCausalLM) -> None:
    """Puts codes of random bits in place of the projections in a folder's only file."""
    (shard,) = weights.shards(nnx.state(model), 10**12)
    rng, tensors = np.random.default_rng(0), {}
    for name, tensor in shard.items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(tensor.shape)}
        count = int(np.prod(tensor.shape))
        tensors[name] = np.frombuffer(rng.bytes(count // 2), np.uint8)[:, None]
        tensors[f"{name}.absmax"] = rng.random(count // 64, np.float32)
        tensors[f"{name}.quant_map"] = np.asarray(NF4, np.float32)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    tensor_files.write(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    (folder / "config.json").write_text(json.dumps(config))


def save(model: LlamaForCausalLM, path: pathlib.Path, shard_bytes: int) -> None:
    """Saves a model into a new folder."""
    shutil.rmtree(path)
    model.save_pretrained(path, max_shard_bytes=shard_bytes)


def raw_write(path: pathlib.Path, size: int) -> None:
    """Writes as many bytes into a file, and removes it."""
    content = memoryview(np.random.default_rng(0).integers(0, 2**63, CHUNK // 8)).cast("B")
    with path.open("wb", buffering=0) as file:
        while size:
            size -= file.write(content[: min(size, CHUNK)])
        os.fsync(file.fileno())
    path.unlink()


def raw_read(path: pathlib.Path, *, is_kept: bool = True) -> None:
    """Reads a folder's tensors in two threads."""
    files = {file: file.stat().st_size for file in path.glob("*.safetensors")}
    arrays = {file: np.empty(size, np.uint8) for file, size in files.items()} if is_kept else {}

    def half(number: int) -> None:
        buffer = memoryview(bytearray(2**20))
        for file, size in files.items():
            at, end = number * (size // 2), size if number else size // 2
            with file.open("rb", buffering=0) as opened:
                opened.seek(at)
                while at < end:
                    into = memoryview(arrays[file])[at : at + CHUNK] if is_kept else buffer
                    at += opened.readinto(into[: end - at])

    threads = [threading.Thread(target=half, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """A call's seconds, those of the processor, and the GiB by which it lets the process grow at most."""
    status = lambda name: next(
        int(line.split()[1]) for line in pathlib.Path("/proc/self/status").read_text().splitlines() if name in line
    )
    gc.collect()
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, of_processor = time.perf_counter(), time.process_time()
    result = call()
    taken, of_processor = time.perf_counter() - began, time.process_time() - of_processor
    del result
    return taken, of_processor, (status("VmHWM") - before) / 2**20


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights")
    parser.add_argument("--layers", type=int, default=8, help="number of layers")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--unrolled", action="store_true", help="layers are not stacked")
    parser.add_argument("--nf4", action="store_true", help="projections in nf4, read only")
    parser.add_argument("--shard-bytes", type=int, default=5 * 10**9, help="the largest size of a file")
    parser.add_argument("--turns", type=int, default=5, help="turns of which medians are taken")
    parser.add_argument("--folder", help="where files are written; the system's folder for temporary ones by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
