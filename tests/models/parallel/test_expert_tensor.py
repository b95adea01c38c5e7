"""Experts whose matrices a mesh axis splits compute what one device computes, alone and beside other axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from liger_jax import models
from liger_jax.models.core.parallel.layout import Layout
from liger_jax.models.lora import EXPERT_PARAMETERS, add_lora, trainable
from liger_jax.models.quantized import quantize
from liger_jax.training import make_step, optimizer_named
from tests.models.test_experts import CONFIGS, make

NAMES = ("fsdp", "expert", "sequence", "tensor")
LAYOUT = Layout(batch=("fsdp",), expert="expert", sequence="sequence", tensor="tensor")


def batch_of(rng, length, segments=True):
    tokens = jnp.asarray(rng.integers(0, 28, (4, length)), jnp.int32)
    batch = dict(input_ids=tokens, labels=jnp.where(jnp.asarray(rng.random(tokens.shape)) < 0.3, -100, tokens))
    if segments:
        batch["segment_ids"] = jnp.asarray(1 + np.cumsum(rng.random(tokens.shape) < 0.2, 1), jnp.int32)
    return batch


def assert_like_one_device(
    family, sizes, devices, rng, batch, *, prepare=lambda m: m, split=None, kind="Auto", fields=(), **options
):
    """Loss, what routers did, and every gradient on a mesh of these sizes, which must be those of one device."""
    config = dataclasses.replace(
        CONFIGS[family],
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        router_z_loss_coef=0.01,
        **dict(fields),
    )
    split = split or (lambda model: (*nnx.split(model), nnx.State({})))

    def value_and_gradients(layout):
        kernels = models.KernelOptions(layout=layout)
        graph, state, rest = split(prepare(make(family, config, kernels=kernels, **options)))

        def loss(state, rest, batch):
            out = nnx.merge(graph, state, rest)(**batch, return_metrics=True)
            return out.loss, (out.experts.load, out.experts.balancing_loss, out.experts.z_loss)

        return jax.jit(jax.value_and_grad(loss, has_aux=True)), state, rest

    single, state, rest = value_and_gradients(None)
    noisy = lambda x: np.asarray(x) + (0.1 * rng.standard_normal(x.shape)).astype(x.dtype)
    state = jax.tree.map(lambda x: jnp.asarray(noisy(x)), state)
    expected = single(state, rest, batch)
    axis_types = (getattr(AxisType, kind),) * len(NAMES)
    mesh = jax.make_mesh(sizes, NAMES, devices=devices[: int(np.prod(sizes))], axis_types=axis_types)
    shared, *_ = value_and_gradients(LAYOUT)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(part, LAYOUT.shardings(part, mesh)) for part in (state, rest)]
        found = shared(*placed, LAYOUT.place(batch, mesh))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-3)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)


def test_one_layer_with_biases_is_that_of_one_device(devices, rng):
    """An odd length is padded, and padding does not count."""
    one_layer = dict(num_hidden_layers=1, layer_types=None)
    assert_like_one_device("gpt_oss", (1, 1, 1, 2), devices, rng, batch_of(rng, 11), fields=one_layer)


@pytest.mark.full
@pytest.mark.parametrize(
    "family, sizes, length",
    [
        *((family, (1, 1, 1, 2), 11) for family in CONFIGS),
        *((family, (1, 2, 1, 2), 11) for family in CONFIGS if family != "qwen3_moe"),  # which has five experts
        *((family, (2, 1, 1, 2), 12) for family in CONFIGS),
        ("olmoe", (1, 1, 1, 4), 12),
        ("gpt_oss", (1, 1, 1, 4), 13),
        ("mixtral", (2, 1, 1, 1), 12),
        ("mixtral", (1, 1, 2, 2), 12),
        ("gpt_oss", (1, 1, 2, 2), 12),
    ],
)
def test_loss_routing_and_every_gradient_are_those_of_one_device(family, sizes, length, devices, rng):
    assert_like_one_device(family, sizes, devices, rng, batch_of(rng, length))


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_recomputed_layers_on_any_mesh_are_those_of_one_device(kind, remat, devices, rng):
    options = dict(kind=kind, remat=remat)
    assert_like_one_device("mixtral", (1, 2, 1, 2), devices, rng, batch_of(rng, 11, segments=False), **options)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 2, 1)])
def test_padding_is_not_counted_on_any_device(sizes, devices, rng):
    batch = batch_of(rng, 12, segments=False)
    batch["attention_mask"] = jnp.asarray(np.arange(12)[None] < np.array([[12], [7], [9], [3]]), jnp.int32)
    assert_like_one_device("olmoe", sizes, devices, rng, batch)


@pytest.mark.full
@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (1, 1, 2, 2)])
def test_positions_that_a_placed_row_is_filled_up_with_are_not_counted(sizes, segments, devices, rng):
    assert_like_one_device("olmoe", sizes, devices, rng, batch_of(rng, 11, segments))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2)])
@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_are_split_with_them_quantised_or_not(family, kind, sizes, devices, rng):
    def prepare(model):
        model = model if kind is None else quantize(model, kind, block_size=2)
        return add_lora(model, 2, alpha=3, parameters=EXPERT_PARAMETERS, rngs=nnx.Rngs(1))

    assert_like_one_device(family, sizes, devices, rng, batch_of(rng, 11), prepare=prepare, split=trainable)


# --- how parameters are sharded, and what is refused ------------------------------------------------------------------


def specs_of(sizes, family="gpt_oss", prepare=lambda model: model, **fields):
    config = dataclasses.replace(CONFIGS[family], **fields)
    found = LAYOUT.shardings(nnx.eval_shape(lambda: prepare(make(family, config))), AbstractMesh(sizes, NAMES))
    return {path[-1]: leaf.spec for path, leaf in nnx.to_flat_state(found) if "experts" in path or "router" in path}


def test_gate_and_up_lie_by_their_inputs_and_down_by_its_rows_and_fsdp_splits_experts():
    found = specs_of((2, 2, 1, 2))
    assert found["gate_up_proj"] == found["down_proj"] == P(None, ("expert", "fsdp", "sequence"), "tensor")
    few = specs_of((2, 2, 1, 2), num_local_experts=2)
    assert few["gate_up_proj"] == few["down_proj"] == P(None, "expert", ("tensor", "fsdp", "sequence"))
    assert found["gate_up_proj_bias"] == found["down_proj_bias"] == P(None, "expert")
    assert found["router_kernel"] == P(None, ("fsdp", "sequence", "expert"))
    adapted = lambda model: add_lora(model, 2, alpha=3, parameters=EXPERT_PARAMETERS, rngs=nnx.Rngs(1))
    found = specs_of((2, 2, 1, 2), prepare=adapted)
    assert found["down_proj_lora_a"] == P(None, ("expert", "fsdp", "sequence"), "tensor")
    assert found["down_proj_lora_b"] == found["gate_up_proj_lora_a"] == P(None, ("expert", "fsdp", "sequence"))


def test_what_the_axis_does_not_divide_is_named():
    with pytest.raises(ValueError, match="intermediate_size=13. The nearest number that divides num_attention_heads=4"):
        specs_of((1, 1, 1, 2), intermediate_size=13)
    with pytest.raises(ValueError, match="moe_intermediate_size=11. The nearest .* intermediate_size=24 and moe"):
        specs_of((1, 1, 1, 2), "qwen3_moe", moe_intermediate_size=11)
    with pytest.raises(ValueError, match=r"expert=2 does not divide axis 1 of .*experts.*\(2, 5, 12, 16\)"):
        specs_of((1, 2, 1, 2), num_local_experts=5)


@pytest.mark.full
def test_ten_steps_learn_what_one_device_learns(devices, rng):
    batch, optimizer = batch_of(rng, 11), optimizer_named("adamw", 1e-2, weight_decay=0.0, max_norm=0.5)
    start = nnx.state(make("mixtral"))

    def train(layout, state):
        graph = nnx.split(nnx.eval_shape(lambda: make("mixtral", kernels=models.KernelOptions(layout=layout))))[0]
        step, losses = jax.jit(make_step(graph, optimizer, micro_batches=1)), []
        for _ in range(10):
            state, loss = step(state, batch if layout is None else layout.place(batch))
            losses.append(float(loss))
        return losses

    expected = train(None, (start, optimizer.init(start)))
    mesh = jax.make_mesh((1, 2, 1, 2), NAMES, devices=devices[:4], axis_types=(AxisType.Auto,) * 4)
    with jax.set_mesh(mesh):
        state = start, optimizer.init(start)
        found = train(LAYOUT, jax.device_put(state, LAYOUT.shardings(state, mesh, optimizer)))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.3
