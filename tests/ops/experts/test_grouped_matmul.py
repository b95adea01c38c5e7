"""What grouped_matmul promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import grouped_matmul
from liger_jax.pallas_kernels.grouped_matmul import formulas, mosaic_gpu, mosaic_gpu_block, mosaic_tpu
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import grouped_matmul as reference

KERNELS = ("xla", "mosaic_tpu")
FULL_KERNELS = ("mosaic_tpu:interpret",)
SIZES = {
    "unequal": (5, 0, 17, 1, 9),
    "some rows behind": (0, 3, 20, 0, 2),
    "one has all": (0, 0, 32, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "even": (8, 8, 8, 8, 0),
}
M = 32


def draw(rng, m=M, num_groups=5, k=11, n=13, dtype=jnp.float32, transpose_w=False):
    return normal(rng, (m, k), (num_groups, *((n, k) if transpose_w else (k, n))), dtype=dtype)


def make(sizes, implementation, transpose_w=False):
    sizes = jnp.asarray(sizes, jnp.int32)
    return lambda x, w: grouped_matmul(x, w, sizes, transpose_w=transpose_w, implementation=implementation)


def truth(sizes, transpose_w=False):
    return functools.partial(reference.grouped_matmul, group_sizes=jnp.asarray(sizes), transpose_w=transpose_w)


@pytest.mark.parametrize("sizes, transpose_w", _oracle.half(SIZES, {"w": False, "transposed w": True}))
def test_groups_of_any_size_match_float64(sizes, transpose_w, implementation, rng):
    arrays = draw(rng, transpose_w=transpose_w)
    _oracle.check_float32(make(sizes, implementation, transpose_w), truth(sizes, transpose_w), arrays, rng)


@pytest.mark.parametrize("shape", _oracle.first(2, [(1, 1), (333, 7), (5, 64)]), ids=str)
def test_any_number_of_groups_and_rows_matches_float64(shape, implementation, rng):
    m, num_groups = shape
    sizes = np.bincount(rng.integers(0, num_groups, m), minlength=num_groups)
    op = make(sizes, implementation)
    _oracle.check_float32(op, truth(sizes), draw(rng, m, num_groups), rng)


@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_a_product_for_each_group(dtype, implementation, rng):
    sizes = (40, 0, 33, 7, 0)
    if dtype == "float16" and implementation.startswith("mosaic_tpu"):
        pytest.skip("Mosaic has no float16, and says so: test_tpus_take_what_fits_into_their_memory")

    def plain(x, w):
        ends = np.cumsum(sizes)
        products = [x[end - size : end] @ w[i] for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
        return jnp.concatenate([*products, jnp.zeros((96 - ends[-1], w.shape[2]), x.dtype)])

    arrays = draw(rng, 96, k=64, n=64, dtype=dtype)
    _oracle.check_half(make(sizes, implementation), plain, truth(sizes), arrays, rng)


@pytest.mark.parametrize(
    "case, transpose_w",
    [
        ("ragged", False),
        *(pytest.param(*c, marks=pytest.mark.full) for c in [("ragged", True), ("many", True), ("one has all", False)]),
        pytest.param("narrow", False, marks=pytest.mark.full),
    ],
)
def test_hopper_is_no_worse_than_a_product_for_each_group(case, transpose_w, hopper, rng, monkeypatch):
    """Simulated, two cores walk over several tiles each; rows after the groups hold NaN."""
    if hopper != "mosaic_gpu":
        monkeypatch.setattr(mosaic_gpu_block, "NUM_CORES", 2)
    many = (1, 9, 64, 0, 128, 65)
    sizes = {"ragged": (5, 0, 150, 33), "one has all": (0, 77, 0), "many": many, "narrow": (64, 37, 5)}[case]
    m = sum(sizes) + (12 if case == "ragged" else 0)
    x, w = draw(rng, m, len(sizes), *((64, 64) if case == "narrow" else (192, 320)), "bfloat16", transpose_w)
    ends = np.cumsum(sizes)

    def plain(x, w):
        kernels = jnp.swapaxes(w, 1, 2) if transpose_w else w
        products = [x[end - size : end] @ kernels[i] for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
        return jnp.concatenate([*products, jnp.zeros((m - ends[-1], products[0].shape[1]), x.dtype)])

    def op(x, w):
        x = jnp.where(jnp.arange(m)[:, None] < ends[-1], x, jnp.nan)
        return make(sizes, hopper, transpose_w)(x, w)

    _oracle.check_half(op, plain, truth(sizes, transpose_w), [x, w], rng)


def test_wrong_sizes_are_nan_on_hopper(hopper, rng):
    x, w = draw(rng, 24, 2, 64, 64, "bfloat16")

    @jax.jit
    def run(sizes):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=hopper), x, w)
        return y, *pullback(jnp.ones_like(y))

    assert all(jnp.isnan(found).all() for found in run(jnp.array([20, 5])))


@pytest.mark.parametrize(
    "dtype, k, n, why",
    [
        ("float32", 64, 64, "x is float32"),
        ("bfloat16", 72, 64, r"w is \(2, 72, 64\)"),
        ("bfloat16", 64, 72, r"w is \(2, 64, 72\)"),
        ("float16", 64, 192, None),
    ],
)
def test_hopper_says_what_it_does_not_take(dtype, k, n, why):
    found = mosaic_gpu.unsupported(jnp.zeros((5, k), dtype), jnp.zeros((2, k, n), dtype))
    assert found is None if why is None else re.search(why, str(found))


@pytest.mark.parametrize(
    "dtype, shape, why",
    [
        ("float16", (8, 64, 64), "x is float16"),
        ("float32", (2, 64_000, 64), r"tiles of w \(2, 64000, 64\) do not fit into 16 MiB"),
        ("bfloat16", (8, 2048, 1536), None),
    ],
)
def test_tpus_take_what_fits_into_their_memory(dtype, shape, why):
    found = mosaic_tpu.unsupported(*(jax.ShapeDtypeStruct(s, dtype) for s in ((4096, shape[1]), shape)))
    assert found is None if why is None else re.search(why, str(found))


def test_tpus_visit_tiles_of_several_groups(platform, rng):
    """Rows after the groups and an empty group, in tiles that groups share; their NaN reaches nothing."""
    sizes, name = (100, 0, 33), "mosaic_tpu" if platform == "tpu" else "mosaic_tpu:interpret"
    x, w = draw(rng, 140, 3, 16, 24)
    x = jnp.where(jnp.arange(140)[:, None] < sum(sizes), x, jnp.nan)
    op = make(sizes, name)
    y, pullback = jax.vjp(lambda w: op(x, w), w)
    cotangent = normal(rng, y.shape)[0]
    expected = _oracle.truth(truth(sizes), [jnp.nan_to_num(x), w], cotangent)
    for found, right in zip((y, *pullback(cotangent)), (expected[0], expected[2]), strict=True):
        assert _oracle.largest_error(found, right) <= _oracle.TOLERANCE


def test_large_groups_come_first():
    sizes = np.array([3, 7, 0, 7, 5])
    group, begin, end, with_rows = formulas.largest_first(jnp.asarray(sizes, jnp.int32))
    assert group.tolist() == [1, 3, 4, 0, 2] and int(with_rows) == 4
    assert (end - begin).tolist() == sizes[np.asarray(group)].tolist()
    assert end.tolist() == np.cumsum(sizes)[np.asarray(group)].tolist()


@pytest.mark.parametrize("sizes", [[23] * 9, [0] * 8 + [100], [15] * 6 + [1, 0, 9]], ids=str)
def test_there_is_room_for_the_most_tiles(sizes):
    tiles = formulas.tiles(jnp.asarray(sizes, jnp.int32), sum(sizes), 16, multiple=8)
    assert int(tiles.so_far[-1]) <= tiles.group.shape[0]


def test_nan_behind_the_groups_reaches_nothing(implementation, rng):
    sizes = SIZES["some rows behind"]
    x, w = draw(rng)
    cotangent = normal(rng, (M, w.shape[2]))[0]
    behind = jnp.arange(M)[:, None] >= sum(sizes)
    x, cotangent = (jnp.where(behind, jnp.nan, array) for array in (x, cotangent))
    results = _oracle.value_and_gradients(make(sizes, implementation), [x, w], cotangent)
    cleared = [jnp.where(behind, 0, array) for array in (x, cotangent)]
    expected = _oracle.truth(truth(sizes), [cleared[0], w], cleared[1])
    for found, right in zip(results, expected, strict=True):
        assert _oracle.largest_error(found, right) <= _oracle.TOLERANCE
    assert not results[0][sum(sizes) :].any() and not results[1][sum(sizes) :].any()


def test_nan_in_a_row_stays_in_its_row_and_its_groups_gradient(implementation, rng):
    sizes = SIZES["unequal"]
    x, w = draw(rng)
    x = x.at[6].set(jnp.nan)  # of the third group, in a tile with the first
    y, _, dw = _oracle.value_and_gradients(make(sizes, implementation), [x, w], normal(rng, (M, 13))[0])
    assert jnp.isnan(y).any(axis=1).nonzero()[0].tolist() == [6]
    assert jnp.isnan(dw).any(axis=(1, 2)).nonzero()[0].tolist() == [2]


@pytest.mark.parametrize("sizes", [(33, 0), (-1, 3), (2**31 - 1, 2**31 - 1)], ids=str)
def test_wrong_sizes_are_nan_under_jit(sizes, implementation, rng):
    arrays = draw(rng, num_groups=2)

    @jax.jit
    def run(sizes, *arrays):
        op = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
        y, pullback = jax.vjp(lambda x, w: op(x, w), *arrays)
        return y, *pullback(jnp.ones_like(y))

    assert all(jnp.isnan(found).all() for found in run(jnp.array(sizes), *arrays))


@pytest.mark.parametrize("wrt, products", [((0,), 1), ((1,), 1), ((0, 1), 2)], ids=["x", "w", "both"])
def test_what_is_frozen_takes_no_products(wrt, products, rng):
    arrays = draw(rng)
    run = jax.jit(jax.grad(lambda *arrays: (make(SIZES["unequal"], "xla")(*arrays) ** 2).sum(), argnums=wrt))
    assert run.lower(*arrays).as_text().count("stablehlo.dot_general") == 1 + products


def test_x_and_w_are_kept(implementation, rng):
    arrays = draw(rng)
    few = jnp.zeros(8)  # the sizes, and which gradients are wanted
    _oracle.check_residuals(make(SIZES["unequal"], implementation), arrays, kept=[*arrays, few])


def test_groups_are_not_multiplied_densely(rng):
    """Each visit is one product of a tile and one weight."""
    m, num_groups, k, n = 512, 16, 8, 24
    sizes = np.bincount(rng.integers(0, num_groups, m), minlength=num_groups)
    run = jax.jit(make(sizes, "xla"))
    shapes = {eqn for eqn in str(run.trace(*draw(rng, m, num_groups, k, n)).jaxpr).splitlines() if "dot_general" in eqn}
    assert len(shapes) == 1 and "f32[16,24]" in shapes.pop()


def test_visits_cover_each_row_of_a_group_once(rng):
    m, rows = 100, 16
    sizes = np.bincount(rng.integers(0, 9, 80), minlength=9)
    visits = formulas.visits(jnp.asarray(sizes, jnp.int32), m, rows)
    found = []
    for tile, group, begin, end in np.stack(visits[:4], 1)[: int(visits.total)]:
        found += [(row, group) for row in range(max(begin, tile * rows), min(end, (tile + 1) * rows))]
    assert found == list(enumerate(np.repeat(np.arange(9), sizes)))
    assert visits.tile.shape == (formulas.most_visits(m, 9, rows),)
    all_groups = formulas.visits(jnp.asarray(sizes, jnp.int32), m, rows, every_group=True)
    assert {*range(9)} == {*all_groups.group.tolist()} and (jnp.diff(all_groups.group) >= 0).all()
    assert int(all_groups.total) <= formulas.most_visits(m, 9, rows) and int(all_groups.tile.max()) < 7
    assert formulas.group_of_rows(jnp.asarray(sizes), m).tolist() == [*np.repeat(np.arange(9), sizes), *[9] * 20]


def test_vmap(implementation, rng):
    _oracle.check_vmap(make(SIZES["unequal"], implementation), draw(rng), rng, shared=(1,))


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make(SIZES["unequal"], implementation), draw(rng), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make(SIZES["unequal"], implementation), draw(rng), rng)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, implementation, rng):
    """Each device has its own rows for each group."""
    x, w = draw(rng, 64)
    with _oracle.several(implementation) as devices:
        sizes = jnp.asarray([(0, 64 // len(devices) - 5, 2, 0, 2)] * len(devices)).reshape(-1)
        mesh = jax.sharding.Mesh(devices, ("data",))
        spec = jax.sharding.PartitionSpec
        op = lambda x, w, sizes: grouped_matmul(x, w, sizes, implementation=implementation)
        sharded = jax.shard_map(
            op, mesh=mesh, in_specs=(spec("data"), spec(), spec("data")), out_specs=spec("data"), check_vma=check_vma
        )

        def alone(x, w):
            parts = zip(jnp.split(x, len(devices)), jnp.split(sizes, len(devices)), strict=True)
            return jnp.concatenate([op(part, w, own) for part, own in parts])

        placed = [
            jax.device_put(a, jax.sharding.NamedSharding(mesh, s))
            for a, s in zip((x, w, sizes), (spec("data"), spec(), spec("data")), strict=True)
        ]
        cotangent = normal(rng, (64, 13))[0]
        found = _oracle.value_and_gradients(lambda x, w: sharded(x, w, placed[2]), placed[:2], cotangent)
        _oracle.assert_same(found, _oracle.value_and_gradients(alone, [x, w], cotangent))


def test_precision_of_the_call_holds_in_the_backward(rng):
    arrays = draw(rng)
    with jax.default_matmul_precision("default"):

        def loss(*arrays):
            with jax.default_matmul_precision("highest"):
                return (make(SIZES["unequal"], "xla")(*arrays) ** 2).sum()

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == text.count("stablehlo.dot_general") == 3


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=jnp.ones((4, 2), int)), TypeError, "x has dtype int32, but must be floating point"),
        (dict(sizes=jnp.ones(2)), TypeError, "group_sizes has dtype float32, but must be of integers"),
        (dict(x=jnp.ones((4, 3))), ValueError, r"x has shape \(4, 3\) and w \(2, 2, 5\).*pass transpose_w=True"),
        (dict(sizes=jnp.ones(3, int)), ValueError, r"group_sizes has shape \(3,\), but must have shape \(2,\)"),
        (dict(w=jnp.ones((2, 2, 5), "bfloat16")), ValueError, "w has dtype bfloat16 and x float32.*cast"),
        (dict(sizes=jnp.array([3, 2])), ValueError, "least size of 2 and a sum of 5.*at most M = 4"),
        (dict(sizes=jnp.array([-1, 2])), ValueError, "least size of -1"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_say_what_to_do(change, error, message, unchecked_types):
    arguments = dict(x=jnp.ones((4, 2)), w=jnp.ones((2, 2, 5)), sizes=jnp.array([2, 1]), implementation=None) | change
    with pytest.raises(error, match=f"^grouped_matmul: .*{message}"):
        grouped_matmul(arguments["x"], arguments["w"], arguments["sizes"], implementation=arguments["implementation"])


def test_no_rows_and_no_groups_give_zeros():
    assert grouped_matmul(jnp.ones((0, 2)), jnp.ones((3, 2, 5)), jnp.zeros(3, int)).shape == (0, 5)
    assert not grouped_matmul(jnp.ones((4, 2)), jnp.ones((0, 2, 5)), jnp.zeros(0, int)).any()
