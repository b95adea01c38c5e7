"""Arrays of more than 2³¹ elements on a GPU, where an offset of 32 bits would have gone round.

The first and the last rows are compared with the plain expression of these rows in float32. Only they have cotangents,
so that the gradients of weights, which sum over all rows, are theirs, too. An offset that goes round would read or
write other rows, which hold other numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import ops
from liger_jax.models.core import plain
from liger_jax.models.core.cache import cached_attention
from liger_jax.ops.decode_attention import decode_attention
from tests.ops._oracle import largest_error

pytestmark = pytest.mark.full

ELEMENTS = 2**31  # that an array has more than
LEAST_BYTES = 70 * 2**30  # of the GPU's memory
KEPT = 64  # rows compared at either end
TOLERANCE = 2e-2  # of bfloat16, as a share of the largest value


@pytest.fixture(autouse=True)
def has_memory(platform):
    if platform != "gpu" or jax.devices()[0].memory_stats()["bytes_limit"] < LEAST_BYTES:
        pytest.skip("needs a GPU of 80 GB")


@functools.partial(jax.jit, static_argnums=(0, 1))
def numbers(shape, seed):
    """Numbers of deviation 1 that look random, each by its own place, made without memory beside them."""
    count = jnp.uint32(seed)
    for axis in range(len(shape)):
        count = count * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    count = (count ^ (count >> 15)) * jnp.uint32(2246822519)
    count = (count ^ (count >> 13)) * jnp.uint32(3266489917)
    return ((count >> 8).astype(jnp.float32) * (3.4 / 2**24) - 1.7).astype(jnp.bfloat16)


def ends(x):
    """The first and the last rows along axis 0."""
    return jnp.concatenate([x[:KEPT], x[-KEPT:]])


def of_ends(dy):
    """The cotangent without all other rows."""
    row = jnp.arange(dy.shape[0]).reshape(-1, *[1] * (dy.ndim - 1))
    return jnp.where((row < KEPT) | (row >= dy.shape[0] - KEPT), dy, 0)


def rows(width):
    """Rows of this width with a few more than `ELEMENTS` elements, and no whole number of tiles."""
    return ELEMENTS // width + 2 * KEPT + 37


def check(op, expected, large, small=()):
    """`op(*large, *small)` and its gradients against `expected` of the ends: y and gradients of `large` by rows.

    Args:
        op: a function of arrays to one array with the rows of `large`.
        expected: the plain expression.
        large: arrays of many rows.
        small: arrays that all rows share.
    """

    @jax.jit
    def run(large, small):
        y, pull = jax.vjp(lambda large, small: op(*large, *small), large, small)
        dy = of_ends(numbers(y.shape, 99)).astype(y.dtype)
        of_large, of_small = pull(dy)
        return ends(y), [ends(x) for x in of_large], of_small, ends(dy)

    y, of_large, of_small, dy = run(large, small)
    wide = lambda arrays: [x.astype(jnp.float32) for x in arrays]
    with jax.default_matmul_precision("highest"):
        plain_y, pull = jax.vjp(lambda large, small: expected(*large, *small), wide(map(ends, large)), wide(small))
        plain_large, plain_small = pull(dy.astype(jnp.float32))
    for found, truth in zip([y, *of_large, *of_small], [plain_y, *plain_large, *plain_small], strict=True):
        assert largest_error(found.astype(jnp.float32), np.asarray(truth)) < TOLERANCE


@pytest.mark.parametrize("kernel", ["triton", "mosaic_gpu"])
def test_norms(kernel):
    x, scale = numbers((rows(4096), 4096), 1), numbers((4096,), 2)
    op = functools.partial(ops.rms_norm, eps=1e-6, implementation=kernel)
    check(op, lambda x, scale: plain.rms_norm(x, scale, eps=1e-6, offset=0.0, casting_mode="llama"), [x], [scale])


def test_gates():
    gate, up = (numbers((rows(14_336), 14_336), i) for i in (1, 2))
    check(functools.partial(ops.swiglu, implementation="triton"), plain.swiglu, [gate, up])


@pytest.mark.parametrize("kernel", ["triton", "mosaic_gpu"])
def test_attention(kernel):
    """Documents of 64 tokens, so that the ends see nothing else. cuDNN refuses so many."""
    t = -(-rows(4096) // KEPT) * KEPT
    q, k, v = numbers((t, 32, 128), 1), numbers((t, 8, 128), 2), numbers((t, 8, 128), 3)

    def attend(q, k, v, **options):
        ids = jnp.arange(len(q), dtype=jnp.int32)[None] // KEPT
        return ops.causal_attention(q[None], k[None], v[None], ids, **options)[0]

    check(
        functools.partial(attend, implementation=kernel),
        functools.partial(attend, implementation="xla"),
        [q, k, v],
    )


@pytest.mark.parametrize("layer", [0, 32])
def test_attention_to_a_cache(layer):
    """The cache has 33 layers; the first and the last row are compared."""
    shape, filled = (33, 64, 1024, 8, 128), jnp.int32(1000)
    keys, values, q = numbers(shape, 1), numbers(shape, 2), numbers((64, 32, 128), 3)
    positions = jnp.broadcast_to(jnp.arange(1024, dtype=jnp.int32), (64, 1024))
    number = jnp.int32(layer)
    found = jax.jit(decode_attention)(q, keys, values, positions, number, filled)
    of_two = lambda x: x[layer, ::63, :1000].astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        last = jnp.full((2, 1), 999, jnp.int32)
        own = q[::63, None].astype(jnp.float32)
        expected = cached_attention(own, of_two(keys), of_two(values), last, positions[:2, :1000])[:, 0]
    assert largest_error(found[::63].astype(jnp.float32), expected) < TOLERANCE


def test_losses_of_logits():
    logits = numbers((rows(128_256), 128_256), 1)
    labels = jnp.arange(len(logits), dtype=jnp.int32) * 7919 % 128_256
    check(
        lambda x: ops.cross_entropy(x, labels, reduction="none", implementation="triton"),
        lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), ends(labels)[:, None], axis=1)[:, 0],
        [logits],
    )


@pytest.mark.parametrize(("kernel", "mode"), [("triton", "lean"), ("mosaic_gpu", "fast"), ("mosaic_gpu", "lean")])
def test_fused_losses(kernel, mode):
    v = 128_256
    hidden, weight = numbers((rows(v), 256), 1), numbers((v, 256), 2)
    labels = jnp.arange(len(hidden), dtype=jnp.int32) * 7919 % v
    weights = of_ends(numbers(hidden.shape[:1], 3)).astype(jnp.float32)  # the others do not count
    options = dict(reduction="sum", mode=mode, implementation=kernel)

    def fused(x, w):
        return ops.fused_linear_cross_entropy(x, w, labels, token_weights=weights, **options)

    def expected(x, w):
        log_probs = jax.nn.log_softmax(x @ w.T)
        return -jnp.sum(ends(weights) * jnp.take_along_axis(log_probs, ends(labels)[:, None], axis=1)[:, 0])

    loss, (dx, dw) = jax.jit(jax.value_and_grad(fused, (0, 1)))(hidden, weight)
    with jax.default_matmul_precision("highest"):
        wide = ends(hidden).astype(jnp.float32), weight.astype(jnp.float32)
        truth, gradients = jax.value_and_grad(expected, (0, 1))(*wide)
    for found, exact in zip([loss, ends(dx), dw], [truth, *gradients], strict=True):
        assert largest_error(found.astype(jnp.float32), np.asarray(exact)) < TOLERANCE


@pytest.mark.parametrize("kernel", ["triton", "mosaic_gpu"])
def test_feed_forwards(kernel):
    f = 14_336
    count = rows(f) // 8 * 8  # as many as Hopper's copy engine moves at a time
    x, *weights = numbers((count, 256), 1), numbers((256, f), 2), numbers((256, f), 3), numbers((f, 256), 4)
    weights = [w * jnp.bfloat16(1 / 16) for w in weights]
    check(
        functools.partial(ops.gated_mlp, recomputed=True, implementation=kernel),
        lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down,
        [x],
        weights,
    )


def test_grouped_products():
    x, weight = numbers((rows(4096), 64), 1), numbers((2, 64, 4096), 2)
    sizes = jnp.array([KEPT, len(x) - KEPT], jnp.int32)
    check(
        lambda x, w: ops.grouped_matmul(x, w, sizes, implementation="mosaic_gpu"),
        lambda x, w: jnp.concatenate([x[:KEPT] @ w[0], x[KEPT:] @ w[1]]),
        [x],
        [weight],
    )
