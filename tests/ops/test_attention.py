"""Attention against float64, whichever kernel runs it, and which runs where."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from liger_jax import Segments, ops
from liger_jax.models.core.remat import POLICIES
from liger_jax.ops import layout
from liger_jax.ops.place import Place, described
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper as hopper_blocks
from liger_jax.pallas_kernels.attention import (
    cudnn,
    intervals,
    mosaic_gpu,
    mosaic_gpu_key_gradients,
    splash,
    triton,
)
from tests.ops._oracle import (
    ROUNDED,
    TOLERANCE,
    WORSE_THAN_PLAIN,
    check_float32,
    largest_error,
    normal,
    random_cotangents,
    rms_error,
    truth,
    value_and_gradients,
)
from tests.ops.references import attention as reference

LENGTH = 256
SEGMENTS = jnp.repeat(jnp.array([[1, 2, 3, 3], [1, 1, 1, 2]]), LENGTH // 4, axis=1)


def inputs(rng, dtype=jnp.float32, length=LENGTH, width=64):
    make = lambda heads: jnp.asarray(rng.standard_normal((2, length, heads, width)), dtype)
    return make(4), make(2), make(2)


causal_attention = ops.causal_attention
chunked_attention = functools.partial(causal_attention, implementation="xla")


OPTIONS = {
    "plain": {},
    "window": dict(window=50),
    "window of one": dict(window=1),
    "softcap": dict(softcap=2.0),
    "scale": dict(scale=0.3),
    "segments": dict(segment_ids=SEGMENTS),
    "all": dict(window=100, softcap=3.0, scale=0.2, segment_ids=SEGMENTS),
}
FIRST = ("plain", "window", "all")  # of each kind; the full run has the others
each_option = pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=() if name in FIRST else pytest.mark.full) for name, o in OPTIONS.items()],
)


def errors(attention, q, k, v, options, **own):
    """The errors of the value and of the gradients by q, k and v, each over its largest entry in float64."""
    cotangent = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def run(function, *inputs, **all_options):
        def loss(*x):
            value = function(*x, **all_options)
            return jnp.sum(value * jnp.asarray(cotangent, value.dtype)), value

        gradients, value = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
        return [value, *gradients]

    found = run(attention, q, k, v, **options, **own)
    with jax.enable_x64(True):
        truth = run(reference.causal_attention, *(jnp.asarray(x, jnp.float64) for x in (q, k, v)), **options)
    found, truth = ([np.asarray(x, np.float64) for x in xs] for xs in (found, truth))
    size = lambda t: np.abs(t).max() or 1.0  # where one key is seen, its score has no gradient
    return [np.abs(f - t).max() / size(t) for f, t in zip(found, truth, strict=True)]


@pytest.fixture(params=["mosaic_gpu", "triton"])
def packed(request, platform):
    """Each implementation of ours for packed rows on GPUs, as it runs here."""
    if request.param == "mosaic_gpu":
        return request.getfixturevalue("hopper")
    return "triton" if platform == "gpu" else "triton:interpret"


def random_ids(rng, kind, batch, length):
    """Segments of every length; in one of ids that come back, and with padding."""
    if kind == "one segment":
        return None
    if kind == "one-token segments":
        return jnp.broadcast_to(1 + jnp.arange(length), (batch, length))
    ids = 1 + np.cumsum(rng.random((batch, length)) < 0.02, axis=1)
    if kind == "ids that come back":
        return jnp.asarray(rng.integers(1, 4, (batch, length)), jnp.int32)
    if kind == "padded":
        ids[0, : length // 5] = 2**31 - 1  # as a model's attention_mask makes of padding on the left
        ids[0, -length // 7 :] = ids[1, -length // 3 :] = 0
    return jnp.asarray(ids, jnp.int32)


def full_unless(name, *chosen):
    """Marks a case that only the full run has."""
    return [] if name in chosen else [pytest.mark.full]


LAYOUTS = {
    "packed": ("packed", 201, (2, 1, 64), {}),
    "all": ("ids that come back", 136, (2, 1, 64), dict(window=70, softcap=3.0, scale=0.3)),
    "one segment": ("one segment", 256, (2, 1, 64), {}),
    "groups of 7": ("packed", 257, (7, 1, 64), dict(window=70)),
    "padded": ("padded", 264, (2, 1, 128), {}),
    "width 80": ("packed", 130, (2, 1, 80), {}),
    "width 256": ("packed", 140, (2, 1, 256), dict(softcap=3.0)),
    "one position": ("one segment", 1, (2, 1, 64), {}),
    "one-token segments": ("one-token segments", 129, (1, 1, 64), {}),
    "groups of 4": ("padded", 385, (4, 1, 64), dict(window=20)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name, marks=full_unless(name, "packed", "all")) for name, c in LAYOUTS.items()]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)])
def test_packed_rows_round_no_more_than_in_chunks_and_the_same_in_every_run(packed, case, dtype, rng):
    kind, length, (query_heads, kv_heads, width), options = case
    ids = random_ids(rng, kind, 2, length)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, length, heads, width)), dtype)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    attend = lambda name: functools.partial(causal_attention, **options, implementation=name)
    arrays = q, k, v, ids
    cotangents = random_cotangents(attend("xla"), arrays, rng)
    expected = truth(functools.partial(reference.causal_attention, segment_ids=ids, **options), (q, k, v), cotangents)
    plain = value_and_gradients(attend("xla"), arrays, cotangents, wrt=range(3))
    run = jax.jit(functools.partial(value_and_gradients, attend(packed), wrt=range(3)))
    found, again = (run(arrays, cotangents) for _ in range(2))
    for x, y, p, t in zip(found, again, plain, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        assert rms_error(x, t) <= WORSE_THAN_PLAIN * rms_error(p, t) + ROUNDED


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name, marks=full_unless(name, "packed", "padded")) for name, c in LAYOUTS.items()]
)
def test_chunks_have_the_values_of_every_layout(case, rng):
    kind, length, (query_heads, kv_heads, width), options = case
    ids = random_ids(rng, kind, 2, length)
    q, k, v = normal(rng, *((2, length, heads, width) for heads in (query_heads, kv_heads, kv_heads)))
    found = chunked_attention(q, k, v, ids, **options)
    attend = functools.partial(reference.causal_attention, segment_ids=ids, **options)
    assert largest_error(found, truth(attend, (q, k, v), jnp.zeros(q.shape))[0]) <= TOLERANCE


def test_no_nan_leaves_another_segment(packed, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((1, 200, 1, 64)), jnp.bfloat16) for _ in range(3))
    ids = jnp.where(jnp.arange(200)[None] >= 90, 2, 1)
    attend = jax.jit(functools.partial(causal_attention, segment_ids=ids, implementation=packed))
    clean, dirty = attend(q, k, v), attend(q, k.at[:, :90].set(jnp.nan), v)
    np.testing.assert_array_equal(clean[:, 90:], dirty[:, 90:])


def test_segments_of_numpy_ids_need_no_jit(rng):
    x, ids = rng.standard_normal((2, 5, 1, 4)).astype("float32"), np.array([[1, 1, 2, 2, 0], [1, 2, 3, 3, 3]])
    found = causal_attention(x, x, x, Segments.of(ids))
    y = jnp.asarray(x)
    np.testing.assert_array_equal(found, causal_attention(y, y, y, jnp.asarray(ids)))


@pytest.mark.parametrize("as_segments", [False, True])
def test_a_row_with_padding_before_a_segment_is_nan_and_its_neighbour_is_not(packed, as_segments, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 136, 1, 64)), jnp.bfloat16) for _ in range(3))
    ids = jnp.where(jnp.arange(136)[None] >= 70, jnp.array([[0], [1]]), jnp.array([[2], [0]]))

    def attend(q, k, v, ids):
        ids = Segments.of(ids) if as_segments else ids
        return causal_attention(q, k, v, ids, implementation=packed)

    gradient = jax.grad(lambda *arrays: attend(*arrays).sum())
    value, by_query = jax.jit(lambda *arrays: (attend(*arrays), gradient(*arrays)))(q, k, v, ids)
    for x in (value, by_query):
        assert np.isfinite(x[0]).all() and np.isnan(x[1]).all()
    for wrong, message in ((ids, "hold a 0 at position 69 and 1 after it"), (ids - 1, "hold -1, but must count from")):
        with pytest.raises(ValueError, match=f"causal_attention: segment_ids {message}"):
            attend(q, k, v, wrong)


@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_hopper_gives_the_same_however_blocks_share_the_work(kv_heads, hopper, rng, monkeypatch):
    """Few blocks go through several tiles each, and their warpgroups have keys of their own."""
    q, k, v = (jnp.asarray(rng.standard_normal((1, 264, heads, 64)), jnp.bfloat16) for heads in (2, kv_heads, kv_heads))
    attend = functools.partial(causal_attention, segment_ids=random_ids(rng, "packed", 1, 264), implementation=hopper)
    cotangents = random_cotangents(attend, (q, k, v), rng)
    expected = value_and_gradients(attend, (q, k, v), cotangents)
    monkeypatch.setattr(hopper_blocks, "NUM_CORES", 2)
    monkeypatch.setattr(mosaic_gpu_key_gradients, "FEW_TILES", 0)
    jax.clear_caches()
    found = value_and_gradients(attend, (q, k, v), cotangents)
    for x, y in zip(found[:2], expected[:2], strict=True):  # out and dq
        np.testing.assert_array_equal(x, y)
    for x, y in zip(found[2:], expected[2:], strict=True):  # dk and dv: sums in another order, rounded to bfloat16
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2**-7, atol=1e-3)


def run_kernels(name, q, k, v, do, segments, **options):
    """A GPU's kernels as sequence sharding calls them → (out, dq, dk, dv), and the log-sum-exp in base 2."""
    options = dict(window=None, softcap=None, scale=None) | options
    is_interpreted, is_hopper_s, module = name.endswith(":interpret"), name.startswith("mosaic_gpu"), mosaic_gpu
    if not is_hopper_s:
        module, options = triton, options | dict(interpret=is_interpreted)
    with hopper_blocks.interpreter(is_interpreted and is_hopper_s):
        out, lse = module.forward(q, k, v, segments, **options)
        return (out, *module.backward(q, k, v, segments, out, lse, do, **options)), lse[..., : q.shape[1]]


@pytest.mark.parametrize(
    "options", [dict(window=70, softcap=3.0), pytest.param({}, marks=pytest.mark.full)], ids=["window", "plain"]
)
def test_queries_may_stand_anywhere_in_a_longer_row(options, packed, rng):
    """A device that has a part of the queries calls it so; only the running program knows where the part begins."""
    q_length, length, start = 100, 264, 129
    q, do = (jnp.asarray(rng.standard_normal((2, q_length, 2, 64)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, length, 1, 64)), jnp.bfloat16) for _ in range(2))
    ids = random_ids(rng, "packed", 2, length)
    kernels = functools.partial(run_kernels, packed, **options)
    run = lambda *arrays, ids, q_offset: kernels(*arrays, Segments.of(ids), q_offset=q_offset)
    found, _ = jax.jit(run)(q, k, v, do, ids=ids, q_offset=jnp.int32(start))

    def attend(q, k, v):
        whole = jnp.zeros((2, length, *q.shape[2:]), q.dtype).at[:, start : start + q_length].set(q)
        return reference.causal_attention(whole, k, v, ids, **options)[:, start : start + q_length]

    plain = value_and_gradients(attend, (q, k, v), do)
    expected = truth(attend, (q, k, v), do)
    for x, p, t in zip(found, plain, expected, strict=True):
        assert rms_error(x, t) <= WORSE_THAN_PLAIN * rms_error(p, t) + ROUNDED


def rows_of_heads(shape):
    """The types of queries and keys of a shape (B, Tq, T, Q, K, H)."""
    batch, q_length, length, query_heads, kv_heads, width = shape
    row = lambda length, heads: jax.ShapeDtypeStruct((batch, length, heads, width), jnp.bfloat16)
    return row(q_length, query_heads), row(length, kv_heads)


def test_rows_have_gradients_in_one_pass_where_it_was_measured_to_be_faster():
    """benchmarks/results/attention.md has the measurements."""
    faster = [
        (2, 8192, 8192, 32, 8, 128),
        (2, 8192, 8192, 32, 8, 96),
        (16, 2048, 2048, 32, 8, 128),
        (2, 8192, 8192, 16, 16, 128),
        (8, 2048, 2048, 32, 8, 64),
        (16, 1024, 1024, 14, 2, 64),
        (2, 8192, 8192, 14, 2, 64),
        (1, 16384, 65536, 32, 8, 128),  # a device's chunk of a row
    ]
    slower = [
        (32, 1024, 1024, 32, 8, 64),
        (1, 8192, 8192, 14, 2, 64),
        (8, 2048, 2048, 16, 16, 64),
        (8, 2048, 2048, 16, 16, 128),
        (2, 8192, 8192, 14, 2, 128),
        (2, 8192, 8192, 32, 8, 256),
    ]
    has_kernel = jax.__version_info__ >= (0, 11)
    for shapes, is_faster in ((faster, has_kernel), (slower, False)):
        for shape in shapes:
            assert mosaic_gpu.takes_one_pass(*rows_of_heads(shape), None, None) == is_faster, shape
    q, k = rows_of_heads(faster[0])
    assert not mosaic_gpu.takes_one_pass(q, k, SEGMENTS, None)
    for width, window, is_faster in ((64, 1024, True), (64, 512, False), (128, 1024, False), (128, 8192, True)):
        q, k = rows_of_heads((2, 8192, 8192, 32, 8, width))
        assert mosaic_gpu.takes_one_pass(q, k, None, window) == (is_faster and has_kernel)


@pytest.mark.parametrize("varies", [False, True])
def test_gradients_that_jax_says_vary_over_a_mesh_are_made_by_two_kernels(varies):
    q, k = rows_of_heads((2, 8192, 8192, 32, 8, 128))
    lse = jax.ShapeDtypeStruct((2, 32, 8192), jnp.float32)

    def gradients(q, k, v, out, lse, do):
        return mosaic_gpu.backward(q, k, v, None, out, lse, do, window=None, softcap=None, scale=None)

    if varies:
        gradients = jax.shard_map(gradients, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        program = str(jax.make_jaxpr(gradients)(q, k, k, q, lse, q))
    in_one_pass = not varies and jax.__version_info__ >= (0, 11)
    assert ("causal_attention_gradients" in program) == in_one_pass
    assert ("causal_attention_query_gradient" in program) != in_one_pass


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not compile it")
@pytest.mark.parametrize(
    ("shape", "q_offset", "options"),
    [
        ((1, 128, 128, 2, 1, 128), None, {}),  # a tile, whose steps an interpreter can check for races
        ((1, 24, 136, 2, 1, 64), 112, {"softcap": 3.0}),
        ((2, 777, 777, 8, 2, 128), None, {}),
        ((2, 256, 1024, 8, 2, 128), 300, {}),
        ((1, 300, 300, 4, 4, 100), None, {}),
        ((2, 777, 777, 8, 2, 64), None, {"window": 200}),
        ((2, 200, 1000, 8, 2, 64), 0, {}),
        pytest.param((1, 5, 5, 2, 1, 80), None, {}, marks=pytest.mark.full),
    ],
)
def test_gradients_in_one_pass(shape, q_offset, options, hopper, rng, monkeypatch):
    """dq is summed over tiles of keys in memory, always in one order. A NaN stays in its row of the batch."""
    batch, q_length, length, query_heads, kv_heads, width = shape
    if hopper != "mosaic_gpu":
        if query_heads * length > 800:
            pytest.skip("too much for an interpreter")
        if length > 128:  # to an interpreter blocks that add to the same memory are a race: it knows of no order
            gpu: Any = plgpu  # JAX 0.10's types do not know it
            without_races = gpu.InterpretGPUParams(detect_races=False)
            monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda **_: without_races, raising=False)
    row = lambda length, heads: jnp.asarray(rng.standard_normal((batch, length, heads, width)), jnp.bfloat16)
    q, do, k, v = row(q_length, query_heads), row(q_length, query_heads), row(length, kv_heads), row(length, kv_heads)
    monkeypatch.setattr(mosaic_gpu, "takes_one_pass", lambda *_: True)
    run = jax.jit(lambda do, q_offset: run_kernels(hopper, q, k, v, do, None, q_offset=q_offset, **options)[0])
    found = run(do, q_offset)
    start = q_offset or 0

    def attend(q, k, v):
        whole = jnp.zeros((batch, length, *q.shape[2:]), q.dtype).at[:, start : start + q_length].set(q)
        return reference.causal_attention(whole, k, v, **options)[:, start : start + q_length]

    plain, expected = value_and_gradients(attend, (q, k, v), do), truth(attend, (q, k, v), do)
    for x, p, t in zip(found, plain, expected, strict=True):
        assert rms_error(x, t) <= WORSE_THAN_PLAIN * rms_error(p, t) + ROUNDED
    for x, again in zip(found, run(do, q_offset), strict=True):
        np.testing.assert_array_equal(x, again)
    for x in run(do.at[0, q_length // 2].set(jnp.nan), q_offset)[1:]:
        assert jnp.isnan(x[0]).any()
        assert not jnp.isnan(x[1:]).any()


@pytest.mark.usefixtures("hardware")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not compile it")
def test_gradients_in_one_pass_are_the_same_in_a_loop_over_layers(rng, monkeypatch):
    """XLA would fuse the call with the loop's slices, and its semaphores would not begin at 0."""
    row = lambda heads: jnp.asarray(rng.standard_normal((3, 2, 777, heads, 64)), jnp.bfloat16)
    layers = row(8), row(2), row(2), row(8)
    monkeypatch.setattr(mosaic_gpu, "takes_one_pass", lambda *_: True)

    def run(layer):
        q, k, v, do = layer
        return run_kernels("mosaic_gpu", q, k, v, do, None)[0]

    found, alone = jax.jit(lambda *layers: jax.lax.map(run, layers))(*layers), jax.jit(run)
    for i in range(3):
        for x, y in zip(found, alone(tuple(x[i] for x in layers)), strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_log_sums_put_parts_of_the_keys_together(packed, rng):
    """Ring attention adds up such parts. A query that sees no key of a part gets zeros of weight 0 from it."""
    q = jnp.asarray(rng.standard_normal((1, 100, 2, 64)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.standard_normal((1, 200, 1, 64)), jnp.bfloat16) for _ in range(2))
    start, cut = 70, 100  # both parts have one shape, and so one program
    run = jax.jit(lambda q, k, v, q_offset: run_kernels(packed, q, k, v, q, None, q_offset=q_offset))
    (whole, *_), log_sum = run(q, k, v, start)
    parts = [run(q, k[:, :cut], v[:, :cut], start), run(q, k[:, cut:], v[:, cut:], start - cut)]
    np.testing.assert_allclose(jnp.logaddexp2(*(lse for _, lse in parts)), log_sum, rtol=1e-5)
    weights = [jnp.exp2(lse - log_sum).swapaxes(1, 2)[..., None] for _, lse in parts]
    summed = sum(weight * out.astype(jnp.float32) for weight, ((out, *_), _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(summed, whole.astype(jnp.float32), rtol=2**-6, atol=2**-6)
    for gradients, _ in parts:
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in gradients)
    assert not np.any(parts[1][0][0][:, : cut - start])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("module", [mosaic_gpu, triton], ids=["mosaic_gpu", "triton"])
def test_kernels_say_what_they_cannot_attend(module):
    q = lambda dtype, width: jax.ShapeDtypeStruct((1, 128, 2, width), dtype)
    reason = lambda q, scale=None: str(module.unsupported(q, q, q, None, scale=scale))
    assert "bfloat16 and float16, and the queries are float32" in reason(q(jnp.float32, 64))
    assert "head widths up to" in reason(q(jnp.bfloat16, 512))
    assert "supports positive scales, and scale is -1.0" in reason(q(jnp.bfloat16, 64), -1.0)
    assert module.unsupported(*[q(jnp.bfloat16, 80)] * 3, segments=None, scale=None) is None


def test_intervals_are_the_first_and_the_last_position_with_an_id(rng):
    for kind in ("packed", "ids that come back", "padded"):
        ids = random_ids(rng, kind, 3, 70)
        found = intervals.intervals(70, Segments.of(ids), 20)
        first, last, is_foreign = found.first, found.last, found.is_foreign
        for row, id_of in enumerate(np.asarray(ids)):
            places = {i: np.flatnonzero(id_of == i) for i in id_of}
            own = [places[i] for i in id_of]
            assert first[row].tolist() == [max(p[0], t - 19) for t, p in enumerate(own)]
            assert last[row].tolist() == [min(p[-1], t + 19) for t, p in enumerate(own)]
            assert is_foreign[row] == any(np.any(np.diff(p) > 1) for p in own)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("q_offset", [40, -20, 90])
def test_intervals_are_what_queries_anywhere_in_the_keys_row_see(q_offset, window):
    length, q_length = 70, 50
    distance = q_offset + np.arange(q_length)[:, None] - np.arange(length)[None]
    seen = (distance >= 0) & (distance < (1000 if window is None else window))
    found = intervals.intervals(length, None, window, q_length=q_length, q_offset=q_offset)
    for (low, high), sees in (((found.first, found.until), seen), ((found.since, found.last), seen.T)):
        place = np.arange(sees.shape[1])
        np.testing.assert_array_equal((place >= low[0][:, None]) & (place <= high[0][:, None]), sees)


@pytest.mark.parametrize("window", [None, 1, 150])
@pytest.mark.parametrize("kind", ["one segment", "packed", "ids that come back"])
def test_blocks_are_what_somebody_sees_and_what_everybody_sees(kind, window, rng):
    length, rows, columns = 300, 128, 64
    ids = random_ids(rng, kind, 2, length)
    seen = np.broadcast_to(reference.visible(length, ids, window), (2, length, length))
    found = intervals.intervals(length, None if ids is None else Segments.of(ids), window)
    entries = intervals.table(found.first, np.arange(length)[None], found.is_foreign, 2, rows, columns)
    assert len(entries) == 2 * 3
    for batch, block, begin, all_begin, all_count, count, is_foreign in np.asarray(entries):
        for column in range(5):
            part = seen[batch, block * rows : (block + 1) * rows, column * columns : (column + 1) * columns]
            if begin <= column < begin + count:
                assert is_foreign or kind == "ids that come back" or part.any()
            else:
                assert not part.any()
            if all_begin <= column < all_begin + all_count:
                assert part.all() and not is_foreign


def test_segments_made_once_are_as_good_as_ids(rng):
    q, k, v = inputs(rng)
    found, expected = (causal_attention(q, k, v, segments) for segments in (Segments.of(SEGMENTS), SEGMENTS))
    np.testing.assert_array_equal(found, expected)


@each_option
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_attention_of_this_platform_and_its_gradients(rng, dtype, options):
    q, k, v = inputs(rng, dtype)
    with jax.default_matmul_precision("highest"):
        assert max(errors(causal_attention, q, k, v, options)) <= (2e-5 if dtype == jnp.float32 else 3e-2)
    assert causal_attention(q, k, v).dtype == dtype


@pytest.mark.parametrize("length", [257, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 255, 256, 700, 2500))])
@pytest.mark.parametrize("window", [None, 300])
def test_chunks_of_queries_make_no_difference(rng, length, window):
    q, k, v = inputs(rng, length=length, width=8)
    assert max(errors(chunked_attention, q, k, v, dict(window=window))) < 2e-5


def largest_array(compiled):
    """The number of elements of the program's largest array of floats."""
    shapes = re.findall(r"\bb?f[0-9]+\[([0-9,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("options", [{}, dict(window=100), dict(segment_ids=jnp.zeros((1, 2048), jnp.int32))], ids=str)
def test_nothing_as_large_as_all_scores_exists(options):
    length = 2048
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 8), jnp.bfloat16) for heads in (4, 2))
    loss = lambda q, k, v: jnp.sum(chunked_attention(q, k, v, **options).astype(jnp.float32))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
    assert largest_array(compiled) < length * length
    assert not re.search(rf"\[(\d+,)*{length},(\d+,)*{length}[],]", str(compiled.as_text()))


def test_a_window_saves_the_scores_that_nobody_sees():
    heads, window = 4, 64
    q, k = (jax.ShapeDtypeStruct((1, 2048, n, 8), jnp.float32) for n in (heads, 2))
    compiled = jax.jit(functools.partial(chunked_attention, window=window)).lower(q, k, k).compile()
    assert largest_array(compiled) <= heads * 256 * (256 + window)  # of 256 · 2048 to a head without a window


SPLASH = {
    "one block": (256, {}),
    "ragged": (200, dict(window=50, softcap=3.0, scale=0.2)),
    "packed, in pieces": (1000, dict(softcap=2.0)),
    "two kernels": (640, dict(window=30)),
    "one position": (1, {}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=full_unless(name, "ragged", "packed, in pieces"))
        for name, case in SPLASH.items()
    ],
)
def test_splash_has_the_values_and_gradients_at_any_length(case, rng):
    length, options = case
    ids = random_ids(rng, "packed", 1, length)
    q, k, v = normal(rng, (1, length, 2, 8), (1, length, 1, 8), (1, length, 1, 8))
    attend = functools.partial(causal_attention, segment_ids=ids, **options, implementation="splash:interpret")
    check_float32(attend, functools.partial(reference.causal_attention, segment_ids=ids, **options), (q, k, v), rng)


@pytest.mark.parametrize(
    "length, window, is_fused, keys",
    [(2048, None, True, 512), (8192, None, True, 2048), (8192, 1024, False, 512), (32768, None, False, 512)],
)
def test_splash_makes_scores_once_in_the_backward_where_that_multiplies_less(length, window, is_fused, keys):
    whole, block = splash.whole_length(length, window)
    sizes = splash.block_sizes(whole, window, block)
    assert (whole, sizes.use_fused_bwd_kernel, sizes.block_kv_dkv) == (length, is_fused, keys)


@pytest.mark.parametrize("length, most", [(1, 128), (640, 768), (1100, 1152), (8200, 8704)])
def test_splash_pads_little(length, most):
    assert splash.whole_length(length, None)[0] <= most


@pytest.mark.parametrize("name", ["splash:interpret", "triton:interpret", "xla"])
def test_rematerialised_layers_keep_the_output_and_a_number_for_each_query(name):
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    attend = functools.partial(causal_attention, implementation=name)
    kept = jax.eval_shape(lambda *qkv: jax.vjp(jax.checkpoint(attend, policy=POLICIES["none"]), *qkv)[1], q, k, k)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    arrays = 2 * (2 * q.size + 2 * k.size)  # bytes of q, out, k and v
    assert size <= arrays + 4 * 4 * 256 + 2 * q.size * (name == "splash:interpret")  # splash scales a copy of q


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(window=0), ValueError, "window=0 must be at least 1, since a position sees itself"),
        (dict(window=2.5), TypeError, "window=2.5 must be a Python int"),
        (dict(softcap=0.0), ValueError, "softcap=0.0 must be positive"),
        (dict(scale=jnp.ones(())), TypeError, "scale is a .*must be a Python number"),
        (dict(k=jnp.zeros((2, 8, 3, 16))), ValueError, "with Q a multiple of K"),
        (dict(v=jnp.zeros((2, 9, 2, 16))), ValueError, r"v has shape \(2, 9, 2, 16\), but must have shape"),
        (dict(v=jnp.zeros((2, 8, 2, 16), jnp.bfloat16)), ValueError, "v has dtype bfloat16 and q float32"),
        (dict(q=jnp.zeros((2, 8, 4, 16), jnp.int32)), TypeError, "q has dtype int32, but must be floating point"),
        (dict(segment_ids=jnp.zeros((2, 7), jnp.int32)), ValueError, "one id for each position of k"),
        (dict(segment_ids=jnp.zeros((2, 8))), TypeError, "segment_ids have dtype float32, but must be integers"),
        (
            dict(implementation="cudnn", segment_ids=jnp.zeros((2, 8), jnp.int32)),
            ValueError,
            "cudnn.: (it is compiled|cuDNN attention does not support)",
        ),
        (dict(implementation="mosaic_tpu"), ValueError, "implementation='mosaic_tpu' is unknown; this op has"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_what_cannot_be_attended_is_refused(changes, error, message):
    q, k = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 8, 2, 16))
    with pytest.raises(error, match=message):
        causal_attention(**{**dict(q=q, k=k, v=k), **changes})


def test_cudnn_says_that_it_knows_no_segments_and_no_softcap():
    q, segments = jnp.zeros((1, 128, 2, 64), jnp.bfloat16), jnp.zeros((1, 128), jnp.int32)
    for ids, softcap in ((segments, None), (None, 30.0)):
        reason = cudnn.unsupported(q, q, q, ids, window=None, softcap=softcap, capability=(9, 0))
        assert "does not support segments and softcaps" in str(reason)


@pytest.fixture
def as_with_cudnn(monkeypatch):
    """JAX's own checks as on a GPU of the capability that is set, with cuDNN 9.10."""

    def pretend(capability):
        monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
        at_least = lambda text: capability >= tuple(map(int, text.split(".")))
        monkeypatch.setattr(jax_cudnn, "check_compute_capability", at_least)

    return pretend


def gradient_types(attention, q_shape, kv_heads, dtype, device_kind):
    """The jaxpr of an attention's value and gradients on a device that need not be there."""
    q, k = (jax.ShapeDtypeStruct((*q_shape[:2], n, q_shape[3]), dtype) for n in (q_shape[2], kv_heads))
    device = AbstractDevice(device_kind, None, "gpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)

    def gradients(*inputs):
        out, pullback = jax.vjp(attention, *inputs)
        return pullback(out)

    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(gradients)(q, k, k))


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("options", [{}, dict(window=5), dict(scale=0.3)], ids=str)
def test_cudnn_is_asked_about_training_and_trains_at_every_length(length, options, as_with_cudnn):
    as_with_cudnn((9, 0))
    for heads, width, dtype in ((4, 64, jnp.bfloat16), (1, 256, jnp.float16)):
        attention = functools.partial(causal_attention, implementation="cudnn", **options)
        jaxpr = gradient_types(attention, (2, length, 4, width), heads, dtype, "NVIDIA H100 80GB HBM3")
        assert "dot_product_attention_bwd" in jaxpr


@pytest.mark.parametrize(
    "kind, shape, dtype, refuses, expected",
    [
        ("NVIDIA H200", (2, 7, 4, 100), jnp.bfloat16, False, "Ref<smem>"),
        ("NVIDIA L4", (2, 7, 4, 136), jnp.float16, False, "causal_attention_forward"),
        ("NVIDIA H200", (2, 7, 4, 264), jnp.bfloat16, False, "dot_general"),
        ("NVIDIA H200", (2, 7, 4, 64), jnp.float32, False, "dot_general"),
        ("NVIDIA H200", (70_000, 3, 2, 64), jnp.bfloat16, False, "Ref<smem>"),
        ("NVIDIA H200", (8192, 64, 32, 128), jnp.bfloat16, False, "Ref<smem>"),
        ("NVIDIA H200", (2, 7, 4, 64), jnp.bfloat16, True, "Ref<smem>"),
        ("NVIDIA L4", (2, 7, 4, 64), jnp.bfloat16, True, "causal_attention_forward"),
    ],
)
def test_what_cudnn_cannot_train_goes_to_ours(kind, shape, dtype, refuses, expected, as_with_cudnn, monkeypatch):
    as_with_cudnn((9, 0) if kind == "NVIDIA H200" else (8, 9))

    def refuse_training(*arguments, **options):
        if arguments[6]:  # is_training
            raise NotImplementedError("Not this.")

    if refuses:
        monkeypatch.setattr(jax_cudnn, "check_is_flash_attention", refuse_training)
    jaxpr = gradient_types(causal_attention, shape, 2, dtype, kind)
    assert expected in jaxpr and "dot_product_attention" not in jaxpr


@pytest.mark.parametrize(
    "shape, kv_heads, is_ours",
    [((8, 2048, 32, 64), 8, True), ((16, 1024, 14, 64), 2, False), ((8, 2048, 32, 128), 8, False)],
)
def test_long_rows_of_width_64_take_hoppers_kernels(shape, kv_heads, is_ours, as_with_cudnn):
    as_with_cudnn((9, 0))
    jaxpr = gradient_types(causal_attention, shape, kv_heads, jnp.bfloat16, "NVIDIA H200")
    is_ours = is_ours and jax.__version_info__ >= (0, 11)
    assert ("causal_attention_gradients" in jaxpr) == is_ours
    assert ("dot_product_attention_bwd" in jaxpr) != is_ours


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_goes_to_xla(scale, as_with_cudnn):
    """cuDNN gives NaN, seen on an H100, and our kernels find a row's largest score before they scale it."""
    as_with_cudnn((9, 0))
    attention = functools.partial(causal_attention, scale=scale)
    jaxpr = gradient_types(attention, (2, 64, 4, 64), 2, jnp.bfloat16, "NVIDIA H200")
    assert "dot_general" in jaxpr and "dot_product_attention" not in jaxpr and "Ref<smem>" not in jaxpr
    with pytest.raises(ValueError, match="positive scales"):
        gradient_types(
            functools.partial(attention, implementation="cudnn"), (2, 64, 4, 64), 2, jnp.bfloat16, "NVIDIA H200"
        )


@pytest.mark.parametrize("length, options", [(1, {}), (33, dict(window=5))])
def test_the_position_that_pads_an_odd_row_for_cudnn_changes_nothing(length, options, rng, monkeypatch):
    """XLA's attention takes cuDNN's place, and refuses odd lengths as cuDNN does."""
    plain = jax.nn.dot_product_attention

    def even_only(q, *arrays, implementation, **kept):
        assert q.shape[1] % 2 == 0
        return plain(q, *arrays, implementation="xla", **kept)

    def attend(q, k, v, window=None):
        return cudnn.attend(q, k, v, None, window=window, softcap=None, scale=None)

    def attend_each(*qkv, window=None):
        return jax.vmap(lambda *row: attend(*(x[None] for x in row), window=window)[0])(*qkv)

    def attend_sharded(*qkv, window=None):
        mesh = jax.make_mesh((min(2, len(jax.devices())),), ("data",), axis_types=(AxisType.Auto,))
        shard = functools.partial(attend, window=window)
        return jax.shard_map(shard, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))(*qkv)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even_only)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for attention in (attend, attend_each, attend_sharded):
            assert max(errors(attention, *inputs(rng, length=length), options)) <= TOLERANCE


@pytest.mark.parametrize("window", [8, 2**31 - 1, 2**31, 2**63])
def test_a_window_of_the_row_or_more_is_none(window, rng):
    q, k, v = inputs(rng, length=8)
    np.testing.assert_array_equal(chunked_attention(q, k, v, window=window), chunked_attention(q, k, v))


def test_no_rows_have_no_attention():
    assert causal_attention(jnp.zeros((0, 8, 4, 16)), *[jnp.zeros((0, 8, 2, 16))] * 2).shape == (0, 8, 4, 16)


@pytest.mark.parametrize(
    ["platform", "kind", "dtype", "length", "expected"],
    [
        ("tpu", "TPU v5 lite", jnp.bfloat16, 256, "splash"),
        ("tpu", "TPU v5 lite", jnp.bfloat16, 200, "splash"),
        ("tpu", "TPU v5 lite", jnp.float16, 256, "dot_general"),
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


@pytest.mark.parametrize(
    "kind, dtype, ids, options, is_ours",
    [
        ("NVIDIA H200", jnp.bfloat16, [SEGMENTS], {}, True),
        ("NVIDIA H100 80GB HBM3", jnp.float16, [], dict(softcap=30.0, window=50), True),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, [], dict(window=50), True),
        ("NVIDIA H200", jnp.float32, [SEGMENTS], {}, False),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, [SEGMENTS], {}, True),
        ("NVIDIA L4", jnp.bfloat16, [], dict(softcap=30.0), True),
        ("NVIDIA B200", jnp.bfloat16, [SEGMENTS], {}, True),
        ("NVIDIA A100-SXM4-80GB", jnp.float32, [SEGMENTS], {}, False),
        ("Tesla T4", jnp.float16, [SEGMENTS], {}, False),
    ],
)
def test_packed_capped_and_windowed_rows_are_ours_from_ampere_on(rng, kind, dtype, ids, options, is_ours):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*inputs(rng, dtype), *ids)]
    device = AbstractDevice(kind, None, "gpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = str(jax.make_jaxpr(functools.partial(causal_attention, **options))(*types))
    assert ("causal_attention_forward" in jaxpr) == is_ours
    assert ("Ref<smem>" in jaxpr) == (is_ours and Place(device).is_hopper)  # Mosaic's own memory


WIDE, NARROW = (4, jnp.bfloat16), (1, jnp.float16)  # key heads and dtype
TRAINED = [(1, *WIDE), (33, *WIDE), (33, *NARROW), (64, *NARROW)]
ALSO_TRAINED = [(n, *heads) for n in (1, 7, 33, 64, 65) for heads in (WIDE, NARROW) if (n, *heads) not in TRAINED]


@pytest.mark.parametrize(
    "length, kv_heads, dtype", [*TRAINED, *(pytest.param(*case, marks=pytest.mark.full) for case in ALSO_TRAINED)]
)
@pytest.mark.parametrize("options", [{}, dict(window=5), dict(implementation="cudnn", window=5)], ids=str)
def test_a_gpus_default_trains_at_every_length(length, options, kv_heads, dtype, rng, platform):
    if platform != "gpu":
        pytest.skip("cuDNN is there on a GPU only")
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, n, 64)), dtype) for n in (4, kv_heads, kv_heads))
    masked = {name: value for name, value in options.items() if name != "implementation"}
    named = {name: value for name, value in options.items() if name == "implementation"}
    found, plain = errors(causal_attention, q, k, v, masked, **named), errors(chunked_attention, q, k, v, masked)
    assert max(found) <= 3 * max(plain)  # of few numbers the largest error is chance: 2.03 was seen


def test_a_gpu_takes_cudnn_in_bfloat16(rng, platform):
    if platform != "gpu":
        pytest.skip("cuDNN is there on a GPU only")
    jaxpr = str(jax.make_jaxpr(causal_attention)(*inputs(rng, jnp.bfloat16)))
    assert "dot_product_attention" in jaxpr


@pytest.mark.parametrize("capability, widest", [((8, 9), 128), ((9, 0), 256), ((10, 0), 256), ((12, 0), 256)], ids=str)
def test_cudnn_takes_wider_heads_from_hopper_on(capability, widest):
    q = lambda width: jax.ShapeDtypeStruct((1, 128, 2, width), jnp.bfloat16)
    assert f"head widths up to {widest} in multiples of 8" in str(
        cudnn.why_not(q(widest + 8), q(widest + 8), capability=capability)
    )
    assert "head widths" not in str(cudnn.why_not(q(widest), q(widest), capability=capability))


@pytest.mark.parametrize("window, kernel", [(None, "dot_product_attention"), (100, "causal_attention_forward")])
def test_heads_of_256_on_hopper_have_the_plain_values_and_gradients(window, kernel, rng, platform):
    """Gemma's; in bfloat16 as exact as XLA's chunks of queries. cuDNN's, and in a window ours."""
    if platform != "gpu" or not Place(described(jax.devices()[0])).is_hopper:
        pytest.skip("cuDNN takes such heads from Hopper on")
    q, k, v = inputs(rng, jnp.bfloat16, length=300, width=256)
    assert kernel in str(jax.make_jaxpr(functools.partial(causal_attention, window=window))(q, k, v))
    found, plain = (errors(op, q, k, v, dict(window=window)) for op in (causal_attention, chunked_attention))
    assert max(found) <= 2 * max(plain)


# --- parts of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(window=40, softcap=3.0), {}], ids=["window", "plain"])
@pytest.mark.parametrize("kernel", ["xla", pytest.param("triton:interpret", marks=pytest.mark.full)])
def test_a_part_of_the_queries_has_the_values_of_the_whole_row(kernel, options, rng, platform):
    kernel = kernel.removesuffix(":interpret") if platform == "gpu" else kernel
    dtype = jnp.float32 if kernel == "xla" else jnp.bfloat16
    length, start, q_length = 300, 17, 270  # one chunk of queries, and a shorter one
    q, do = (jnp.asarray(rng.standard_normal((2, q_length, 2, 64)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, length, 1, 64)), dtype) for _ in range(2))
    ids = random_ids(rng, "packed", 2, length)

    @jax.jit
    def found(q, k, v, start):
        attend = lambda q, k, v: causal_attention(q, k, v, ids, q_offset=start, **options, implementation=kernel)
        return value_and_gradients(attend, (q, k, v), do)

    def attend(q, k, v):
        whole = jnp.zeros((2, length, *q.shape[2:]), q.dtype).at[:, start : start + q_length].set(q)
        return reference.causal_attention(whole, k, v, ids, **options)[:, start : start + q_length]

    with jax.default_matmul_precision("highest"):
        expected = truth(attend, (q, k, v), do)
        for x, t in zip(found(q, k, v, jnp.int32(start)), expected, strict=True):
            assert largest_error(x, t) <= (TOLERANCE if dtype == jnp.float32 else 3e-2)


@pytest.mark.usefixtures("unchecked_types")
def test_a_part_that_leaves_its_row_is_refused_or_nan():
    q, k = jnp.ones((1, 4, 1, 8)), jnp.ones((1, 6, 1, 8))
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"q_offset={wrong} must be from 0 to 2"):
            causal_attention(q, k, k, q_offset=wrong)
        assert jnp.all(jnp.isnan(jax.jit(lambda at: causal_attention(q, k, k, q_offset=at))(wrong)))
    with pytest.raises(ValueError, match="fewer queries need q_offset"):
        causal_attention(q, k, k)
    with pytest.raises(TypeError, match="must be one integer"):
        causal_attention(q, k, k, q_offset=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="splash attention needs one query for each key"):
        causal_attention(q, k, k, q_offset=0, implementation="splash:interpret")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "options, least_chunk",
    [pytest.param({}, 2048, marks=pytest.mark.full), (dict(window=9, softcap=3.0), 1)],
    ids=["plain", "window-many-chunks"],
)
def test_rows_that_devices_share_have_the_values_and_gradients_of_one_device(
    options, least_chunk, check_vma, devices, rng, monkeypatch
):
    monkeypatch.setattr(layout, "LEAST_CHUNK", least_chunk)
    mesh, c = jax.sharding.Mesh(devices, ("sequence",)), len(devices)
    length = 6 * c if least_chunk > 1 else 8 * c
    assert layout.pairs_of_chunks(length, c) == (1 if least_chunk > 1 else 2)
    q, do, k, v = normal(rng, *((2, length, heads, 8) for heads in (4, 4, 2, 2)))
    ids = random_ids(rng, "packed", 2, length)
    whole = functools.partial(causal_attention, segment_ids=ids, **options, implementation="xla")

    def shared(q, k, v):
        part = functools.partial(
            causal_attention, segment_ids=ids, **options, sequence_axis="sequence", implementation="xla"
        )
        split = PartitionSpec(None, "sequence")
        run = jax.shard_map(part, mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_vma=check_vma)
        return layout.from_chunks(run(*(layout.in_chunks(x, 1, c) for x in (q, k, v))), 1, c)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(functools.partial(value_and_gradients, shared))((q, k, v), do)
        for x, t in zip(found, truth(whole, (q, k, v), do), strict=True):
            assert largest_error(x, t) <= TOLERANCE


def test_long_rows_are_in_chunks_that_devices_get_to_and_fro():
    order = lambda length, parts: layout.in_chunks(jnp.arange(length), 0, parts)
    short, long = order(4 * 2048 - 4, 2), order(8 * 2048, 2)
    assert (short[::2047] // 2047).tolist() == [0, 3, 1, 2]
    assert (long[::2048] // 2048).tolist() == [0, 3, 4, 7, 1, 2, 5, 6]
    for length, parts in ((4 * 2048 - 4, 2), (8 * 2048, 2), (96 * 2048, 3)):
        row = layout.from_chunks(order(length, parts), 0, parts)
        np.testing.assert_array_equal(row, np.arange(length))
    assert [layout.pairs_of_chunks(length, 4) for length in (2**14, 2**15, 2**15 + 8, 2**20)] == [1, 2, 1, 2]


def test_rows_that_cannot_be_shared_evenly_are_refused(devices):
    mesh = jax.sharding.Mesh(devices, ("sequence",))
    with pytest.raises(ValueError, match="which do not divide them. Pad the rows to a multiple of"):
        layout.in_chunks(jnp.zeros((1, 2 * len(devices) + 1)), 1, len(devices))
    x, split = jnp.zeros((1, 3 * len(devices), 1, 8)), PartitionSpec(None, "sequence")
    attend = functools.partial(causal_attention, sequence_axis="sequence")
    with pytest.raises(ValueError, match="must have the same even number, equal chunks of a row"):
        jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)(x, x, x)
