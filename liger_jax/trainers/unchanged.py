"""Whether a run has changed what it began with.

Few small updates are lost where weights are saved in bfloat16, and adapters may have no gradient.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from liger_jax.models.hugging_face import adapter_files
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.hugging_face.weights import tensors_of
from liger_jax.trainers import result
from liger_jax.trainers.options import Settings

_LARGER = "A higher --learning-rate or more --steps change more"
_FEW = 0.01  # the share of weights up to which they count as unchanged: those near 0 change by any update
_NUMBERS = 2**24  # that are compared at once


def lines(settings: Settings, source: Source, target: Path) -> Iterator[str]:
    """Lines about a result that is equal to what the run began with. `source`: the model's folder."""
    with contextlib.suppress(OSError, ValueError):  # the run itself has ended well
        yield from (_of_adapters if result.only_adapters(settings) else _of_weights)(settings, source, target)


def _of_weights(settings: Settings, source: Source, target: Path) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        old, new = tensors_of(source.folder, stack), tensors_of(target, stack)
        common = [name for name in new if name in old and old[name].get_shape() == new[name].get_shape()]
        total, changed, dtype = sum(math.prod(new[name].get_shape()) for name in common), 0, np.dtype(np.float32)
        for name in common:
            for before, after in zip(_blocks(old[name]), _blocks(new[name]), strict=True):
                dtype = after.dtype
                changed += int(np.count_nonzero(before.astype(dtype) != after))
                if changed > _FEW * total:
                    return
        if not total:
            return
    if dtype.itemsize < 4 and settings.folder.save_dtype != "float32":
        cure = f"the updates are too small for {dtype}: --save-dtype float32 keeps them. {_LARGER}"
    else:
        cure = _why(dtype)
    yield f"unchanged: {_number(changed, total)} weights in {target} are those of {settings.placement.model}; {cure}"


def of_arrays(before: Any, after: Any) -> Iterator[str]:
    """A line about parameters in memory that are as they began."""
    pairs = [*zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    total = sum(new.size for _, new in pairs)
    changed = sum(int(np.count_nonzero(np.asarray(old) != np.asarray(new))) for old, new in pairs)
    if changed <= _FEW * total:
        dtype = pairs[0][1].dtype
        yield f"unchanged: {_number(changed, total)} parameters are as they began; {_why(dtype)}"


def _number(changed: int, total: int) -> str:
    return f"all {total:,}" if not changed else f"all but {changed:,} of {total:,}"


def _why(dtype: Any) -> str:
    return f"the loss had no gradient, or the updates are too small for {dtype}. {_LARGER}"


def _of_adapters(settings: Settings, source: Source, target: Path) -> Iterator[str]:
    _, tensors = adapter_files.read(target)
    if (begun := settings.adapters.adapters) is not None:
        _, old = adapter_files.read(Path(begun))
        if old.keys() == tensors.keys() and all(np.array_equal(old[name], tensors[name]) for name in tensors):
            yield f"unchanged: the adapters in {target} are those of {begun}, as the loss had no gradient. {_LARGER}"
        return
    is_zero = {name: not x.any() for name, x in tensors.items() if ".lora_B" in name}
    if is_zero and all(is_zero.values()):
        yield (
            f"unchanged: the adapters in {target} are 0, as they began, and change nothing: the loss had no gradient, "
            "such as by rewards or answers that are all alike"
        )


def _blocks(tensor: Any) -> Iterator[np.ndarray]:
    """The numbers of a tensor, some rows at a time."""
    size, *others = tuple(tensor.get_shape()) or (0,)
    rows, whole = max(1, _NUMBERS // max(1, math.prod(others))), [slice(None)] * len(others)
    for begin in range(0, size, rows):
        yield np.asarray(tensor[(slice(begin, begin + rows), *whole)])
