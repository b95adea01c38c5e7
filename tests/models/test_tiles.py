"""A layer whose feed-forward runs over tiles of tokens computes what it computes on all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from liger_jax.models.core import tiles
from liger_jax.models.lora import add_lora, trainable, with_dropout
from liger_jax.models.quantized import quantize

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
LENGTH = 75  # with 2 rows: 10 tiles of 16 tokens, of which the last shares 10 with the one before it
LAYOUT = Layout(batch=("fsdp",), fsdp="fsdp", tensor="tensor")


@pytest.fixture
def in_tiles(monkeypatch):
    """Switches tiles of 16 tokens on and off."""

    def switch(on: bool):
        monkeypatch.setattr(tiles, "LEAST_TOKENS", 16)
        monkeypatch.setattr(tiles, "MOST_TOKENS", 16 if on else 2**20)
        for name in ("LEAST_TILES", "LEAST_TILES_OF_OFFLOADED"):
            monkeypatch.setattr(tiles, name, 2 if on else 2**20)

    return switch


def make(kind, **options):
    """A model and what of it is trained, of a kind such as "llama", "phi3 lora" or "llama nf4 lora"."""
    family, *parts = kind.split()
    model_type, config = (Phi3ForCausalLM, Phi3Config) if family == "phi3" else (LlamaForCausalLM, LlamaConfig)
    model = model_type(config(**SIZES, initializer_range=0.2), rngs=nnx.Rngs(0), **options)
    for name in {"nf4", "int8"}.intersection(parts):
        model = quantize(model, name, block_size=32)
    if "lora" not in parts and "dora" not in parts:
        return *nnx.split(model, nnx.Param), ()
    model = add_lora(model, 4, alpha=8, dora="dora" in parts, dropout=0.5, rngs=nnx.Rngs(1))
    graph, params, *frozen = trainable(model)
    noise = iter(jax.random.split(jax.random.key(2), 200))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(noise), leaf.shape), params)
    return graph, params, frozen


def loss_and_gradients(graph, params, frozen, tokens, **arguments):
    def loss(params):
        model = nnx.merge(graph, params, *frozen)
        model = with_dropout(model, jax.random.key(3)) if frozen else model
        return model(tokens, labels=tokens, **arguments).loss

    return jax.jit(jax.value_and_grad(loss))(params)


def worst(found, expected):
    """The largest difference of a gradient from the expected one, as a share of that one's maximum."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


KINDS = ("llama", "llama nf4 lora", "llama lora", "llama int8 lora", "llama dora", "phi3", "phi3 lora")


@pytest.mark.parametrize("kind", [k if i < 2 else pytest.param(k, marks=pytest.mark.full) for i, k in enumerate(KINDS)])
def test_tiled_feed_forward_has_the_values_and_gradients_of_all_tokens(kind, in_tiles, rng):
    x, dy = (jnp.asarray(rng.normal(size=(2, LENGTH, SIZES["hidden_size"])), jnp.float32) for _ in range(2))
    graph, params, frozen = make(kind, remat="full", scan_layers=False)
    model = nnx.merge(graph, params, *frozen)
    model = with_dropout(model, jax.random.key(3)) if frozen else model
    filters = (nnx.Param, ...) if not frozen else (nnx.LoRAParam, ...)
    graph, params, frozen = nnx.split(model.model.layers[0].mlp, *filters)

    def value_and_gradients():
        loss = lambda params, x: jnp.sum(nnx.merge(graph, params, frozen)(x)[0] * dy)
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    found = []
    for on in (True, False):
        in_tiles(on)
        found.append(value_and_gradients())
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    assert worst(found[0][1], found[1][1]) < 5e-6


CASES = [
    ("llama", "full", True),
    ("llama nf4 lora", "offload", True),
    ("llama lora", "full", False),
    ("llama lora", "offload_attention", True),
    ("phi3 lora", "offload", False),
]


@pytest.mark.full
@pytest.mark.parametrize("kind, remat, scan", CASES)
def test_tiled_loss_and_gradients_are_those_of_all_tokens(kind, remat, scan, in_tiles, rng):
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (2, LENGTH)))
    model = make(kind, remat=remat, scan_layers=scan)
    found = []
    for on in (True, False):
        in_tiles(on)
        found.append(loss_and_gradients(*model, tokens))

    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert worst(found[0][1], found[1][1]) < 1e-5


def test_short_rows_have_no_tiles_and_long_ones_do(in_tiles, rng):
    assert tiles.tile_tokens(4 * 2048, 4096) is None
    assert tiles.tile_tokens(65_536, 4096) == 4096
    assert tiles.tokens_at_once(8192, 4096, "offload") == 8192
    assert tiles.tokens_at_once(8193, 4096, "offload") == 2048  # where memory is short
    # Devices of a tensor axis cut their own positions, and compute their tiles together.
    assert tiles.tokens_at_once(65_536, 4096, "full", tensor=2) == 65_536
    assert tiles.tokens_at_once(65_538, 4096, "full", tensor=2) == 2 * 4096
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (1, LENGTH)))
    programs = {}
    for on, remat in ((True, "full"), (False, "full"), (True, "dots")):
        graph, params, _ = make("llama", remat=remat, scan_layers=False)
        in_tiles(on)
        loss = lambda params, graph=graph: nnx.merge(graph, params)(tokens, labels=tokens).loss
        programs[on, remat] = str(jax.make_jaxpr(jax.grad(loss))(params))

    tile = f"f32[1,16,{SIZES['intermediate_size']}]"
    assert tile in programs[True, "full"]
    assert tile not in programs[False, "full"]
    assert tile not in programs[True, "dots"]  # which keeps gate and up of all tokens


def test_bfloat16_weights_have_gradients_summed_in_float32(rng):
    x = jnp.asarray(rng.normal(size=(1, 4099, 16)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    product = lambda weight, tile, numbers: jnp.tanh(tile @ weight)

    def gradient(run, dtype):
        loss = lambda weight: jnp.sum(run(weight, x.astype(dtype)).astype(jnp.float32) * scale)
        return jax.jit(jax.grad(loss))(weight.astype(dtype)).astype(jnp.float32)

    tiled = lambda weight, x: tiles.in_tiles(product, weight, x, 16)  # 257 tiles
    whole = lambda weight, x: product(weight, x, 0)
    truth = gradient(whole, jnp.float32)
    rms = lambda found: float(jnp.sqrt(jnp.mean((found - truth) ** 2)))
    assert rms(gradient(tiled, jnp.bfloat16)) <= 1.5 * rms(gradient(whole, jnp.bfloat16))


def test_tiles_inside_a_checking_shard_map_have_the_gradients_of_one_device(devices, rng):
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((len(devices), 40, 8), (8, 8)))
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)

    def local(weight, x):
        return jax.lax.psum(
            jnp.sum(tiles.in_tiles(lambda weight, tile, _: jnp.tanh(tile @ weight), weight, x, 16)), "data"
        )

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())  # check_vma is JAX's default
    found = jax.jit(jax.grad(loss, (0, 1)))(weight, x)
    assert worst(found, jax.grad(lambda weight, x: jnp.sum(jnp.tanh(x @ weight)), (0, 1))(weight, x)) < 1e-5


def test_weights_that_nobody_trains_have_no_sums(rng):
    x = jnp.asarray(rng.normal(size=(1, 40, 8)), jnp.float32)
    weights = dict(frozen=jnp.eye(8), trained=jnp.ones(8))
    product = lambda weights, tile, numbers: (tile @ weights["frozen"]) * weights["trained"]

    def loss(trained, x):
        return jnp.sum(tiles.in_tiles(product, weights | dict(trained=trained), x, 16))

    *_, backward = [e for e in jax.make_jaxpr(jax.grad(loss))(weights["trained"], x).eqns if e.primitive.name == "scan"]
    carried = [v.aval.shape for v in backward.outvars]
    assert (40, 8) in carried and (8,) in carried and (8, 8) not in carried


def test_a_bad_row_stays_by_itself(rng):
    x = jnp.asarray(rng.normal(size=(1, 41, 8)), jnp.float32).at[0, 20].set(jnp.nan)
    gradient = jax.grad(lambda x: jnp.nansum(tiles.in_tiles(lambda _, tile, numbers: jnp.sin(tile), (), x, 16)))(x)
    is_bad = np.arange(41) == 20
    np.testing.assert_allclose(gradient[0, ~is_bad], jnp.cos(x)[0, ~is_bad], rtol=1e-6)


@pytest.mark.parametrize(
    "kind, tensor",
    [
        pytest.param("llama nf4 lora", False, marks=pytest.mark.full),
        pytest.param("llama", False, marks=pytest.mark.full),
        pytest.param("llama", True, marks=pytest.mark.full),
        pytest.param("llama lora", True, marks=pytest.mark.full),
    ],
)
def test_tiles_of_a_device_are_of_its_own_tokens(kind, tensor, devices, in_tiles, rng):
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (8, LENGTH)))
    in_tiles(False)
    expected = loss_and_gradients(*make(kind, remat="full"), tokens)

    in_tiles(True)
    shape = (len(devices) // 2, 2) if tensor else (len(devices), 1)
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), (AxisType.Auto,) * 2, devices=devices)
    graph, params, frozen = make(kind, remat="full", kernels=KernelOptions(layout=LAYOUT))
    with jax.set_mesh(mesh):
        params, frozen = (jax.device_put(tree, LAYOUT.shardings(tree, mesh)) for tree in (params, frozen))
        placed = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
        found = loss_and_gradients(graph, params, frozen, placed)

    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert worst(jax.device_get(found[1]), jax.device_get(expected[1])) < 2e-5
