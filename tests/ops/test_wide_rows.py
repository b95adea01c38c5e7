"""Norms of wide rows on Hopper, whose rows arrive by the copy engine, against float64 and the plain expression.

On a Hopper GPU the kernels are compiled; on a CPU JAX simulates them, memory begins as NaN and races are errors.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.pallas_kernels import hopper as hopper_blocks
from liger_jax.pallas_kernels.norms import layer_norm, rms_norm, run_mosaic_gpu, tiles_mosaic_gpu
from liger_jax.pallas_kernels.norms.backends import backends
from tests.ops import _oracle, test_layer_norm, test_rms_norm
from tests.ops._oracle import normal

NORMS = {
    "rms_norm": test_rms_norm.TestRMSNorm(),
    "layer_norm": test_layer_norm.TestLayerNorm(),
    "fused_add_rms_norm": test_rms_norm.TestFusedAddRMSNorm(),
}
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture
def hopper(hopper, monkeypatch):
    """Simulated, a GPU has two cores, and each soon uses its memory again."""
    if hopper != "mosaic_gpu":
        monkeypatch.setattr(run_mosaic_gpu, "NUM_CORES", 2)
        monkeypatch.setattr(tiles_mosaic_gpu, "MOST_STAGES", 2)
    return hopper


@pytest.fixture
def n(hopper):
    """How many rows, so that with four teams on a core the first one walks over three, and the others over two."""
    return 2 * (2 if hopper != "mosaic_gpu" else 132) * 4 + 1


def of_norms(*names):
    """A test of each norm, where only the named ones' are run by default."""
    full = lambda name: () if name in names else pytest.mark.full
    return pytest.mark.parametrize("norm", [pytest.param(x, id=name, marks=full(name)) for name, x in NORMS.items()])


@of_norms(*NORMS)
@pytest.mark.parametrize("width", _oracle.first(1, [3072, 256, 1024, 2304, 5120, 8192]))
def test_every_width_matches_float64(hopper, norm, width, n, rng):
    op, reference = norm.make(hopper)
    _oracle.check_float32(op, reference, norm.arrays(rng, (n, width)), rng)


@of_norms(*NORMS)
@pytest.mark.parametrize("width", [768, 2048, 2304, 3584, 4096, 5120, 8192, 16384, 18432, 24576])
@pytest.mark.parametrize(
    "dtype, of_scales",
    [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32)],
    ids=["bf16", "f16", "f32", "bf16, f32 scales"],
)
def test_wide_rows_match_float64_on_hardware(hardware, hopper, norm, width, dtype, of_scales, rng):
    op, reference = norm.make(hopper)
    arrays = norm.arrays(rng, (1000, width), dtype, of_scales)
    if run_mosaic_gpu.unsupported(*arrays) is not None:
        pytest.skip("too wide")
    if dtype == F32:
        _oracle.check_float32(op, reference, arrays, rng)
    else:
        _oracle.check_half(op, norm.plain, reference, arrays, rng)


@pytest.mark.full
@pytest.mark.parametrize("few", [1, 2, 3])
def test_few_rows_match_float64(hopper, few, rng):
    op, reference = NORMS["rms_norm"].make(hopper)
    _oracle.check_float32(op, reference, NORMS["rms_norm"].arrays(rng, (few, 1024)), rng)


@of_norms("layer_norm")
@pytest.mark.parametrize("dtype", _oracle.first(1, [BF16, F16]))
def test_half_precision_is_no_worse_than_the_plain_expression(hopper, norm, dtype, n, rng):
    op, reference = norm.make(hopper)
    _oracle.check_half(op, norm.plain, reference, norm.arrays(rng, (n, 3072), dtype), rng)


@pytest.mark.full
@pytest.mark.parametrize("casting_mode", ["gemma", "none"])
def test_every_casting_mode_is_no_worse_than_its_plain_expression(hopper, casting_mode, n, rng):
    norm = NORMS["rms_norm"]
    op, reference = norm.make(hopper, casting_mode=casting_mode)
    arrays = norm.arrays(rng, (n, 2048), BF16, F32 if casting_mode == "gemma" else BF16)
    _oracle.check_half(op, functools.partial(norm.plain, casting_mode=casting_mode), reference, arrays, rng)


@pytest.mark.full
def test_the_residual_stream_keeps_its_own_dtype(hopper, rng):
    norm = NORMS["fused_add_rms_norm"]
    (x,), (residual, scale) = normal(rng, (6, 2048), dtype=BF16), normal(rng, (6, 2048), (2048,))
    op, reference = norm.make(hopper, casting_mode="gemma")
    _oracle.check_half(op, functools.partial(norm.plain, casting_mode="gemma"), reference, [x, residual, scale], rng)


def test_without_a_residual_x_is_the_stream(hopper, n, rng):
    norm = NORMS["fused_add_rms_norm"]
    x, _, scale = norm.arrays(rng, (n, 1024))
    op, reference = norm.make(hopper)
    _oracle.check_float32(
        lambda x, scale: op(x, None, scale), lambda x, scale: reference(x, 0 * x, scale), [x, scale], rng
    )


@pytest.mark.full
@of_norms(*NORMS)
def test_parameters_may_be_left_out(hopper, norm, n, rng):
    op, reference = norm.make(hopper)
    _oracle.check_float32(op, reference, norm.arrays(rng, (n, 1024))[: norm.num_rows], rng)


@pytest.mark.full
def test_a_bias_needs_no_scale(hopper, n, rng):
    norm = NORMS["layer_norm"]
    x, _, bias = norm.arrays(rng, (n, 1024))
    op, reference = (lambda x, bias, f=f: f(x, None, bias) for f in norm.make(hopper))
    _oracle.check_float32(op, reference, [x, bias], rng)


@pytest.mark.parametrize("size", [1e-25, pytest.param(1.0, marks=pytest.mark.full)])
def test_eps_may_be_zero(hopper, size, rng):
    """Even where the rows' squares vanish in float32."""
    op, reference = NORMS["rms_norm"].make(hopper, eps=0.0, offset=1.0)
    x, scale = NORMS["rms_norm"].arrays(rng, (5, 1024))
    _oracle.check_float32(op, reference, [x * size, scale], rng)


@of_norms("rms_norm")
@pytest.mark.parametrize("dtype", _oracle.first(1, [BF16, F32, F16]))
def test_the_largest_numbers_are_normalised_among_others(hopper, norm, dtype, rng):
    """A row whose squares overflow is summed in another way, a row of NaN is not, and neither changes the others."""
    op, reference = norm.make(hopper)
    arrays = norm.arrays(rng, (5, 1024), dtype)
    largest = norm.limit * float(jnp.finfo(dtype).max)
    for i in range(norm.num_rows):
        x = arrays[i].astype(F32)
        arrays[i] = x.at[2:].mul(largest / jnp.abs(x).max()).astype(dtype)
    cotangents = _oracle.random_cotangents(op, arrays, rng)
    results = _oracle.value_and_gradients(op, arrays, cotangents)
    expected = _oracle.truth(reference, arrays, cotangents)
    assert _oracle.largest_error(results[0], expected[0]) <= max(_oracle.TOLERANCE, 2 * jnp.finfo(dtype).eps)
    assert all(jnp.isfinite(x).all() for x in results)
    y = jax.tree.leaves(op(*arrays))[0]
    with_nan = jax.tree.leaves(op(arrays[0].at[4].set(jnp.nan), *arrays[1:]))[0]
    others = jnp.arange(5) != 4
    assert jnp.isnan(with_nan[4]).all() and jnp.array_equal(with_nan[others], y[others])


@pytest.mark.parametrize("norm", _oracle.first(1, [rms_norm, layer_norm]))
def test_a_backward_makes_the_sums_that_it_is_not_given(hopper, norm, n, rng):
    d = 1024
    dy, x, scale = normal(rng, (n, d), (n, d), (d,))
    x = x.at[1].mul(1e30)
    more, options = ((scale,), {}) if norm is layer_norm else ((), {"offset": 0.0})
    casting_mode = {} if norm is layer_norm else {"casting_mode": "llama"}
    kernel = backends(norm, "mosaic_gpu")["mosaic_gpu"]
    with hopper_blocks.interpreter(hopper != "mosaic_gpu"):
        _, sums = kernel.forward(x, scale, *more, eps=1e-6, **options, **casting_mode)
        assert [s.shape for s in sums] == [(n, 1)] * (3 if norm is layer_norm else 2)
        known = kernel.backward(dy, x, scale, *more, sums, eps=1e-6, **options)
        made = kernel.backward(dy, x, scale, *more, (), eps=1e-6, **options)
    jax.tree.map(np.testing.assert_array_equal, known, made)
    assert jnp.isinf(sums[-2][1]) and sums[-1][1] > 0 and jnp.isfinite(sums[-2][0]) and sums[-1][0] == 0


@pytest.mark.full
def test_vmap_equals_a_loop(hopper, rng):
    norm = NORMS["rms_norm"]
    arrays = norm.arrays(rng, (3, 1024))
    _oracle.check_vmap(norm.make(hopper)[0], arrays, rng, shared=(1,))


@pytest.mark.full
@of_norms(*NORMS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_inside_shard_map(hopper, norm, check_vma, rng):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    arrays = norm.arrays(rng, (4, 1024))
    specs = tuple(jax.P("data") if x.ndim > 1 else jax.P() for x in arrays)
    op, reference = norm.make(hopper)
    mapped = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=jax.P("data"), check_vma=check_vma)
    _oracle.check_float32(mapped, reference, arrays, rng)


@of_norms(*NORMS)
@pytest.mark.parametrize("width", [2304, 4096, 5120, 18432])
def test_runs_are_repeatable_to_the_bit(hardware, hopper, norm, width, rng):
    op, _ = norm.make(hopper)
    arrays = norm.arrays(rng, (8193, width), BF16)
    cotangents = _oracle.random_cotangents(op, arrays, rng)
    run = jax.jit(lambda arrays: _oracle.value_and_gradients(op, arrays, cotangents))
    first = run(arrays)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, run(arrays), first)


@pytest.mark.parametrize(
    "width, dtype, reason",
    [
        (1000, BF16, "the kernel divides rows into tiles of 256 columns, and 1000 is not a multiple; use 'triton' or"),
        (35840, BF16, "rows of 35840 columns have no even shares for warpgroups whose registers hold their sums over"),
        (65536, BF16, "two rows of 65536 columns exceed shared memory; use 'triton' or 'xla'."),
        (18432, F32, "two rows of 18432 columns exceed shared memory; use 'triton' or 'xla'."),
        (1024, jnp.float64, "the kernel supports floats of 16 and 32 bits, and an array is float64; use 'xla'."),
    ],
)
def test_other_rows_are_refused(width, dtype, reason):
    with jax.enable_x64(True):
        x, scale = jnp.zeros((2, width), dtype), None if width == 65536 else jnp.zeros(width, dtype)
        assert (run_mosaic_gpu.unsupported(x, scale) or "").startswith(reason)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_shares_are_even_and_fit(itemsize):
    directions = (1, 0, 0), (1, 2, 0), (2, 1, 0), (2, 1, 1), (2, 1, 2), (3, 1, 1)  # rows, columns, sums over rows
    for width, (num_rows, num_columns, num_sums) in itertools.product(range(256, 32768, 256), directions):
        tiles = tiles_mosaic_gpu.mosaic_gpu_tiles(width, [itemsize] * num_rows, itemsize * num_columns, num_sums)
        if isinstance(tiles, str):
            continue
        assert tiles.team_size * tiles.height * tiles.warp_size == width
        assert tiles.height <= 256 and tiles.warp_size <= 256  # what one copy takes
        assert min(tiles.stages[:-1], default=2) >= 2 and (num_rows > 1 or tiles.stages[0] >= 2)
        assert max(tiles.stages) * tiles.num_warpgroups <= 32  # barriers of one array
        assert width * itemsize * (tiles.num_teams * sum(tiles.stages) + num_columns) <= tiles_mosaic_gpu.SHARED_BYTES
