"""Experts whose matrices a mesh axis splits compute what one device computes, alone and beside other axes."""

import dataclasses
import functools
import os
import zlib

import jax
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
from tests.ops._oracle import every_second

NAMES = ("fsdp", "expert", "sequence", "tensor")
LAYOUT = Layout(batch=("fsdp",), expert="expert", sequence="sequence", tensor="tensor")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A family with these fields of its config, as pairs, and a batch; `adapters` are on weights of this kind."""

    family: str
    length: int
    segments: bool = True
    is_padded: bool = False
    fields: tuple = ()
    adapters: str | None = None

    def batch(self, rng):
        tokens = rng.integers(0, 28, (4, self.length)).astype(np.int32)
        batch = dict(input_ids=tokens, labels=np.where(rng.random(tokens.shape) < 0.3, -100, tokens).astype(np.int32))
        if self.segments:
            batch["segment_ids"] = (1 + np.cumsum(rng.random(tokens.shape) < 0.2, 1)).astype(np.int32)
        if self.is_padded:
            lengths = np.array([[12], [7], [9], [3]])
            batch["attention_mask"] = (np.arange(self.length)[None] < lengths).astype(np.int32)
        return batch

    def model(self, **options):
        losses = dict(output_router_logits=True, router_aux_loss_coef=0.5, router_z_loss_coef=0.01)
        model = make(self.family, dataclasses.replace(CONFIGS[self.family], **losses, **dict(self.fields)), **options)
        if self.adapters is None:
            return model
        model = model if self.adapters == "dense" else quantize(model, self.adapters, block_size=2)
        return add_lora(model, 2, alpha=3, parameters=EXPERT_PARAMETERS, rngs=nnx.Rngs(1))

    def split(self, model):
        return (*nnx.split(model), nnx.State({})) if self.adapters is None else trainable(model)

    def value_and_gradients(self, **options):
        """The function of what is trained, the rest and a batch, and the types of the first two."""
        graph, state, rest = self.split(nnx.eval_shape(lambda: self.model(**options)))

        def loss(state, rest, batch):
            out = nnx.merge(graph, state, rest)(**batch, return_metrics=True)
            return out.loss, (out.experts.load, out.experts.balancing_loss, out.experts.z_loss)

        return jax.jit(jax.value_and_grad(loss, has_aux=True)), state, rest


@functools.cache
def on_one_device(problem):
    """What is trained, the rest, a batch, and the result, which every mesh is compared with."""
    rng = np.random.default_rng([int(os.environ["TEST_SEED"]), zlib.crc32(repr(problem).encode())])
    single, *_ = problem.value_and_gradients()
    state, rest = jax.jit(lambda: problem.split(problem.model())[1:])()
    state = jax.tree.map(lambda x: np.asarray(x) + (0.1 * rng.standard_normal(x.shape)).astype(x.dtype), state)
    batch = problem.batch(rng)
    return state, rest, batch, jax.tree.map(lambda x: np.asarray(x, np.float64), single(state, rest, batch))


def assert_like_one_device(problem, sizes, devices, *, axis_type=AxisType.Auto, **options):
    """Loss, what routers did, and every gradient on a mesh of these sizes, which must be those of one device."""
    state, rest, batch, expected = on_one_device(problem)
    mesh = jax.make_mesh(sizes, NAMES, (axis_type,) * len(NAMES), devices=devices[: int(np.prod(sizes))])
    shared, *_ = problem.value_and_gradients(kernels=models.KernelOptions(layout=LAYOUT), **options)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(part, LAYOUT.shardings(part, mesh)) for part in (state, rest)]
        found = shared(*placed, LAYOUT.place(batch, mesh))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-3)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)


def test_one_layer_with_biases_is_that_of_one_device(devices):
    """An odd length is padded, and padding does not count."""
    one_layer = ("num_hidden_layers", 1), ("layer_types", None)
    assert_like_one_device(Problem("gpt_oss", 11, fields=one_layer), (1, 1, 1, 2), devices)


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
def test_loss_routing_and_every_gradient_are_those_of_one_device(family, sizes, length, devices):
    assert_like_one_device(Problem(family, length), sizes, devices)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "dots", 1])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_recomputed_layers_on_any_mesh_are_those_of_one_device(axis_type, remat, devices):
    problem = Problem("mixtral", 11, segments=False)
    assert_like_one_device(problem, (1, 2, 1, 2), devices, axis_type=axis_type, remat=remat)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 2, 1)])
def test_padding_is_not_counted_on_any_device(sizes, devices):
    assert_like_one_device(Problem("olmoe", 12, segments=False, is_padded=True), sizes, devices)


@pytest.mark.full
@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (1, 1, 2, 2)])
def test_positions_that_a_placed_row_is_filled_up_with_are_not_counted(sizes, segments, devices):
    assert_like_one_device(Problem("olmoe", 11, segments), sizes, devices)


@pytest.mark.full
@pytest.mark.parametrize(
    "family, weights, sizes",
    every_second(("mixtral", "gpt_oss"), ("dense", "nf4", "int8"), ((1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2))),
)
def test_adapters_of_experts_are_split_with_them_quantised_or_not(family, weights, sizes, devices):
    assert_like_one_device(Problem(family, 11, adapters=weights), sizes, devices)


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
    batch, optimizer = Problem("mixtral", 11).batch(rng), optimizer_named("adamw", 1e-2, weight_decay=0.0, max_norm=0.5)
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
