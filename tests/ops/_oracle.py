"""How an op is measured: against its reference in float64, against plain JAX in half precision, and against itself
under every transformation.

An op, its reference and the plain expression are functions of the same arrays, and return an array or a tuple.
Gradients are by all arrays unless `wrt` names some, for random cotangents.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

from tests._devices import several

TOLERANCE = 2e-5  # share of the largest reference value, in float32
SAME = 2e-6  # share of the largest value, for the same arithmetic compiled twice
ROUNDED = 1e-6  # an RMS error of float32 sums in any order
WORSE_THAN_PLAIN = 1.5  # at most, in half precision: the ratio of RMS errors


def first(count, values):
    """Parameters of a test: the first ones, and the others only where all cases run."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.full) for value in values[count:])]


def every_second(*axes):
    """Every second combination of three or more axes: each value still meets each value of every other axis."""
    places = itertools.product(*(enumerate(axis) for axis in axes))
    return [tuple(value for _, value in some) for some in places if sum(i for i, _ in some) % 2 == 0]


def half(*axes):
    """Parameters of a test: the combinations of several axes, given as {id: value}, every second one in full runs only.

    Every value still meets every value of each other axis.
    """
    places = (zip(*combination, strict=True) for combination in itertools.product(*(enumerate(axis) for axis in axes)))
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, names, strict=True)),
            id="-".join(names),
            marks=pytest.mark.full if sum(numbers) % 2 else (),
        )
        for numbers, names in places
    ]


def normal(rng: np.random.Generator, *shapes: tuple[int, ...], dtype=jnp.float32) -> list[jax.Array]:
    """One standard normal array for each shape."""
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def value_and_gradients(function: Callable, arrays: Sequence, cotangents, wrt=None, **options) -> list[jax.Array]:
    """The outputs, then the gradients by the arrays that `wrt` numbers: one program, compiled with jax.jit's options.

    Operations one by one would be a compilation each. The arrays that the function has from elsewhere, random ones, are
    arguments of the program, too: constants in it would have it compiled in every run.
    """
    wrt = range(len(arrays)) if wrt is None else wrt

    def run(arrays, cotangents):
        def of_chosen(*chosen):
            chosen = dict(zip(wrt, chosen, strict=True))
            return function(*(chosen.get(i, x) for i, x in enumerate(arrays)))

        value, pullback = jax.vjp(of_chosen, *(arrays[i] for i in wrt))
        cotangents = jax.tree.map(lambda y, g: jnp.asarray(g).astype(y.dtype), value, cotangents)
        return [*jax.tree.leaves(value), *pullback(cotangents)]

    traced = jax.make_jaxpr(run)(list(arrays), cotangents)
    program = jax.jit(lambda consts, inputs: core.eval_jaxpr(traced.jaxpr, consts, *inputs), **options)
    return program(traced.consts, jax.tree.leaves((list(arrays), cotangents)))


def random_cotangents(function: Callable, arrays: Sequence, rng: np.random.Generator):
    """Standard normal, in the shapes of the function's outputs, and exact in bfloat16 and float16."""
    exact = lambda x: x.astype(jnp.bfloat16).astype(np.float16).astype(np.float32)  # in NumPy, which compiles nothing
    draw = lambda y: jnp.asarray(exact(rng.standard_normal(y.shape)))
    return jax.tree.map(draw, jax.eval_shape(function, *arrays))


def truth(reference: Callable, arrays: Sequence, cotangents, wrt=None) -> list[np.ndarray]:
    """`value_and_gradients` of the reference in float64, at exactly these arrays' values."""
    with jax.enable_x64(True):
        widen = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree)
        with jax.numpy_rank_promotion("allow"):
            return [np.asarray(x) for x in value_and_gradients(reference, widen(list(arrays)), widen(cotangents), wrt)]


def largest_error(result, truth) -> float:
    """max|result − truth| / max|truth|; absolute where the truth is 0; infinite where the result is NaN."""
    result, truth = np.asarray(result, np.float64), np.asarray(truth, np.float64)
    assert result.shape == truth.shape
    if not result.size:
        return 0.0
    error, scale = np.max(np.abs(result - truth)), np.max(np.abs(truth))
    return np.inf if np.isnan(error) else float(error / scale if scale else error)


def rms_error(result, truth) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(result, np.float64) - truth))))


def check_float32(op, reference, arrays, rng, wrt=None):
    """Values and every gradient within 2e-5 of the largest value of the float64 reference."""
    cotangents = random_cotangents(op, arrays, rng)
    results = value_and_gradients(op, arrays, cotangents, wrt)
    expected = truth(reference, arrays, cotangents, wrt)
    errors = [largest_error(x, y) for x, y in zip(results, expected, strict=True)]
    assert max(errors) <= TOLERANCE, errors


def check_half(op, plain, reference, arrays, rng, wrt=None):
    """Values and every gradient at most 1.5 times as far from the truth as those of the plain expression, or exact.

    Both round where they say so: XLA otherwise leaves roundings out inside its fusions, which no kernel can.
    The plain error of a single number may be next to nothing by chance. An eighth of the error that its last rounding
    can make, eps / 2 of the number, is allowed in any case.
    """
    eps = max(float(jnp.finfo(x.dtype).eps) for x in arrays)
    cotangents = random_cotangents(op, arrays, rng)
    exactly = {"compiler_options": {"xla_allow_excess_precision": False}}
    ours, theirs = (value_and_gradients(f, arrays, cotangents, wrt, **exactly) for f in (op, plain))
    for x, y, t in zip(ours, theirs, truth(reference, arrays, cotangents, wrt), strict=True):
        assert x.dtype == y.dtype
        by_chance = eps / 16 * float(np.abs(t).max()) if t.size == 1 else 0.0
        allowed = max(WORSE_THAN_PLAIN * rms_error(y, t), ROUNDED, by_chance)
        assert rms_error(x, t) <= allowed, (rms_error(x, t), rms_error(y, t))


def assert_same(results, expected):
    errors = jax.tree.map(largest_error, list(results), list(expected))
    assert max(errors) <= SAME, errors


def check_vmap(op, arrays, rng, wrt=None, shared=()):
    """vmap over a new first axis of all arrays but the `shared` ones: each element as by itself, gradients too."""
    batch = 3
    stacked = [
        x if i in shared else jnp.stack([x, *normal(rng, *[x.shape] * (batch - 1), dtype=x.dtype)])
        for i, x in enumerate(arrays)
    ]
    axes = [None if i in shared else 0 for i in range(len(arrays))]
    cotangents = random_cotangents(op, arrays, rng)
    run = jax.jit(lambda *arrays: value_and_gradients(op, arrays, cotangents, wrt))
    results = jax.vmap(run, in_axes=axes)(*stacked)
    elements = [run(*(x if i in shared else x[b] for i, x in enumerate(stacked))) for b in range(batch)]
    assert_same(results, [jnp.stack(xs) for xs in zip(*elements, strict=True)])


def check_checkpoint(op, arrays, rng, implementation, wrt=None):
    """Rematerialised, the value and the gradients are the same."""
    if implementation == "mosaic_tpu:interpret":
        pytest.skip("JAX's TPU interpreter has effects, which jax.checkpoint refuses; compiled kernels have none")
    cotangents = random_cotangents(op, arrays, rng)
    run = lambda f: value_and_gradients(f, arrays, cotangents, wrt)
    assert_same(run(jax.checkpoint(op)), run(op))


def check_scan(op, arrays, rng, wrt=None):
    """As the body of a scan, the value and the gradients are the sums of two single calls'."""
    cotangents = random_cotangents(op, arrays, rng)

    def scanned(*arrays):
        def body(total, sign):
            value = op(*(sign.astype(x.dtype) * x for x in arrays))
            return jax.tree.map(jnp.add, total, value), None

        start = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(op, *arrays))
        return jax.lax.scan(body, start, jnp.array([1.0, -0.5]))[0]

    def looped(*arrays):
        values = [op(*(jnp.asarray(sign, x.dtype) * x for x in arrays)) for sign in (1.0, -0.5)]
        return jax.tree.map(jnp.add, *values)

    run = lambda f: value_and_gradients(f, arrays, cotangents, wrt)
    assert_same(run(scanned), run(looped))


def check_shard_map(op, arrays, rng, implementation, check_vma, wrt=None, split=(0,)):
    """Split along their first axis over a mesh, inside shard_map: value and gradients as on one device."""
    if check_vma and implementation == "triton:interpret":
        pytest.skip("JAX's HLO interpreter does not run under check_vma; tests/aot compiles the kernels there")
    with several(implementation) as devices:
        mesh = jax.sharding.Mesh(devices, ("data",))
        specs = tuple(PartitionSpec("data") if i in split else PartitionSpec() for i in range(len(arrays)))
        sharded = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=check_vma)
        cotangents = random_cotangents(op, arrays, rng)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        run = lambda f, arrays: value_and_gradients(f, arrays, cotangents, wrt)
        assert_same(run(sharded, placed), run(op, arrays))


def check_partitioned(op, arrays, rng, axis_type, wrt=None, split=(0,)):
    """Split along their first axis over a mesh, outside of shard_map: results stay so, and nothing is communicated."""
    with several() as devices:
        mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(axis_type,))
        over_data, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
        cotangents = jax.device_put(random_cotangents(op, arrays, rng), over_data)
        placed = [jax.device_put(x, over_data if i in split else replicated) for i, x in enumerate(arrays)]
        run = jax.jit(lambda arrays, cotangents: value_and_gradients(op, arrays, cotangents, wrt))
        assert all(x.sharding.is_equivalent_to(over_data, x.ndim) for x in run(placed, cotangents))
        assert not collectives(run.lower(placed, cotangents))


def check_residuals(op, arrays, kept: Sequence[jax.Array], wrt=None, per_row: int = 0):
    """Between forward and backward nothing lives but the arrays `kept`, and so many numbers a row of the first."""
    wrt = range(len(arrays)) if wrt is None else wrt
    chosen = [arrays[i] for i in wrt]
    fill = lambda *chosen: [dict(zip(wrt, chosen, strict=True)).get(i, x) for i, x in enumerate(arrays)]
    _, pullback = jax.vjp(lambda *chosen: op(*fill(*chosen)), *chosen)
    size = sum(x.nbytes for x in jax.tree.leaves(pullback) if hasattr(x, "nbytes"))
    rows = math.prod(kept[0].shape[:-1])
    assert size <= sum(x.nbytes for x in kept) + 4 * per_row * rows, [jax.typeof(x) for x in jax.tree.leaves(pullback)]


def collectives(lowered: jax.stages.Lowered) -> list[str]:
    """The instructions of the compiled program by which devices exchange data."""
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return [line for line in str(lowered.compile().as_text()).splitlines() if any(f" {name}" in line for name in names)]


def sent(text: str) -> set[tuple[str, int]]:
    """Kind and number of elements of every array that a collective puts out."""
    found = re.findall(
        r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text
    )
    shapes = [(kind, dims) for types, kind in found for dims in re.findall(r"\w+\[([\d,]*)\]", types)]
    return {(kind, math.prod(int(n) for n in dims.split(",") if n)) for kind, dims in shapes}


def each_by_itself(devices: Sequence) -> dict[str, int]:
    """Options of a GPU's compiler by which it sends each array by itself, and not several as one."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter") if devices[0].platform == "gpu" else ()
    return {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in kinds}


def packed(sizes: Collection[int], devices: Sequence) -> set[int]:
    """Which sizes `sent` may find for arrays of these sizes.

    On GPUs XLA sends up to four arrays as one, and an array that two devices sum as two halves.
    """
    if devices[0].platform == "cpu":
        return {*sizes}
    whole = {*sizes, *(size // 2 for size in sizes)}
    return {sum(some) for n in (1, 2, 3, 4) for some in itertools.combinations_with_replacement(whole, n)}
