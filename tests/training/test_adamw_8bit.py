"""AdamW with 8-bit state: bitsandbytes' code, AdamW's update, the bytes that were counted, the same on every mesh."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import optimizer_state
from liger_jax.models import Layout
from liger_jax.ops.place import Place
from liger_jax.planner import compilers
from liger_jax.training import adamw_8bit, dynamic_code, eight_bit, scale_by_adam_8bit, stochastic_rounding
from tests.training import _bitsandbytes

B1, B2, EPS, BLOCK = 0.9, 0.999, 1e-8, 256
ENCODE = dict(signed=jax.jit(dynamic_code.encode_signed), unsigned=jax.jit(dynamic_code.encode_unsigned))
DECODE = dict(signed=dynamic_code.decode_signed, unsigned=dynamic_code.decode_unsigned)
TABLES = dict(signed=_bitsandbytes.SIGNED, unsigned=_bitsandbytes.UNSIGNED)
both_codes = pytest.mark.parametrize("kind", TABLES)


def same(a, b):
    return all(np.array_equal(*map(np.asarray, pair)) for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True))


# --- the code ---------------------------------------------------------------------------------------------------------


@both_codes
def test_codes_are_places_in_bitsandbytes_table(kind):
    table = TABLES[kind]
    assert table.shape == (256,) and np.all(np.diff(table) > 0)
    codes = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_allclose(DECODE[kind](codes), table, rtol=1e-6)
    np.testing.assert_array_equal(ENCODE[kind](jnp.asarray(table, jnp.float32)), codes)


@both_codes
def test_a_number_gets_the_nearest_code(kind, rng):
    """Numbers of all sizes, below the levels' ends, and around the borders of codes. Unsigned, only 0 itself is 0."""
    table = TABLES[kind]
    borders = (table[1:] + table[:-1]) / 2
    close = np.concatenate([borders * (1 + 1e-5), borders * (1 - 1e-5)])
    just_below = 10.0 ** np.arange(-6, 1) * (1 - np.arange(1, 9)[:, None] * 2.0**-24)
    sizes = [10 ** rng.uniform(-9, 0, 50_000), rng.uniform(0, 1, 50_000), close, just_below.ravel(), [1, 1e-37]]
    x = np.concatenate(sizes).astype(np.float32)
    x = np.concatenate([x, -x]) if kind == "signed" else x
    found = np.asarray(ENCODE[kind](x))
    distance = np.abs(table[found] - x)
    nearest = np.abs(table[np.searchsorted(borders, np.float64(x))] - x)
    if kind == "unsigned":
        assert np.all(found > 0)
        nearest = np.where(x < borders[0], table[1] - x, nearest)
    assert np.all(distance <= nearest * (1 + 1e-4))


# --- the update -------------------------------------------------------------------------------------------------------


def nearest(x, table):
    return np.searchsorted((table[1:] + table[:-1]) / 2, x)


def quantised(x, kind):
    """x (rows, D) in float64 after bitsandbytes' rounding, in blocks of 256 along D."""
    out = np.zeros_like(x)
    for start in range(0, x.shape[1], BLOCK):
        block = x[:, start : start + BLOCK]
        scale = np.abs(block).max(axis=1, keepdims=True)
        codes = nearest(block / scale, TABLES[kind])
        out[:, start : start + BLOCK] = TABLES[kind][np.maximum(codes, kind == "unsigned")] * scale
    return out


def of_state(state) -> Any:
    """The moments of a state in float64, by bitsandbytes' table."""
    spread = lambda scale: np.repeat(np.float64(scale), BLOCK, axis=1)[:, : state.mu.shape[1]]
    mu = TABLES["signed"][np.asarray(state.mu)] * spread(state.mu_scale)
    return mu, TABLES["unsigned"][np.asarray(state.nu)] * spread(state.nu_scale)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Codes are looked up for the scales."""
    monkeypatch.setattr(eight_bit, "place_of", lambda grad: Place(AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")))


@pytest.mark.parametrize("way", ["as here", "as on a GPU"])
def test_the_update_is_that_of_float64_adam_on_quantised_moments(way, rng, request):
    """Rows of 3.5 blocks, as Qwen2's. Each step begins with the state that the step before has left."""
    if way == "as on a GPU":
        request.getfixturevalue("as_on_a_gpu")
    shape = (24, 896)
    optimizer = scale_by_adam_8bit(B1, B2, EPS)
    update = jax.jit(optimizer.update)
    state, free = optimizer.init(jnp.zeros(shape)), (np.zeros(shape), np.zeros(shape))
    sizes = 10 ** rng.uniform(-4, 0, (24, 1)) * 10 ** rng.uniform(-3, 0, shape)  # elements differ, as layers' do
    for step in range(1, 9):
        grad = np.float32(rng.normal(size=shape) * sizes)
        old = of_state(state)
        found, state = update(jnp.asarray(grad), state)
        for start, tolerance in ((old, 2e-5), (free, 0.02)):
            mu, nu = B1 * start[0] + (1 - B1) * np.float64(grad), B2 * start[1] + (1 - B2) * np.float64(grad) ** 2
            truth = mu / (1 - B1**step) / (np.sqrt(nu / (1 - B2**step)) + EPS)
            assert np.sqrt(np.mean((found - truth) ** 2)) <= tolerance * np.sqrt(np.mean(truth**2))
            if start is old:  # what is stored is as near to the moments as bitsandbytes' rounding is
                np.testing.assert_allclose(found, truth, rtol=1e-4, atol=2e-5 * np.abs(truth).max())
                for ours, exact, kind in zip(of_state(state), (mu, nu), TABLES, strict=True):
                    error, best = np.abs(ours - exact), np.abs(quantised(exact, kind) - exact)
                    assert np.all(error <= best * (1 + 1e-3) + 1e-6 * np.abs(exact).max(axis=1, keepdims=True))
        free = quantised(mu, "signed"), quantised(nu, "unsigned")  # of the oracle that never saw our state


def test_small_narrow_and_named_parameters_have_float32_moments_and_optax_s_update(rng):
    vectors = dict(scale=(2, 4096), gate_up_proj_bias=(16, 512))
    shapes = dict(small=(15, 273), narrow=(512, 15), vectors=vectors, embed_tokens=(64, 64), kernel=(16, 256))
    params = jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    optimizer = adamw_8bit(1e-3, weight_decay=0.1, float32_names=("embed_tokens",))
    known = optax.adamw(1e-3, weight_decay=0.1)
    state: Any = optimizer.init(params)
    other: Any = known.init(params)
    found: Any = None
    expected: Any = None
    update, known_update = jax.jit(optimizer.update), jax.jit(known.update)
    for _ in range(2):
        (found, state), (expected, other) = update(grads, state, params), known_update(grads, other, params)
    moments = state[0]
    dtypes = jax.tree.map(lambda x: str(x.dtype), moments.mu)
    named = jax.tree.map(lambda x: "float32", params) | dict(kernel="uint8")
    assert dtypes == jax.tree.map(lambda x: str(x.dtype), moments.nu) == named
    ours, theirs = dict(found), dict(expected)
    # The second update of codes is not AdamW's, since moments were rounded after the first; but close.
    assert 1e-6 < float(jnp.sqrt(jnp.mean((ours.pop("kernel") - theirs.pop("kernel")) ** 2))) < 1e-4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), ours, theirs)


def test_a_block_of_zeros_stays_zero_and_what_is_not_finite_is_not_hidden():
    grad = jnp.ones((4, 1024)).at[1, :256].set(0).at[2, 3].set(jnp.nan).at[3, 3].set(jnp.inf)
    optimizer = scale_by_adam_8bit()
    state, update = optimizer.init(grad), jax.jit(optimizer.update)
    for _ in range(2):
        found, state = update(grad, state)
        assert not jnp.any(found[1, :256]) and jnp.all(jnp.isfinite(found[:2])) and jnp.all(found[0] > 0.9)
        assert not jnp.any(jnp.isfinite(found[2:, 3])) and jnp.all(jnp.isfinite(found[2:, 256:]))


@pytest.mark.parametrize("large", [1e20, 3e38])
def test_a_gradient_whose_square_overflows_makes_no_nan_and_no_large_update(large):
    """Nor does its block's least second moment become 0, by which a first moment would be divided later."""
    grad = jnp.full((16, 256), 1e-3).at[0, 0].set(large).at[1, 0].set(-large)
    optimizer = scale_by_adam_8bit()
    update = jax.jit(optimizer.update)
    found, state = update(grad, optimizer.init(grad))
    np.testing.assert_allclose(found[:2, 0], [1, -1], rtol=1e-4)
    np.testing.assert_allclose(found[2:], 1, rtol=1e-3)
    for small in (*[1e-3] * 8, 0.0):
        found, state = update(jnp.full((16, 256), small), state)
        assert float(jnp.max(jnp.abs(found))) < 10


def test_a_traced_number_out_of_its_range_makes_nan():
    grad = jnp.ones((16, 256))

    @jax.jit
    def update(b2):
        optimizer = scale_by_adam_8bit(b2=b2)
        return optimizer.update(grad, optimizer.init(grad))[0]

    assert jnp.all(jnp.isnan(update(jnp.float32(1.0)))) and jnp.all(jnp.isfinite(update(jnp.float32(0.9))))


def test_a_tiny_second_moment_does_not_become_0():
    """Then the next update would divide the first moment by epsilon."""
    grad = jnp.full((16, 256), 1e-4).at[:, 0].set(1.0)
    optimizer = scale_by_adam_8bit()
    update = jax.jit(optimizer.update)
    _, state = update(grad, optimizer.init(grad))
    found, _ = update(jnp.zeros_like(grad), state)
    assert float(jnp.max(jnp.abs(found))) < 1


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_the_state_has_2_03_bytes_a_parameter_and_is_updated_in_place():
    params = jnp.ones((256, 1024))
    optimizer = adamw_8bit(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    count = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert count == params.size * (2 + 2 * 4 / 256) + 4

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    memory = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile().memory_analysis()
    assert memory.argument_size_in_bytes == 2 * params.nbytes + count
    assert memory.alias_size_in_bytes == params.nbytes + count


@pytest.mark.aot
@pytest.mark.parametrize("name", ["8-bit, bfloat16", pytest.param("8-bit, float32", marks=pytest.mark.full)])
def test_on_a_gpu_the_update_holds_no_moments_in_float32(name):
    """Beside arguments and results they take scales alone: 1/14 of a byte a parameter."""
    if (reason := compilers.missing_compiler("gpu")) is not None:
        pytest.skip(reason)
    case = optimizer_state.CASES[name]
    params = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((24, 4864, 896), (4096, 4864), (4096, 896))]
    memory = optimizer_state.compiled_update(params, case, "h100").memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * sum(x.size for x in params)


# --- meshes and saved states ------------------------------------------------------------------------------------------


def trained(params, grads, optimizer, steps, state: Any = None) -> Any:
    @jax.jit
    def step(state, grads):
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    state = state or (params, optimizer.init(params))
    for _ in range(steps):
        state = step(state, grads)
    return state


def put(tree, mesh, spec) -> Any:
    """Matrices are sharded as `spec` says, and every device has the rest."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P())), tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_goes_on_exactly_from_a_saved_state_on_any_mesh(dtype, rng, devices):
    """Rows or columns are split, with Auto and with Explicit axes; bfloat16 is rounded stochastically."""
    draw = lambda: jnp.asarray(rng.normal(size=(16, 2048)), dtype)
    params, grads = dict(kernel=draw(), bias=jnp.ones(64, dtype)), dict(kernel=draw(), bias=jnp.ones(64, dtype))
    optimizer = stochastic_rounding(adamw_8bit(1e-3), seed=3) if dtype == jnp.bfloat16 else adamw_8bit(1e-3)
    whole = trained(params, grads, optimizer, 3)
    saved = jax.tree.map(np.asarray, trained(params, grads, optimizer, 2))
    assert same(whole, trained(params, grads, optimizer, 1, jax.tree.map(jnp.asarray, saved)))
    for axis_type, spec in (
        (AxisType.Auto, P(None, "fsdp")),
        (AxisType.Explicit, P("fsdp")),
        (AxisType.Explicit, P(None, "fsdp")),
    ):
        mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(axis_type,), devices=devices)
        with jax.set_mesh(mesh):
            own_params, own_grads = put((params, grads), mesh, spec)
            found = trained(own_params, own_grads, optimizer, 1, put(saved, mesh, spec))
            assert same(whole, found)
            fresh = optimizer.init(put(params, mesh, spec))
            scales = [x for x in jax.tree.leaves(fresh) if x.shape == (16, 8)]
            wanted = NamedSharding(mesh, spec)
            assert len(scales) == 2 and all(x.sharding.is_equivalent_to(wanted, 2) for x in scales)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_codes_are_looked_up_on_the_device_that_has_them(rng, devices):
    kernel = jnp.asarray(rng.normal(size=(16, 1024)), jnp.float32)
    optimizer = scale_by_adam_8bit()
    whole = jax.jit(optimizer.update)(kernel, optimizer.init(kernel))
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        own = put(kernel, mesh, P("fsdp"))
        assert same(whole, jax.jit(optimizer.update)(own, optimizer.init(own)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("width", [896, 128, 300], ids=["3.5 blocks", "half a block", "no whole pieces"])
def test_a_mesh_may_split_blocks(width, axis_type, rng, devices):
    """State and update are one device's; what is sent is as small as maxima of pieces."""
    optimizer, rows = scale_by_adam_8bit(), 64
    first, second = rng.normal(size=(2, rows, width)).astype(np.float32)
    update: Any = jax.jit(optimizer.update)
    _, state = update(first, jax.jit(optimizer.init)(first))
    expected = update(second, state)
    mesh = jax.make_mesh((len(devices),), ("tensor",), axis_types=(axis_type,), devices=devices)
    with jax.set_mesh(mesh):
        own = jax.device_put(second, NamedSharding(mesh, P(None, "tensor")))
        places = jax.tree.map(lambda x: x.sharding, optimizer.init(own))
        arguments = own, jax.device_put(state, places)
        compiled = update.lower(*arguments).compile()
        found, program = compiled(*arguments), compiled.as_text()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(found[1][1:], expected[1][1:], strict=True):  # a code between two may become the other
        difference = np.abs(np.float64(ours) - np.float64(theirs))
        assert np.mean(difference > 1e-6) < 0.01 and difference.max() <= (1 if ours.dtype == jnp.uint8 else 1e-6)
    assert found[1].mu.sharding.spec == P(None, "tensor")
    sent = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* (?:all-gather|all-to-all|all-reduce|collective)", program)
    largest = max((math.prod(map(int, shape.split(","))) for shape in sent), default=0)
    assert largest <= rows * width // (32 if width % 32 == 0 else 1)


def test_scales_are_sharded_as_a_layout_says(devices):
    """Those of blocks that are not equal are whole, also where the mesh divides their number."""
    mesh = jax.make_mesh((1, len(devices)), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    layout, optimizer = Layout(batch=("fsdp",), tensor="tensor"), adamw_8bit(1e-3)
    for width, are_split in ((449 * len(devices), False), (512 * len(devices), True)):
        params = {"q_proj": {"kernel": jnp.ones((16, width))}}
        state = optimizer.init(jax.device_put(params, layout.shardings(params, mesh)))
        wanted = jax.tree.leaves(layout.shardings((params, state), mesh, optimizer)[1])
        pairs, shape = zip(jax.tree.leaves(state), wanted, strict=True), (16, -(-width // BLOCK))
        scales = [(x, sharding) for x, sharding in pairs if x.shape == shape]
        assert len(scales) == 2 and all(x.sharding.is_equivalent_to(sharding, 2) for x, sharding in scales)
        assert scales[0][1].is_fully_replicated != are_split


def test_wrappers_with_a_condition_take_it_in_nnx_s_optimizer():
    """Their state has one structure before and after an update."""
    model = nnx.Linear(64, 96, rngs=nnx.Rngs(0))
    wrapped = optax.apply_if_finite(adamw_8bit(1e-2), 3)
    optimizer = nnx.Optimizer(model, wrapped, wrt=nnx.Param)
    structure, before = jax.tree.structure(nnx.state(optimizer)), model.kernel[...]
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    assert jnp.any(model.kernel[...] != before) and jax.tree.structure(nnx.state(optimizer)) == structure


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(b1=1.0), "adamw_8bit: b1=1.0 must be at least 0 and less than 1"),
        (dict(b2=-0.1), "adamw_8bit: b2=-0.1 must be at least 0"),
        (dict(eps=0.0), "adamw_8bit: eps=0.0 must be above 0"),
        (dict(block_size=8), "adamw_8bit: block_size=8 must be at least 16"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adamw_8bit(1e-3, **options)


def test_numbers_may_be_injected_under_jit_and_the_block_size_is_static(rng, devices, unchecked_types):
    """optax hands over every number as an array, so that a step can change it."""
    params = {"kernel": jnp.asarray(rng.standard_normal((64, 512)), jnp.float32)}
    grads = jax.tree.map(jnp.cos, params)
    numbers = dict(learning_rate=1e-3, b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.1)
    injected = optax.inject_hyperparams(adamw_8bit, static_args=("block_size",))(**numbers, block_size=128)
    expected = trained(params, grads, adamw_8bit(**numbers, block_size=128), 2)[0]

    def check(params, grads):
        found = trained(params, grads, injected, 2)[0]
        np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-4, atol=1e-6)

    check(params, grads)
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        check(*(put(tree, mesh, P("fsdp")) for tree in (params, grads)))
    with pytest.raises(TypeError, match=r"block_size is an array, and must be a Python int.*static_args"):
        optax.inject_hyperparams(adamw_8bit)(**numbers, block_size=128).init(params)


def test_under_a_mask_other_parameters_have_no_state_and_these_the_same_update(rng):
    """Integers among them, which `adamw_8bit` refuses by itself."""
    kernel, codes = jnp.asarray(rng.normal(size=(16, 256)), jnp.float32), jnp.ones((16, 1024), jnp.int8)
    params, alone = dict(kernel=kernel, codes=codes), adamw_8bit(1e-3)
    masked = optax.masked(alone, dict(kernel=True, codes=False))
    state: Any = masked.init(params)
    assert codes.shape not in {x.shape for x in jax.tree.leaves(state)}
    updates, state = masked.update(params, state, params)
    expected = alone.update(kernel, alone.init(kernel), kernel)
    assert same(updates, dict(kernel=expected[0], codes=codes)) and same(state, expected[1])


@pytest.mark.usefixtures("unchecked_types")
def test_parameters_and_states_that_do_not_fit_are_refused():
    params = dict(kernel=jnp.ones((16, 1024)))
    with pytest.raises(ValueError, match=r"float32_names has 'embedding', .* Name one of \['kernel'\]"):
        adamw_8bit(1e-3, float32_names=("embedding",)).init(params)
    with pytest.raises(TypeError, match="adamw_8bit: kernel is int8, and must have a real floating-point dtype"):
        adamw_8bit(1e-3).init(dict(kernel=jnp.ones((16, 1024), jnp.int8)))
    state = adamw_8bit(1e-3, block_size=128).init(params)
    with pytest.raises(ValueError, match=r"scales of shape \(16, 8\), and block_size=256 makes them \(16, 4\)"):
        adamw_8bit(1e-3).update(params, state, params)


def test_the_first_state_can_be_donated():
    params = dict(small=jnp.ones(8), kernel=jnp.ones((16, 256)))
    optimizer = adamw_8bit(1e-3)
    leaves = jax.tree.leaves(optimizer.init(params))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
