"""Which attention runs where, and that what we put around it is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax.models.attention import causal_attention, splash_attention

LENGTH = 256
SEGMENTS = jnp.repeat(jnp.array([[0, 1, 2, 2], [0, 0, 0, 1]]), LENGTH // 4, axis=1)


def inputs(rng, dtype=jnp.float32, length=LENGTH, width=64):
    make = lambda heads: jnp.asarray(rng.standard_normal((2, length, heads, width)), dtype)
    return make(4), make(2), make(2)


def true_attention(q, k, v, segment_ids):
    """In float64, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    length = q.shape[1]
    visible = np.tril(np.ones((length, length), bool))[None]
    if segment_ids is not None:
        visible = visible & (np.asarray(segment_ids)[:, :, None] == np.asarray(segment_ids)[:, None, :])
    out = np.empty_like(q)
    for head in range(q.shape[2]):
        shared = head // (q.shape[2] // k.shape[2])
        scores = np.where(
            visible, np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, shared]) / q.shape[3] ** 0.5, -np.inf
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, head] = weights / weights.sum(-1, keepdims=True) @ v[:, :, shared]
    return out


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["one segment", "segments"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_of_this_platform_is_causal_within_segments(rng, dtype, segment_ids):
    q, k, v = inputs(rng, dtype)
    with jax.default_matmul_precision("highest"):
        out = causal_attention(q, k, v, segment_ids)
    assert out.dtype == dtype
    error = np.abs(np.asarray(out, np.float64) - true_attention(q, k, v, segment_ids)).max()
    assert error <= (2e-5 if dtype == jnp.float32 else 3e-2)


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["one segment", "segments"])
def test_splash_attention_is_called_rightly(rng, segment_ids):
    q, k, v = inputs(rng)
    out = splash_attention(q, k, v, segment_ids, interpret=True)
    np.testing.assert_allclose(out, true_attention(q, k, v, segment_ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ["platform", "kind", "dtype", "length", "expected"],
    [
        ("tpu", "TPU v5 lite", jnp.bfloat16, 256, "splash"),
        ("tpu", "TPU v5 lite", jnp.bfloat16, 200, "dot_general"),
        ("gpu", "NVIDIA H200", jnp.float32, 256, "dot_general"),
        ("gpu", "Tesla T4", jnp.bfloat16, 256, "dot_general"),
        ("cpu", "cpu", jnp.bfloat16, 256, "dot_general"),
    ],
)
def test_each_device_gets_the_attention_that_it_can_run(rng, platform, kind, dtype, length, expected):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(rng, dtype, length)]
    device = AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = str(jax.make_jaxpr(causal_attention)(*types))
    assert ("splash" in jaxpr) == (expected == "splash")
    assert "cudnn" not in jaxpr and expected in jaxpr


def test_a_gpu_takes_cudnn_in_bfloat16(rng, platform):
    if platform != "gpu":
        pytest.skip("cuDNN is there on a GPU only")
    jaxpr = str(jax.make_jaxpr(causal_attention)(*inputs(rng, jnp.bfloat16)))
    assert "dot_product_attention" in jaxpr
