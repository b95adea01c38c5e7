"""A model whose rows a mesh axis splits computes what one device computes of whole rows."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM
from liger_jax.models.lora import add_lora
from liger_jax.models.quantized import quantize
from liger_jax.ops import layout
from liger_jax.ops.layout import from_chunks
from liger_jax.training import make_step
from tests.models.parallel.test_tensor_parallel import AXIS_TYPES, FAMILIES, ODD, ROOT, SIZES, batch_of, filled
from tests.ops._oracle import sent

AXES = ("fsdp", "tensor", "sequence")
LAYOUT = Layout(batch=("fsdp",), tensor="tensor", sequence="sequence")
NAMES = "input_ids", "labels", "loss_weights", "segment_ids"


def case(family="llama", shape=(2, 1, 2), axis_type=AxisType.Auto, *, length=13, config=(), prepare=lambda m: m,
         **options):  # fmt: skip
    """A model and a mesh of (fsdp, tensor, sequence) devices; 13 positions are padded to 16."""
    return dict(family=family, shape=shape, axis_type=axis_type, length=length, config=dict(config), prepare=prepare,
                options=options)  # fmt: skip


def full(name, *args, **options):
    return pytest.param(case(*args, **options), id=name, marks=pytest.mark.full)


def mesh_of(devices, shape, axis_type=AxisType.Auto):
    """A mesh of these sizes; of two devices, along its last axis alone."""
    shape = shape if math.prod(shape) <= len(devices) else (1, 1, len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(axis_type,) * 3, devices=devices[: math.prod(shape)])


def loss_of(model, batch):
    out = model(**batch, return_metrics=True)
    return out.loss, out.metrics


def in_order(found, batch, mesh):
    """Results of which those for each position are in their rows' order, without padding."""
    rows, length = batch["input_ids"].shape

    def of_leaf(x):
        of_positions = x.ndim > 1 and len(x) == rows and x.shape[1] >= length
        return from_chunks(jnp.asarray(np.asarray(x)), 1, mesh.shape["sequence"])[:, :length] if of_positions else x

    return jax.tree.map(of_leaf, found)


def assert_like_one_device(case, devices, rng, call=loss_of, trained=nnx.Param):
    """Loss, aux and gradients on the mesh and on one device, which must agree; returns the program's text."""
    family, config_class, fields = FAMILIES[case["family"]]
    config = config_class(**SIZES | fields | case["config"])

    def value_and_grad(layout):
        options = case["options"] | dict(kernels=KernelOptions(layout=layout, **case["options"].get("kernels", {})))
        make = lambda: case["prepare"](family(config, rngs=nnx.Rngs(0), **options))
        graph, params, frozen = nnx.split(nnx.eval_shape(make), trained, ...)
        run = lambda params, frozen, batch: call(nnx.merge(graph, params, frozen), batch)
        return jax.value_and_grad(run, has_aux=True), params, frozen

    single, params, frozen = value_and_grad(None)
    params, frozen = filled(params, rng), filled(frozen, rng)
    batch = dict(zip(NAMES, batch_of(rng, case["length"], config.vocab_size), strict=True))
    expected = jax.jit(single)(params, frozen, batch)
    mesh = mesh_of(devices, case["shape"], case["axis_type"])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, LAYOUT.shardings(x, mesh)) for x in (params, frozen)]
        on_mesh = LAYOUT.place(batch)
        compiled = jax.jit(value_and_grad(LAYOUT)[0]).lower(*placed, on_mesh).compile()
        (loss, aux), grads = compiled(*placed, on_mesh)
    found = (loss, in_order(aux, batch, mesh)), grads
    for (path, x), truth in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(x, np.float64) - truth)) / max(np.max(np.abs(truth)), 1e-30)
        bound = 1e-5 if case["family"] == "llama" and trained is nnx.Param else 2e-5
        assert error < bound, (jax.tree_util.keystr(path), error)
    return compiled.as_text()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case("llama", (1, 2, 2), AxisType.Explicit, config=ODD), id="llama-tensor-explicit-odd"),
        *(full(f"llama-alone-{kind}", "llama", (1, 1, 4), kind, length=16) for kind in AXIS_TYPES),
        *(full(f"llama-fsdp-{kind}", "llama", (2, 1, 2), kind) for kind in AXIS_TYPES),
        full("llama-tensor-auto", "llama", (1, 2, 2), config=dict(attention_bias=True, mlp_bias=True)),
        full("llama-sequence-of-one", "llama", (2, 2, 1)),
        full("llama-unrolled", "llama", scan_layers=False),
        full("llama-logits", "llama", kernels=dict(fused_linear_cross_entropy=False)),
        full("llama-cross-entropy", "llama", (1, 2, 2), config=ODD,
             kernels=dict(fused_linear_cross_entropy=False, cross_entropy=True)),
        full("llama-triton", "llama", kernels=dict(implementation="triton:interpret", attention="xla")),
        *(full(f"llama-{remat}", "llama", (2, 1, 2), kind, remat=remat)
          for remat in ("full", "dots", "offload", "offload_attention") for kind in AXIS_TYPES),
        *(full(f"llama-tensor-{remat}", "llama", (1, 2, 2), remat=remat)
          for remat in ("full", "dots", "offload", "offload_attention")),
        *(full(family, family) for family in FAMILIES if family != "llama"),
    ],
)  # fmt: skip
def test_loss_metrics_and_gradients_are_those_of_one_device(case, devices, rng):
    if len(devices) < 4 and case["config"].get("vocab_size", 2) % 2:
        pytest.skip("two devices do not divide this vocabulary, along which they split the head")
    text = assert_like_one_device(case, devices, rng)
    if "kernels" not in case["options"] and devices[0].platform == "cpu":
        vocabulary = case["config"].get("vocab_size", SIZES["vocab_size"])
        logits = 4 * 16 * vocabulary // len(devices)
        assert max(size for _, size in sent(text)) < max(logits, 8 * vocabulary + 1), "logits are sent"
        assert {kind for kind, _ in sent(text)} <= {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_in_many_chunks_have_the_loss_and_gradients_of_one_device(tensor, devices, rng, monkeypatch):
    monkeypatch.setattr(layout, "LEAST_CHUNK", 1)
    assert layout.pairs_of_chunks(16, 2) == 2
    assert_like_one_device(case("llama", (1, tensor, 2)), devices, rng)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
def test_adapters_and_quantised_weights_are_those_of_one_device(kind, shape, devices, rng):
    def prepare(model):
        model = model if kind is None else quantize(model, kind, block_size=2, head=True)
        return add_lora(model, rank=2, alpha=4, rngs=nnx.Rngs(1))

    sizes = dict(intermediate_size=16, num_key_value_heads=1, head_dim=4)
    adapted = case("llama", shape, config=sizes, prepare=prepare)
    assert_like_one_device(adapted, devices, rng, trained=nnx.LoRAParam)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_log_probs_token_losses_and_logits_are_those_of_one_device(shape, devices, rng):
    def arguments(batch):
        return {name: x for name, x in batch.items() if name != "loss_weights"}, batch["loss_weights"]

    def log_probs(model, batch):
        arrays, weights = arguments(batch)
        found = model.log_probs(**arrays, entropy=True, temperature=0.7)
        return jnp.sum(weights * (found.log_probs + 0.1 * found.entropy)), found

    def token_loss(model, batch):
        arrays, weights = arguments(batch)
        pulled = lambda log_prob, entropy, weight: -weight * jnp.exp(log_prob) - 0.1 * entropy
        return model.token_loss(pulled, **arrays, per_token=(weights,), denominator=3.0, entropy=True)

    def logits(model, batch):
        out = model(**batch, return_logits=True)
        counts = (batch["loss_weights"] != 0)[..., None]  # not padding
        return out.loss + jnp.sum(out.logits**2, where=counts) / 100, out.logits

    for call in (log_probs, token_loss, logits):
        odd = ODD if shape[1] > 1 else {}  # fsdp alone splits a vocabulary that it divides
        assert_like_one_device(case("llama", shape, config=odd), devices, rng, call)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "families", [["llama"], [name for name in FAMILIES if name != "llama"]], ids=["llama", "others"]
)
def test_all_three_axes_agree_on_eight_devices(families, kind):
    """In its own process, since JAX makes its simulated devices once."""
    flags = re.sub(r"(host_platform_device_count)=\d+", r"\1=8", os.environ["XLA_FLAGS"])
    program = f"""
import jax, numpy
from tests.models.parallel.test_sequence_parallel import ODD, AxisType, assert_like_one_device, case
jax.config.update("jax_default_matmul_precision", "highest")
rng = numpy.random.default_rng({os.environ["TEST_SEED"]})
for family in {families}:
    split = case(family, (2, 2, 2), AxisType.{kind}, length=11, config=ODD if family == "llama" else {{}})
    assert_like_one_device(split, jax.devices("cpu"), rng)
"""
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True, timeout=900)


@pytest.mark.full
@pytest.mark.parametrize("shape, axis_type", [((2, 1, 2), AxisType.Auto), ((1, 2, 2), AxisType.Explicit)], ids=str)
def test_twenty_steps_learn_what_one_device_learns(shape, axis_type, devices, rng):
    """In micro-batches, with clipping and momentum; parameters and their moments stay where the layout puts them."""
    config, optimizer = LlamaConfig(**SIZES), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    tokens, labels, _, segments = batch_of(rng, 13, config.vocab_size)
    batch = dict(input_ids=jnp.tile(tokens, (2, 1)), labels=jnp.tile(labels, (2, 1)),
                 segment_ids=jnp.tile(segments, (2, 1)))  # fmt: skip
    start = filled(nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0))))[1], rng)

    def train(layout, state, batch):
        make = lambda: LlamaForCausalLM(config, kernels=KernelOptions(layout=layout), remat="full", rngs=nnx.Rngs(0))
        step, losses = jax.jit(make_step(nnx.split(nnx.eval_shape(make))[0], optimizer, micro_batches=2)), []
        for _ in range(20):
            state, loss = step(state, batch)
            losses.append(float(loss))
        return state, losses

    _, expected = train(None, (start, optimizer.init(start)), batch)
    mesh = mesh_of(devices, shape, axis_type)
    with jax.set_mesh(mesh):
        state = (start, optimizer.init(start))
        lie = LAYOUT.shardings(state, mesh, optimizer)
        state, found = train(LAYOUT, jax.device_put(state, lie), LAYOUT.place(batch))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.5
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, lie)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# --- how batches and parameters are sharded ---------------------------------------------------------------------------


def test_a_batch_is_shifted_padded_and_put_in_the_order_of_chunks(devices):
    mesh = mesh_of(devices, (1, 1, 2))
    tokens = jnp.arange(10, 22).reshape(2, 6)
    batch = dict(input_ids=tokens, labels=tokens, segment_ids=jnp.array([[1, 1, 1, 2, 2, 2]] * 2), scale=3.0,
                 loss_weights=jnp.ones((2, 6)), of_rows=jnp.ones(2))  # fmt: skip
    with jax.set_mesh(mesh):
        placed = LAYOUT.place(batch)
        again = LAYOUT.place(placed)
    # Chunks of two, 0 and 3 on the first device, 1 and 2 on the second; the last two positions are padding.
    assert placed["input_ids"][0].tolist() == [10, 11, 15, 15, 12, 13, 14, 15]
    assert placed["shift_labels"][0].tolist() == [11, 12, -100, -100, -100, 14, 15, -100]
    assert placed["positions"].tolist() == [[0, 1, 5, 5, 2, 3, 4, 5]]
    assert placed["segment_ids"][0].tolist() == [1, 1, 0, 0, 1, 2, 2, 2]  # a router counts no padding
    assert placed["loss_weights"][0].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert set(placed) == {*batch, "shift_labels", "positions"} - {"labels"}
    assert placed["input_ids"].addressable_shards[1].data.tolist() == [[12, 13, 14, 15], [18, 19, 20, 21]]
    assert [x.sharding.spec for x in (placed["positions"], placed["of_rows"])] == [P(None, "sequence"), P("fsdp")]
    for name, x in placed.items():
        np.testing.assert_array_equal(x, again[name])


def test_tokens_alone_are_their_own_labels_and_padding_fits_a_tensor_axis(devices):
    if len(devices) < 4:
        pytest.skip("a mesh of two axes")
    placed = LAYOUT.place(jnp.arange(10).reshape(2, 5), mesh_of(devices, (1, 2, 2)))
    assert {name: x.shape for name, x in placed.items()} == dict(
        input_ids=(2, 8), shift_labels=(2, 8), positions=(1, 8), token_mask=(2, 8)
    )
    assert placed["token_mask"][0].tolist() == [
        1,
        1,
        0,
        0,
        1,
        1,
        1,
        0,
    ]  # chunks 0, 3, 1, 2
    assert "token_mask" not in LAYOUT.place(jnp.arange(16).reshape(2, 8), mesh_of(devices, (1, 2, 2)))


def test_what_cannot_be_split_into_rows_is_refused(devices):
    mesh, tokens = mesh_of(devices, (1, 1, 2)), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"the batch has no input_ids but \['chosen', 'rejected'\]"):
        LAYOUT.place(dict(chosen=dict(input_ids=tokens), rejected=dict(input_ids=tokens)), mesh)
    with pytest.raises(ValueError, match="labels and shift_labels exclude each other"):
        LAYOUT.place(dict(input_ids=tokens, labels=tokens, shift_labels=tokens), mesh)


def test_parameters_are_split_over_the_sequence_axis_too():
    mesh, params = AbstractMesh((2, 1, 2), AXES), {"up_proj": {"kernel": jnp.zeros((8, 4))}}
    spec_of = lambda layout, mesh=mesh: layout.shardings(params, mesh)["up_proj"]["kernel"].spec
    assert spec_of(LAYOUT) == P(("fsdp", "sequence"))
    assert spec_of(Layout(batch=("fsdp",), fsdp=("fsdp",), tensor="tensor", sequence="sequence")) == P("fsdp")
    assert spec_of(LAYOUT, AbstractMesh((2, 2, 2), AXES)) == P(("fsdp", "sequence"), "tensor")
    alone = Layout(batch=(), fsdp="sequence", sequence="sequence")
    assert spec_of(alone, AbstractMesh((4,), ("sequence",))) == P("sequence")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda model, x: model(x, labels=x, positions=x), "labels are given on a mesh with 2 devices along sequence="),
        (lambda model, x: model(x), "positions is not given on a mesh with 2 devices .*layout.place"),
        (lambda model, x: model(x[:, :6], positions=x[:, :6]), r"input_ids has 6 positions .* a row of 4·n positions"),
        (lambda model, x: model(x, positions=x, cache=model.init_cache(2, 8)), "cache is given on a mesh with 2 dev"),
        (lambda model, x: model(x, positions=x, logits_to_keep=3), "logits_to_keep is given on a mesh with 2 devices"),
        (lambda model, x: model.log_probs(x, labels=x, positions=x), "labels are given on a mesh with 2 devices"),
        (lambda model, x: model.generate(x, max_new_tokens=2), "cache is given on a mesh with 2 devices along seq"),
    ],
)
def test_calls_that_need_rows_in_their_own_order_are_refused(call, match, devices):
    with jax.set_mesh(mesh_of(devices, (1, 1, 2))), pytest.raises(ValueError, match=match):
        make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES), kernels=KernelOptions(layout=LAYOUT), rngs=nnx.Rngs(0))
        jax.eval_shape(lambda x: call(make(), x), jax.ShapeDtypeStruct((2, 8), jnp.int32))


def test_cudnn_does_not_run_on_a_part_of_a_row(devices):
    kernels = KernelOptions(layout=LAYOUT, attention="cudnn")
    with jax.set_mesh(mesh_of(devices, (1, 1, 2))), pytest.raises(ValueError, match="causal_attention.*cudnn"):
        make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES), kernels=kernels, rngs=nnx.Rngs(0))
        jax.eval_shape(lambda x: make()(x, positions=x).logits, jax.ShapeDtypeStruct((2, 8), jnp.int32))
