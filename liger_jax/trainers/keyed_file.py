"""Numbers that a run computes once and stores in OUT, keyed by their inputs, so that a later start can read them.

Beside the file is one of the same name with the suffix .json, with the key and a digest that shows damage. Of several
processes all compute, and the first one writes.
"""

import collections
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data.laid_rows import LaidRows
from liger_jax.trainers.options import Settings
from liger_jax.training import digests, disk, processes
from liger_jax.training.files import read_json, write_json
from liger_jax.user_errors import UserError


def key(
    settings: Settings, read: Sequence[str], made_of: Mapping[str, str], rows: Iterable[LaidRows], *more: Any
) -> str:
    """The key of numbers that depend on the settings `read`, on the model, the data, and the pieces in each row."""
    values = settings.flat()
    order = [digests.of_bytes(np.ascontiguousarray(laid.pieces)) for laid in rows]
    return digests.of_json([{name: values[name] for name in read}, dict(made_of), order, *more])


def is_whole(path: Path, key: str) -> bool:
    """Whether the file has this key and its digest, for all processes; says so where it is damaged."""
    return not processes.most(int(not _is_whole(path, key)))


def _is_whole(path: Path, key: str) -> bool:
    about = read_json(path.with_suffix(".json"))
    if about.get("key") != key or not path.is_file():
        return False
    if digests.of_file(path) != about.get("digest"):
        print(f"{path} is damaged, and is made anew")
        return False
    return True


def write(path: Path, key: str, contents: Iterable[bytes], what: str, num_bytes: int) -> None:
    """Writes the file in the first process, while the others compute the contents with it, and then wait for the file.

    An error names `what` is written and, on a full disk, its size.
    """
    if processes.is_first():
        _write(path, key, contents, what, num_bytes)
    else:
        collections.deque(contents, maxlen=0)
    processes.wait()


def _write(path: Path, key: str, contents: Iterable[bytes], what: str, num_bytes: int) -> None:
    new, digest = path.with_suffix(".new"), hashlib.sha256()
    try:
        with new.open("wb") as file:
            for content in contents:
                digest.update(content)
                file.write(content)
        new.replace(path)
        write_json(path.with_suffix(".json"), {"key": key, "digest": digest.hexdigest()})
    except OSError as error:
        if disk.is_full(error):
            raise disk.full(what, path.parent, num_bytes) from error
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
