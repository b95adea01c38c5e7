"""Layers of a gated convolution, in LFM2's form: their formula, packed and padded rows, caches, and what is kept."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from liger_jax.models import KernelOptions, Layout, Lfm2Config, Lfm2ForCausalLM, lora
from liger_jax.models.core.memory import LayerMemory
from liger_jax.models.core.parameters import describe
from liger_jax.models.core.remat import POLICIES
from liger_jax.models.quantized import quantize
from liger_jax.planner.devices import target
from tests.ops._oracle import first

CONFIG = Lfm2Config(
    vocab_size=24,
    hidden_size=12,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    block_multiple_of=5,
    conv_bias=True,
    full_attn_idxs=(1,),
    initializer_range=0.4,
)


def made(config=CONFIG, **options):
    """A model whose biases are not 0."""
    model = Lfm2ForCausalLM(config, rngs=nnx.Rngs(0), **options)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "bias":
            parameter[...] += jax.random.normal(jax.random.key(1), parameter.shape[-1:])
    return model


@nnx.jit
def logits_of(model, tokens, **rows):
    out = model(tokens, **rows)
    return out.logits, out.cache


def test_a_layer_is_its_formula(rng):
    layer, x = made(scan_layers=False).model.layers[0].conv, rng.normal(size=(2, 7, 12))
    found = nnx.jit(lambda layer, x: layer(x, None))(layer, jnp.asarray(x, jnp.float32))
    of = lambda parameter: np.asarray(parameter[...], np.float64)
    before, after, values = np.split(x @ of(layer.in_proj.kernel) + of(layer.in_proj.bias), 3, axis=-1)
    seen = np.pad(before * values, ((0, 0), (2, 0), (0, 0)))
    taps = of(layer.conv.taps)[:, 0]
    y = sum(seen[:, j : j + 7] * taps[:, j] for j in range(3)) + of(layer.conv.bias)
    expected = (after * y) @ of(layer.out_proj.kernel) + of(layer.out_proj.bias)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_packed_documents_and_padded_rows_have_the_logits_that_they_have_alone(rng):
    model, tokens = made(), jnp.asarray(rng.integers(0, 24, (1, 11)), jnp.int32)
    alone = [logits_of(model, jnp.pad(tokens[:, begin:end], ((0, 0), (0, 11 - end + begin))))[0] for begin, end in
             ((0, 7), (7, 10), (0, 11))]  # fmt: skip
    packed, _ = logits_of(model, tokens, segment_ids=jnp.array([[1] * 7 + [2] * 3 + [0]]))
    np.testing.assert_allclose(packed[0, :7], alone[0][0, :7], atol=2e-5)
    np.testing.assert_allclose(packed[0, 7:10], alone[1][0, :3], atol=2e-5)
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]])
    at, padded = np.flatnonzero(mask[0]), np.full((1, 11), 5)
    padded[0, at] = tokens[0, : len(at)]
    found, _ = logits_of(model, jnp.asarray(padded, jnp.int32), attention_mask=jnp.asarray(mask),
                         positions=jnp.asarray(mask.cumsum(1) - 1, jnp.int32))  # fmt: skip
    np.testing.assert_allclose(found[0, at], alone[2][0, : len(at)], atol=2e-5)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_cache_gives_the_logits_of_whole_rows(scan, rng):
    """Prompts of 5 and of 1 token, padded on the left and in between; then 3 tokens at once, then one by one."""
    model = made(scan_layers=scan)
    rows = jnp.asarray(rng.integers(0, 24, (2, 10)), jnp.int32)
    whole, _ = logits_of(model, rows)
    prompts = jnp.stack([rows[0, :5], jnp.array([7, 7, 7, rows[1, 0], 7])])
    cache = model.init_cache(2, 12)
    assert cache.recurrent.states is None and cache.keys.shape[0] == 1
    out, cache = logits_of(model, prompts, attention_mask=jnp.array([[1] * 5, [0, 0, 0, 1, 0]]), cache=cache)
    np.testing.assert_allclose(out[0], whole[0, :5], atol=2e-5)
    np.testing.assert_allclose(out[1, 3], whole[1, 0], atol=2e-5)
    out, cache = logits_of(model, jnp.stack([rows[0, 5:8], rows[1, 1:4]]), cache=cache)
    np.testing.assert_allclose(out, jnp.stack([whole[0, 5:8], whole[1, 1:4]]), atol=2e-5)
    for i in range(2):
        out, cache = logits_of(model, jnp.stack([rows[:1, 8 + i], rows[1:, 4 + i]]), cache=cache)
        np.testing.assert_allclose(out[:, 0], jnp.stack([whole[0, 8 + i], whole[1, 4 + i]]), atol=2e-5)


@pytest.mark.parametrize("remat", first(1, ["full", "none", "dots"]))
def test_stacks_are_the_unrolled_layers(remat, rng):
    tokens = jnp.asarray(rng.integers(0, 24, (2, 9)), jnp.int32)

    def gradients(scan, remat):
        found = nnx.jit(nnx.grad(lambda model: model(tokens, labels=tokens).loss))(made(scan_layers=scan, remat=remat))
        by_name, infos = {}, describe(found)
        for path, gradient in nnx.to_flat_state(found):
            info, gradient = infos[path], gradient[...]
            by_name |= {piece.name: gradient[piece.index] for piece in info.pieces(gradient.shape)}
        return by_name

    expected = gradients(False, "full")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gradients(True, remat), expected)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_layer_keeps_what_the_planner_counts(remat):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, conv_bias=False)
    model = nnx.eval_shape(lambda: Lfm2ForCausalLM(config, remat=remat, scan_layers=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model.model.layers[0])
    layer = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x, None, None, None, None), policy=POLICIES[remat])
    x = jax.ShapeDtypeStruct((2, 210, config.hidden_size), jnp.float32)
    _, pull = jax.eval_shape(lambda state, x: jax.vjp(lambda *args: layer(*args)[0], state, x), state, x)
    weights = [leaf.shape for leaf in jax.tree.leaves(state)]
    kept = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(pull) if leaf.shape not in weights)
    device = target("h200").description
    [(counted, _)] = LayerMemory(config, KernelOptions(), remat, jnp.float32, rows=2, seq=210, device=device).each
    assert sum(counted.kept.values()) == kept


FEWER_LAYERS = [("dense", 1), *(pytest.param(kind, 3, marks=pytest.mark.full) for kind in ("dense", "nf4"))]


@pytest.mark.parametrize("kind, layers", FEWER_LAYERS)
def test_several_devices_have_the_loss_and_gradients_of_one(kind, layers, devices, rng):
    """Packed rows; in nf4 with adapters of all projections. One layer is a convolution."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers, full_attn_idxs=(1,) if layers > 1 else ())
    tokens = jnp.asarray(rng.integers(0, 24, (4, 9)), jnp.int32)
    ids = jnp.asarray(1 + np.cumsum(rng.random((4, 9)) < 0.2, 1), jnp.int32)
    batch, layout = dict(input_ids=tokens, labels=tokens, segment_ids=ids), Layout()

    def value_and_gradients(**options):
        if kind == "nf4":
            model = lora.add_lora(quantize(made(config, **options), kind, block_size=4), 2, alpha=3, rngs=nnx.Rngs(1))
            graph, trained, base = lora.trainable(model)
            trained = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), trained)
        else:
            graph, trained, base = nnx.split(made(config, **options), nnx.Param, ...)
        loss = lambda trained, base, batch: nnx.merge(graph, trained, base)(**batch).loss
        return jax.jit(jax.value_and_grad(loss)), trained, base

    single, *state = value_and_gradients()
    expected, of_one = single(*state, batch)
    mesh = jax.make_mesh((1, 2), ("data", "fsdp"), devices=devices[:2], axis_types=(AxisType.Auto,) * 2)
    shared, *_ = value_and_gradients(kernels=KernelOptions(layout=layout))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(part, layout.shardings(part, mesh)) for part in state]
        found, of_many = shared(*placed, layout.place(batch, mesh))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(of_many), jax.tree.leaves(of_one), strict=True):
        assert np.abs(np.asarray(x) - y).max() <= 1e-4 * max(np.abs(y).max(), 1e-3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_axes_that_would_split_channels_or_rows_are_refused(axis, devices):
    layout = Layout(batch=("fsdp",), **{axis: axis})
    mesh = jax.make_mesh((1, 2), ("fsdp", axis), devices=devices[:2], axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=f"{axis}='{axis}' has 2 devices, and Lfm2Config has .* convolutions, .* fsdp"):
        layout.shardings(made(), mesh)


def test_adapters_have_the_names_of_a_checkpoint(tmp_path):
    adapted = lora.add_lora(made(), 2, alpha=3, rngs=nnx.Rngs(1))
    expected = nnx.state(adapted, nnx.LoRAParam)
    lora.save_adapters(adapted, tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(lora.load_adapters(made(), tmp_path), nnx.LoRAParam), expected
    )
    names = {name.partition(".lora_")[0] for info in describe(expected).values() for name in info.tensor_names}
    own = [f"feed_forward.w{n}" for n in (1, 2, 3)]
    of_layers = (
        [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "out_proj")],
        ["conv.in_proj", "conv.out_proj"],
    )
    assert names == {f"model.layers.{i}.{n}" for i in range(3) for n in (*own, *of_layers[i != 1])}
