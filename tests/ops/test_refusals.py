"""What an implementation does not refuse, it can lower: forward and backward, at any shapes and dtypes.

Nothing is compiled or run. Devices are described, and need not be there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import ops

DEVICES = {
    "triton": ("NVIDIA A100-SXM4-80GB", 108, "gpu", "cuda"),
    "mosaic_gpu": ("NVIDIA H200", 132, "gpu", "cuda"),
    "mosaic_tpu": ("TPU v5 lite", 1, "tpu", "tpu"),
    "splash": ("TPU v5 lite", 1, "tpu", "tpu"),
}
NORM_IMPLEMENTATIONS = ("triton", "mosaic_gpu", "mosaic_tpu")


def typed(rng, *shapes, dtypes=(jnp.float32, jnp.bfloat16, jnp.float16)):
    """Types of these shapes, each with its own dtype."""
    return [jax.ShapeDtypeStruct(shape, dtypes[rng.integers(len(dtypes))]) for shape in shapes]


def like(x, *shapes):
    return [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]


def some(rng, *sizes):
    return int(sizes[rng.integers(len(sizes))])


def norm(op, num_rows, num_vectors, rng):
    """Few rows and many, narrow and wide, with parameters of any dtype."""
    n, d = some(rng, 1, 37, 4096), some(rng, 1, 70, 896, 2304, 8192, 18432, 24576, 49152, 65537)
    return op, typed(rng, *[(n, d)] * num_rows, *[(d,)] * num_vectors)


def attention(rng):
    k, group, h = some(rng, 1, 2), some(rng, 1, 3), some(rng, 8, 64, 80, 100, 128, 256, 264)
    b, t = some(rng, 1, 3), some(rng, 1, 7, 64, 333)
    (q,) = typed(rng, (b, t, k * group, h))
    options = dict(window=some(rng, 1, 50, 2**40), softcap=[None, 30.0][rng.integers(2)])
    return functools.partial(ops.causal_attention, **options), [q, *like(q, *[(b, t, k, h)] * 2)]


def gated(op, rng):
    gate, *_ = typed(rng, (some(rng, 1, 37, 4096), some(rng, 1, 70, 1000, 14336)))
    return op, [gate, gate]


def mlp(rng):
    n, d, f = some(rng, 8, 37, 1024), some(rng, 64, 70, 512), some(rng, 64, 100, 1024)
    (x,) = typed(rng, (n, d))
    return ops.gated_mlp, [x, *like(x, (d, f), (d, f), (f, d))]


def linear_loss(rng):
    n, d, v = some(rng, 1, 130, 1024), some(rng, 1, 70, 512), some(rng, 1, 100, 4096, 32003)
    labels, options = jnp.zeros(n, jnp.int32), dict(mode=["lean", "auto"][rng.integers(2)])
    hidden, weight, bias = typed(rng, (n, d), (v, d), (v,))
    loss = functools.partial(ops.fused_linear_cross_entropy, **options)
    return lambda h, w, b, **named: loss(h, w, labels, bias=b, **named), [hidden, weight, bias]


def logits_loss(rng):
    n, v = some(rng, 1, 130, 1024), some(rng, 1, 100, 4096, 32003)
    return functools.partial(ops.cross_entropy, labels=jnp.zeros(n, jnp.int32)), typed(rng, (n, v))


CASES = {
    "rms_norm": (functools.partial(norm, ops.rms_norm, 1, 1), NORM_IMPLEMENTATIONS),
    "fused_add_rms_norm": (functools.partial(norm, ops.fused_add_rms_norm, 2, 1), NORM_IMPLEMENTATIONS),
    "layer_norm": (functools.partial(norm, ops.layer_norm, 1, 2), NORM_IMPLEMENTATIONS),
    "causal_attention": (attention, ("triton", "mosaic_gpu", "splash")),
    "swiglu": (functools.partial(gated, ops.swiglu), ("triton",)),
    "gated_mlp": (mlp, ("triton", "mosaic_gpu")),
    "fused_linear_cross_entropy": (linear_loss, ("triton", "mosaic_gpu", "mosaic_tpu")),
    "cross_entropy": (logits_loss, ("triton", "mosaic_tpu")),
}
EACH = [
    # To trace a kernel for Hopper takes seconds.
    pytest.param(name, kernels, marks=[pytest.mark.full] * (kernels == "mosaic_gpu" and name != "causal_attention"))
    for name, (_, names) in CASES.items()
    for kernels in names
]


def lowered(op, types, implementation):
    """Whether the implementation takes the case. If it does, value and gradients are lowered for its device."""
    kind, num_cores, platform, target = DEVICES[implementation]
    device = AbstractDevice(kind, num_cores, platform)
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)

    def run(*arrays):
        value, pullback = jax.vjp(lambda *xs: op(*xs, implementation=implementation), *arrays)
        return value, pullback(jax.tree.map(jnp.ones_like, value))

    with jax.sharding.use_abstract_mesh(mesh):
        try:
            traced = jax.jit(run).trace(*types)
        except ValueError as error:
            if "cannot run here with implementation=" in str(error):
                return False
            raise
        text = traced.lower(lowering_platforms=(target,)).as_text()
    assert "custom_call" in text
    return True


@pytest.mark.parametrize("name, kernels", EACH, ids=str)
@pytest.mark.parametrize("draws", [1, pytest.param(40, marks=pytest.mark.full)])
def test_what_is_not_refused_is_lowered(name, kernels, draws, rng, unchecked_types):
    taken, draws = 0, min(draws, 8) if kernels == "mosaic_gpu" else draws
    for _ in range(200):
        seed = int(rng.integers(2**32))
        op, types = CASES[name][0](np.random.default_rng(seed))
        try:
            taken += lowered(op, types, kernels)
        except Exception as error:
            raise AssertionError(f"{name} by {kernels} of {types} (seed {seed})") from error
        if taken == draws:
            return
    assert taken


def test_a_wide_sum_of_two_dtypes_steps_down_from_the_tpu():
    """Its backward moves 16 bytes of an element: 16 rows of 24,576 do not fit."""
    types = [jax.ShapeDtypeStruct((16, 24576), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    assert not lowered(ops.fused_add_rms_norm, types, "mosaic_tpu")
    assert lowered(ops.fused_add_rms_norm, types[:1] * 2, "mosaic_tpu")
