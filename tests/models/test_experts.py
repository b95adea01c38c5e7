"""Families of experts: their layers beside every expert on every token, their files, their losses, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from liger_jax import models, ops
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.experts import EXPERTS, ExpertsFeedForward, router_loss
from liger_jax.models.core.parallel.layout import Layout
from liger_jax.models.core.parameters import describe
from liger_jax.models.hugging_face import mxfp4
from liger_jax.models.lora import EXPERT_PARAMETERS, add_lora, trainable
from liger_jax.models.quantized import quantize
from tests.ops._oracle import TOLERANCE, largest_error

SIZES = dict(
    vocab_size=28, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.3, num_experts_per_tok=2,
)  # fmt: skip
CONFIGS = {
    "mixtral": models.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4),
    "qwen3_moe": models.Qwen3MoeConfig(
        **SIZES, intermediate_size=24, num_experts=5, moe_intermediate_size=12, mlp_only_layers=(0,), head_dim=8
    ),
    "olmoe": models.OlmoeConfig(**SIZES, intermediate_size=12, num_experts=4),
    "gpt_oss": models.GptOssConfig(**SIZES, intermediate_size=12, num_local_experts=4, head_dim=8, sliding_window=5),
}
CLASSES = {
    "mixtral": models.MixtralForCausalLM,
    "qwen3_moe": models.Qwen3MoeForCausalLM,
    "olmoe": models.OlmoeForCausalLM,
    "gpt_oss": models.GptOssForCausalLM,
}
each_family = pytest.mark.parametrize("family", CONFIGS)


def make(family, config=None, seed=0, **options):
    options = dict(scan_layers=False) | options if family == "qwen3_moe" else options  # its first layer is dense
    return CLASSES[family](config or CONFIGS[family], rngs=nnx.Rngs(seed), **options)


def every_expert(x, layer, config):
    """Σ_j weight_j · expert_j(x) as the formula stands, each expert on every token, in float64."""
    experts = config.experts
    wide = lambda array: np.asarray(array, np.float64)
    router = getattr(layer, experts.router)
    logits = x @ wide(router.router_kernel[...]) + (0 if router.bias is None else wide(router.bias[...]))
    softmax = lambda z: np.exp(z - z.max(-1, keepdims=True)) / np.exp(z - z.max(-1, keepdims=True)).sum(-1)[..., None]
    chosen = np.argsort(-logits, axis=-1)[..., : experts.per_token]
    if experts.softmax_of_chosen:
        weights = softmax(np.take_along_axis(logits, chosen, -1))
    else:
        weights = np.take_along_axis(softmax(logits), chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True) if experts.normalized else weights
    gate_up, down, gate_up_bias, down_bias = (
        None if array is None else wide(array) for array in layer.experts.arrays(jnp.float32)
    )
    out = np.zeros_like(x)
    for e in range(experts.count):
        gate, up = np.split(x @ gate_up[e] + (0 if gate_up_bias is None else gate_up_bias[e]), 2, axis=-1)
        if experts.activation == "clamped_swiglu":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            inner = gate / (1 + np.exp(-1.702 * gate)) * up
        else:
            inner = gate / (1 + np.exp(-gate)) * up
        y = inner @ down[e] + (0 if down_bias is None else down_bias[e])
        out += (weights * (chosen == e)).sum(-1, keepdims=True) * y
    return out, logits, chosen


@each_family
def test_a_layer_is_the_sum_of_its_experts_and_counts_what_is_no_padding(family, rng):
    config = CONFIGS[family]
    blocks = Blocks(config, models.KernelOptions(), jnp.float32, jnp.float32, nnx.Rngs(0), feed_forward=EXPERTS)
    layer = blocks.mlp()
    assert isinstance(layer, ExpertsFeedForward)
    x = 4 * rng.standard_normal((2, 7, 16))
    is_token = jnp.array([[1] * 7, [1] * 4 + [0] * 3]) == 1
    graph, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, is_token))
    with jax.default_matmul_precision("highest"):
        found, sums = run(state, jnp.asarray(x, jnp.float32))
    expected, logits, chosen = every_expert(np.asarray(x, np.float32).astype(np.float64), layer, config)
    assert largest_error(found, expected) <= TOLERANCE
    counts = np.asarray(is_token)
    assert sums.count == 11
    chosen = [np.sum((chosen == e) & counts[..., None]) for e in range(config.experts.count)]
    np.testing.assert_array_equal(sums.chosen, chosen)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(sums.probability, probability[counts].sum(0), rtol=1e-5)


def test_the_balancing_loss_is_that_of_all_layers_logits_in_one_row(rng):
    layers = [jnp.asarray(rng.standard_normal((2, 7, 4)), jnp.float32) for _ in range(3)]
    mask = jnp.array([[1] * 7, [1] * 4 + [0] * 3])
    sums_of = jax.jit(lambda z: ops.router_sums(z, ops.softmax_top_k(z, 2, normalized=True).experts, mask))
    of_layer = [sums_of(z) for z in layers]
    sums = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layer)
    config = dataclasses.replace(CONFIGS["mixtral"], output_router_logits=True, router_aux_loss_coef=0.5)
    logits = np.concatenate([np.asarray(z, np.float64)[np.asarray(mask) > 0] for z in layers])
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits, -1)[:, :2]
    times = np.array([(chosen == e).sum() for e in range(4)]) / len(logits)
    expected = 4 * np.sum(times * probability.mean(0))
    np.testing.assert_allclose(router_loss(config, sums), 0.5 * expected, rtol=1e-5)
    assert router_loss(dataclasses.replace(config, output_router_logits=False), sums) == 0
    z_loss = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    config = dataclasses.replace(config, router_z_loss_coef=0.1, output_router_logits=False)
    np.testing.assert_allclose(router_loss(config, sums), 0.1 * z_loss, rtol=1e-5)


NAMES = {
    "mixtral": {"block_sparse_moe.gate.weight": (4, 16), "block_sparse_moe.experts.3.w1.weight": (24, 16),
                "block_sparse_moe.experts.0.w2.weight": (16, 24), "block_sparse_moe.experts.1.w3.weight": (24, 16)},
    "qwen3_moe": {"mlp.gate.weight": (5, 16), "mlp.experts.4.gate_proj.weight": (12, 16),
                  "mlp.experts.0.down_proj.weight": (16, 12), "mlp.experts.1.up_proj.weight": (12, 16)},
    "olmoe": {"mlp.gate.weight": (4, 16), "mlp.experts.2.gate_proj.weight": (12, 16), "self_attn.k_norm.weight": (8,)},
    "gpt_oss": {"mlp.router.weight": (4, 16), "mlp.router.bias": (4,), "mlp.experts.gate_up_proj": (4, 16, 24),
                "mlp.experts.gate_up_proj_bias": (4, 24), "mlp.experts.down_proj": (4, 12, 16),
                "mlp.experts.down_proj_bias": (4, 16), "self_attn.sinks": (4,), "self_attn.o_proj.bias": (16,)},
}  # fmt: skip


def numbered(model):
    """The model with another number in each place of each parameter."""
    leaves, tree = jax.tree.flatten(nnx.state(model))
    ends = np.cumsum([0, *(leaf.size for leaf in leaves)])
    numbers = np.arange(ends[-1], dtype=np.float32)
    arrays = [jnp.asarray(numbers[ends[i] : ends[i + 1]].reshape(leaf.shape)) for i, leaf in enumerate(leaves)]
    nnx.update(model, jax.tree.unflatten(tree, arrays))
    return model


@each_family
def test_files_have_hugging_face_s_names_and_give_the_model_back(family, tmp_path):
    model = numbered(make(family))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: x.shape for name, x in tensors.items() if name.startswith("model.layers.1.")}
    assert NAMES[family].items() <= {name.removeprefix("model.layers.1."): x for name, x in own.items()}.items()
    weights = nnx.state(model)["model"]["layers"]
    layer = ... if family == "qwen3_moe" else 1  # in its stack
    weights = weights[1] if family == "qwen3_moe" else weights
    if family == "gpt_oss":
        gate_up = np.asarray(weights["mlp"]["experts"]["gate_up_proj"][...])[layer]
        stored = tensors["model.layers.1.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(stored[..., ::2], gate_up[..., :12])
        np.testing.assert_array_equal(stored[..., 1::2], gate_up[..., 12:])
    else:
        block, names = ("block_sparse_moe", "w1 w3") if family == "mixtral" else ("mlp", "gate_proj up_proj")
        gate_up = np.asarray(weights[block]["experts"]["gate_up"][...])[layer][2]
        parts = [tensors[f"model.layers.1.{block}.experts.2.{name}.weight"].T for name in names.split()]
        np.testing.assert_array_equal(np.concatenate(parts, 1), gate_up)
    for scan in (False, True)[: 1 if family == "qwen3_moe" else 2]:
        again = models.AutoModelForCausalLM.from_pretrained(tmp_path, scan_layers=scan)
        assert type(again) is CLASSES[family] and again.config == model.config
        again.save_pretrained(tmp_path / str(scan))
        found = load_file(tmp_path / str(scan) / "model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(np.array_equal(found[name], x) for name, x in tensors.items())


@each_family
def test_devices_read_their_parts_of_experts(family, tmp_path, devices):
    model = numbered(make(family))
    model.save_pretrained(tmp_path)
    mesh = jax.sharding.Mesh(np.array(devices[:2]).reshape(1, 2), ("data", "fsdp"))
    kernels = models.KernelOptions(layout=Layout())
    again = models.AutoModelForCausalLM.from_pretrained(
        tmp_path, mesh=mesh, kernels=kernels, scan_layers=family != "qwen3_moe"
    )
    infos = describe(model)
    for path, variable in nnx.to_flat_state(nnx.state(again)):
        if infos[path].kind == "experts":  # two devices do not divide five experts, and divide their inputs
            split = infos[path].in_axis if family == "qwen3_moe" else infos[path].expert_axis
            assert variable[...].sharding.spec[split] == "fsdp"
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_mxfp4_is_read_as_the_numbers_that_it_means(tmp_path, rng):
    blocks = rng.integers(0, 256, (3, 6, 2, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (3, 6, 2), dtype=np.uint8)
    save_file({"a.gate_up_proj_blocks": blocks, "a.gate_up_proj_scales": scales}, tmp_path / "x.safetensors")
    book = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        views = mxfp4.with_dense_views({name: file.get_slice(name) for name in file.keys()})
        (tensor,) = views.values()
        assert [*views] == ["a.gate_up_proj"] and tensor.get_shape() == [3, 64, 6]
        whole, part = tensor[:, :, :], tensor[1:3, 5:40, 2:4]
    for e, row, place in ((0, 0, 0), (2, 5, 63), (1, 3, 33), (1, 4, 30)):
        byte = int(blocks[e, row, place // 32, place % 32 // 2])
        code = byte >> 4 if place % 2 else byte & 15
        value = (-1 if code > 7 else 1) * book[code % 8] * 2.0 ** (int(scales[e, row, place // 32]) - 127)
        assert float(whole[e, place, row]) == value
    np.testing.assert_array_equal(part, whole[1:3, 5:40, 2:4])
    with pytest.raises(ValueError, match="and must have"):
        mxfp4.Mxfp4Tensor("w", tensor.scales, tensor.blocks)


def test_what_cannot_be_done_with_experts_is_refused():
    with pytest.raises(ValueError, match=r"no projection is called \['w1'\]. The model has"):
        add_lora(make("mixtral"), 2, alpha=4, targets=("q_proj", "w1"), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="num_experts_per_tok=2 must be at most num_local_experts=1"):
        dataclasses.replace(CONFIGS["mixtral"], num_local_experts=1)
    with pytest.raises(ValueError, match=r"mlp_only_layers=\(0, 1\) must leave experts to a layer"):
        dataclasses.replace(CONFIGS["qwen3_moe"], mlp_only_layers=(0, 1))
    with pytest.raises(ValueError, match="only some layers have experts. Pass scan_layers=False"):
        make("qwen3_moe", scan_layers=True)


def test_adapters_go_to_attention():
    model = nnx.eval_shape(lambda: add_lora(make("qwen3_moe"), 2, alpha=4, rngs=nnx.Rngs(1)))
    adapted = {path[-2] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    dense = {"gate_proj", "up_proj", "down_proj"}  # of the layer without experts
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"} | dense


@pytest.mark.full
@each_family
def test_scanned_unrolled_and_rematerialised_layers_of_experts_have_the_same_loss_and_gradients(family, rng):
    tokens = jnp.asarray(rng.integers(0, 28, (2, 12)), jnp.int32)
    ids = jnp.asarray(1 + np.cumsum(rng.random((2, 12)) < 0.2, 1), jnp.int32)
    config = dataclasses.replace(CONFIGS[family], output_router_logits=True, router_z_loss_coef=0.01)
    results = []
    for options in ({}, dict(scan_layers=False), dict(remat="full"), dict(remat="dots", scan_layers=False)):
        graph, state = nnx.split(make(family, config, **options))
        loss = lambda state, graph=graph: nnx.merge(graph, state)(tokens, labels=tokens, segment_ids=ids).loss
        value, gradients = jax.jit(jax.value_and_grad(loss))(state)
        infos, found = describe(gradients), {}
        for path, gradient in nnx.to_flat_state(gradients):
            for piece in infos[path].pieces(gradient.shape):
                found[piece.name] = np.asarray(gradient[...])[piece.index]
        results.append((value, found))
    for value, found in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-5)
        assert found.keys() == results[0][1].keys()
        for name, gradient in found.items():
            expected = results[0][1][name]
            np.testing.assert_allclose(gradient, expected, atol=1e-4 * max(np.abs(expected).max(), 1e-3), err_msg=name)


@pytest.mark.full
def test_micro_batches_average_their_balancing_losses_by_their_tokens(rng):
    config = dataclasses.replace(CONFIGS["olmoe"], output_router_logits=True, router_aux_loss_coef=10.0)
    model = make("olmoe", config)
    tokens = jnp.asarray(rng.integers(0, 28, (2, 12)), jnp.int32)
    labels = tokens.at[1, 5:].set(-100)
    run = nnx.jit(lambda model, ids, labels, n: model(ids, labels=labels, loss_normalizer=n, return_metrics=True))
    parts = [run(model, tokens[i : i + 1], labels[i : i + 1], 15.0) for i in range(2)]
    plain = [
        nnx.jit(lambda m, i, y: m(i, labels=y).loss)(make("olmoe"), tokens[i : i + 1], labels[i : i + 1])
        for i in (0, 1)
    ]
    shares = np.array([11, 4]) / 15
    balancing = [10.0 * part.experts.balancing_loss for part in parts]
    expected = np.sum(shares * (np.array(plain) + np.array(balancing)))
    np.testing.assert_allclose(sum(part.loss for part in parts), expected, rtol=1e-5)


MESHES = {
    "fsdp": ((2, 2), ("data", "fsdp"), Layout()),
    "expert": ((2,), ("expert",), Layout(batch=("expert",), fsdp="expert", expert="expert")),
    "fsdp and expert": ((1, 2, 2), ("data", "fsdp", "expert"), Layout(expert="expert")),
    "sequence": ((2, 2), ("fsdp", "sequence"), Layout(batch=("fsdp",), sequence="sequence")),
}


def test_explicit_axes_take_any_number_of_layers(devices, rng):
    """Sums over tokens and the experts' loads have an axis of layers, and none of the batch."""
    mesh, layout = jax.make_mesh((2,), ("fsdp",), devices=devices[:2]), Layout(batch=("fsdp",))
    config = dataclasses.replace(CONFIGS["olmoe"], num_hidden_layers=3)
    graph, state = nnx.split(make("olmoe", config, kernels=models.KernelOptions(layout=layout)))
    with jax.set_mesh(mesh):
        state = jax.device_put(state, layout.shardings(state, mesh))
        tokens = layout.place(jnp.asarray(rng.integers(0, 28, (4, 6)), jnp.int32))
        out = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, return_metrics=True))(state, tokens)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((out.aux, out.experts)))
    assert {x.sharding.spec[0] for x in (out.logits, out.metrics.max_logit)} == {"fsdp"}
    np.testing.assert_array_equal(out.aux[EXPERTS].chosen.sum(axis=1), [24 * 2] * 3)
    np.testing.assert_allclose(out.experts.load, out.aux[EXPERTS].chosen / 48, rtol=1e-6)


def test_a_scanned_mixture_on_explicit_axes_beside_manual_ones_is_refused(devices):
    mesh, layout = jax.make_mesh((1, 2), ("data", "fsdp"), devices=devices[:2]), Layout(batch=("fsdp",))
    model = make("olmoe", kernels=models.KernelOptions(layout=layout))
    tokens = jax.device_put(jnp.zeros((4, 6), jnp.int32), jax.sharding.NamedSharding(mesh, jax.P("fsdp")))
    call = lambda t: model(t, labels=t).loss[None]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="layers are scanned is called .*scan_layers=False"):
        jax.eval_shape(
            jax.shard_map(call, in_specs=jax.P("data"), out_specs=jax.P("data"), axis_names={"data"}), tokens
        )


@pytest.mark.full
@pytest.mark.parametrize("mesh_name", MESHES)
@each_family
def test_devices_with_parts_of_the_parameters_have_the_loss_and_gradients_of_one(family, mesh_name, devices, rng):
    shape, names, layout = MESHES[mesh_name]
    if family == "qwen3_moe" and "expert" in mesh_name:
        pytest.skip("no number of devices divides five experts")
    tokens = jnp.asarray(rng.integers(0, 28, (8, 12)), jnp.int32)
    config = dataclasses.replace(CONFIGS[family], output_router_logits=True, router_aux_loss_coef=0.5)

    def value_and_gradients(**options):
        graph, state = nnx.split(make(family, config, **options))
        loss = lambda state, batch: nnx.merge(graph, state)(**batch).loss
        return jax.jit(jax.value_and_grad(loss)), state

    batch = dict(input_ids=tokens, labels=tokens)
    single, state = value_and_gradients()
    expected, of_one = single(state, batch)
    number = int(np.prod(shape))
    mesh = jax.make_mesh(shape, names, devices=devices[:number], axis_types=(AxisType.Auto,) * len(shape))
    shared, _ = value_and_gradients(kernels=models.KernelOptions(layout=layout))
    with jax.set_mesh(mesh):
        found, of_many = shared(jax.device_put(state, layout.shardings(state, mesh)), layout.place(batch, mesh))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(of_many), jax.tree.leaves(of_one), strict=True):
        assert np.abs(np.asarray(x) - y).max() <= 3e-5 * max(np.abs(y).max(), 1e-3), jax.tree_util.keystr(path)


@pytest.mark.full
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_quantised_experts_with_adapters_on_several_devices_are_those_of_one(family, devices, rng):
    tokens = jnp.asarray(rng.integers(0, 28, (4, 12)), jnp.int32)
    layout = Layout(expert="expert")
    mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "expert"), devices=devices[:4], axis_types=(AxisType.Auto,) * 3)

    def value_and_gradients(**options):
        model = quantize(make(family, **options), "nf4", block_size=4)
        model = add_lora(model, 2, alpha=3, parameters=EXPERT_PARAMETERS, rngs=nnx.Rngs(1))
        graph, adapters, base = trainable(model)
        adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
        loss = lambda adapters, base, ids: nnx.merge(graph, adapters, base)(ids, labels=ids).loss
        return jax.jit(jax.value_and_grad(loss)), adapters, base

    single, adapters, base = value_and_gradients()
    expected, of_one = single(adapters, base, tokens)
    shared, adapters, base = value_and_gradients(kernels=models.KernelOptions(layout=layout))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(part, layout.shardings(part, mesh)) for part in (adapters, base)]
        found, of_many = shared(*placed, layout.place(tokens, mesh))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(of_many), jax.tree.leaves(of_one), strict=True):
        assert np.abs(np.asarray(x) - y).max() <= 3e-5 * max(np.abs(y).max(), 1e-3), jax.tree_util.keystr(path)


@pytest.mark.full
@each_family
def test_generation_with_a_cache_is_that_without_one(family, rng):
    model = make(family)
    tokens = jnp.asarray(rng.integers(0, 28, (2, 6)), jnp.int32)
    found = np.asarray(model.generate(tokens, max_new_tokens=5))
    row = tokens
    for _ in range(5):
        next_token = nnx.jit(lambda model, row: model(row, logits_to_keep=1).logits)(model, row)[:, -1].argmax(-1)
        row = jnp.concatenate([row, next_token[:, None].astype(row.dtype)], axis=1)
    np.testing.assert_array_equal(found[:, -5:], row[:, 6:])
