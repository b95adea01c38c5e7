"""The suite's cache of compiled programs, beside its environments: the second run of a tree compiles what changed.

JAX looks a program up by its text, the versions of jaxlib and XLA, the flags and the devices, so a change of ours is
compiled. What a program computes is never kept. Programs that call back into Python are always compiled.
"""

import ctypes
import functools
import gc
import itertools
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax

try:
    from jax._src.interpreters import mlir
except ImportError:  # it is private, and nothing but time is lost without it
    mlir = None

FOLDER = Path(__file__).parents[1] / ".venv" / "compiled"
LARGEST = 4 << 30  # bytes; then all begins anew


def keep() -> None:
    """Keeps the programs of this process, and reads those of others."""
    jax.config.update("jax_compilation_cache_dir", str(_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # what was measured on GPUs


def prepare() -> int | None:
    """Makes the folder, and says how many programs are in it; None where nothing can be written."""
    try:
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)  # programs are run: nobody else may put some there
        sizes = [entry.stat().st_size for entry in os.scandir(_folder())]
        if sum(sizes) > LARGEST:
            shutil.rmtree(_folder())
            return prepare()
    except OSError:
        return None
    return len(sizes) if os.access(_folder(), os.W_OK) else None


def _folder() -> Path:
    """A folder of its own for each kind of processor, since a folder may be copied to another machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # other systems do not move a tree's environments between machines
        lines = []
    processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return FOLDER / f"{zlib.crc32(''.join(processor).encode()):08x}"


def drop_beyond(most: int) -> None:
    """Drops the programs of this process where it holds more than `most` bytes. Only Linux says what it holds."""
    try:
        held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    if held > most:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # what glibc keeps for later
            trim(0)


def share_contexts(most: int = 100) -> None:
    """Lets this many programs share one MLIR context, which takes longer to make than a small program to lower.

    Programs stay apart: a context holds the types, constants and places in the code that they have in common. A JAX
    that makes its contexts elsewhere, or by arguments, goes on as it does.
    """
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    lowered = itertools.count()
    context = functools.lru_cache(1)(lambda _: make())

    def shared(*arguments, **options):
        if arguments or options or _is_lowering():
            return make(*arguments, **options)
        kept = context(next(lowered) // most)
        kept.allow_unregistered_dialects = False  # as in a new one, whatever a program before has left
        return kept

    vars(mlir)["make_ir_context"] = shared


def _is_lowering() -> bool:
    """Whether JAX runs a program while it lowers another one, of which it would become a part in the same context."""
    ir: Any = vars(mlir)["ir"]
    try:
        return ir.Context.current is not None
    except ValueError:
        return False
