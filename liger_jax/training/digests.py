"""Digests that show whether a checkpoint still holds what was saved."""

import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x3C6EF372))


def of_leaves(tree: Any) -> dict[str, str]:
    """A digest of each array, for any sharding. A change of one word changes it; other changes are missed with 2⁻⁶⁴."""
    digests = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # One program at a time: several that sum over the simulated devices of a CPU with few cores may deadlock.
        high, low = np.asarray(jax.block_until_ready(_sums(leaf))).tolist()
        digests[jax.tree_util.keystr(path)] = f"{leaf.dtype}{leaf.shape} {high:08x}{low:08x}"
    return digests


def of_json(values: Any) -> str:
    """A digest of a JSON value."""
    return of_bytes(json.dumps(values, sort_keys=True).encode())[:16]


def of_bytes(*buffers: Any) -> str:
    """The SHA-256 of bytes or contiguous arrays, one after the other."""
    digest = hashlib.sha256()
    for each in buffers:
        digest.update(each)
    return digest.hexdigest()


def of_file(path: pathlib.Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@jax.jit
def _sums(x):
    """Two sums mod 2³² over an array's words, each mixed with its index. For every index the mixing is a bijection."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    sums = [jnp.sum(_mixed(words ^ _mixed(place + seed)), dtype=jnp.uint32) for seed in _SEEDS]
    return jnp.stack(sums)


def _mixed(x):
    """The finalizer of MurmurHash3: https://github.com/aappleby/smhasher/wiki/MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x):
    """An array's bits as uint32, each element in separate words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    bits = (jnp.finfo if is_float else jnp.iinfo)(x.dtype).bits
    if bits < 8:  # such as int4, which has no unsigned type of whole bytes
        x, bits = x.astype(jnp.float32 if is_float else jnp.int32), 32
    unsigned = jnp.dtype(f"uint{min(bits, 32)}")  # 64 bits become two words
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
