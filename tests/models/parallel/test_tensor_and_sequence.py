"""A model whose matrices or rows mesh axes split computes what one device computes, on shards of everything."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM
from liger_jax.models.core.lm_loss import LanguageModelLoss
from liger_jax.models.lora import add_lora, train_more
from liger_jax.models.quantized import quantize
from liger_jax.ops import layout as chunks_of_rows
from liger_jax.training import make_step
from tests.models.parallel import _mesh
from tests.models.parallel._mesh import (
    FAMILIES,
    ODD,
    SIZES,
    UNLIKE_LAYERS,
    Problem,
    assert_like_one_device,
    layout_of,
    mesh_of,
)
from tests.ops._oracle import every_second, sent

ROOT = Path(__file__).parents[3]
AUTO, EXPLICIT = AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)
TENSOR, SEQUENCE, BOTH = dict(tensor=2), dict(sequence=2), dict(tensor=2, sequence=2)
REMAT = ("full", "dots", "offload", "offload_attention", 1)  # 1: of two layers
LOGITS = dict(fused_linear_cross_entropy=False)
CROSS_ENTROPY = LOGITS | dict(cross_entropy=True)
TRITON = dict(implementation="triton:interpret", attention="xla")


def name_of(split):
    return " and ".join(f"{axis}={size}" for axis, size in split.items())


def case(
    split, family="llama", axis_type=AUTO, *, name=None, config=(), length=13, scan_layers=True, marks=pytest.mark.full,
    **options,
):  # fmt: skip
    """A problem, a mesh and options; 13 positions are padded, to 14 for two devices along tensor, or to 16."""
    problem = Problem(family, tuple(dict(config).items()), length, scan_layers=scan_layers)
    names = filter(None, (family, name_of(split), axis_type.name, name, str(options.get("remat", ""))))
    return pytest.param(problem, split, axis_type, options, id="-".join(names), marks=marks)


BIASES = dict(attention_bias=True, mlp_bias=True)
ONE_KEY_HEAD = dict(num_key_value_heads=1)


@pytest.mark.parametrize(
    "problem, split, axis_type, options",
    [
        case(TENSOR, axis_type=EXPLICIT, name="odd", config=ODD),
        case(BOTH, axis_type=EXPLICIT, name="odd", config=ODD, marks=()),
        *(case(SEQUENCE, axis_type=kind) for kind in AXIS_TYPES),
        *(case(dict(sequence=4), axis_type=kind, name="even", length=16) for kind in AXIS_TYPES),
        case(TENSOR, name="even", length=12),
        case(dict(tensor=4), name="even", length=12),
        case(dict(tensor=1)),
        case(dict(tensor=2, sequence=1)),
        case(dict(tensor=1, sequence=2)),
        case(TENSOR, name="biases", config=BIASES),
        case(BOTH, name="biases", config=BIASES),
        case(TENSOR, name="heads-repeated-unevenly",
             config=dict(num_attention_heads=6, num_key_value_heads=3, head_dim=4)),
        case(TENSOR, name="unrolled", scan_layers=False),
        case(SEQUENCE, name="unrolled", scan_layers=False),
        case(TENSOR, name="logits", config=ODD, kernels=LOGITS),
        case(TENSOR, name="cross-entropy", config=ODD, kernels=CROSS_ENTROPY),
        case(SEQUENCE, name="logits", kernels=LOGITS),
        case(BOTH, name="cross-entropy", config=ODD, kernels=CROSS_ENTROPY),
        case(TENSOR, name="triton", kernels=TRITON),
        case(SEQUENCE, name="triton", kernels=TRITON),
        *(case(split, axis_type=kind, remat=remat)
          for split in (TENSOR, SEQUENCE) for kind in AXIS_TYPES for remat in REMAT),
        *(case(BOTH, remat=remat) for remat in REMAT),
        *(case(split, family, kind) for family in FAMILIES if family != "llama"
          for split, kind in ((TENSOR, AUTO), (TENSOR, EXPLICIT), (SEQUENCE, AUTO))
          if family not in UNLIKE_LAYERS or split is SEQUENCE),
        case(dict(tensor=4), "gemma", name="one-key-head"),
        case(dict(tensor=4), "olmo2", name="one-key-head", config=ONE_KEY_HEAD),
        case(dict(tensor=4), "phi3", name="one-key-head", config=ONE_KEY_HEAD),
    ],
)  # fmt: skip
def test_loss_metrics_and_gradients_are_those_of_one_device(problem, split, axis_type, options, devices):
    vocabulary = dict(problem.config).get("vocab_size", SIZES["vocab_size"])
    if len(devices) < 4 and vocabulary % 2 and "sequence" in split:
        pytest.skip("two devices do not divide this vocabulary, along which they split the head")
    text, length = assert_like_one_device(problem, split, devices, axis_type, **options)
    has_wide_matrices = problem.family == "gemma4"  # of more numbers than the logits here
    if (
        "kernels" not in options
        and not has_wide_matrices
        and split.get("tensor") in (None, 2)
        and devices[0].platform == "cpu"
    ):
        logits = 4 * length * vocabulary // len(devices)
        at_most = max(logits, SIZES["hidden_size"] * vocabulary + 1)
        assert max(size for _, size in sent(text)) < at_most, "logits, or a whole stack of matrices, are sent"
        of_fused = {"all-to-all"} if problem.family in ("glm4", "phi3") and "tensor" in split else set()
        assert {kind for kind, _ in sent(text)} <= {"all-gather", "reduce-scatter", "all-reduce"} | of_fused


def test_a_tensor_axis_is_refused_where_layers_differ(devices):
    if len(devices) < 2:
        pytest.skip("one device splits nothing")
    family, config_type, fields = FAMILIES["gemma4"]
    fields = SIZES | fields | dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    layout, mesh = layout_of(TENSOR), mesh_of(TENSOR, devices)
    kernels = KernelOptions(layout=layout)
    model = nnx.eval_shape(lambda: family(config_type(**fields), kernels=kernels, rngs=nnx.Rngs(0)))
    told = "Gemma4TextConfig has layers of different sizes, which the axis cannot split"
    with pytest.raises(ValueError, match=told):
        layout.shardings(model, mesh)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=told):
        nnx.eval_shape(lambda model, tokens: model(tokens, labels=tokens).loss, model, tokens)


@pytest.mark.full
@pytest.mark.parametrize("split", [SEQUENCE, BOTH], ids=name_of)
def test_rows_in_many_chunks_have_the_loss_and_gradients_of_one_device(split, devices, monkeypatch):
    monkeypatch.setattr(chunks_of_rows, "LEAST_CHUNK", 1)
    assert chunks_of_rows.pairs_of_chunks(16, 2) == 2
    assert_like_one_device(Problem("llama"), split, devices)


LORA = dict(rank=2, alpha=4)
MODELS_WITH_ADAPTERS, QUANTISED = ("llama", "llama dora", "phi3 dora"), (None, "nf4", "int8")


@functools.cache
def adapted(kind, dora):
    """The function that puts adapters on a model, whose weights are quantised or not."""

    def prepare(model):
        model = model if kind is None else quantize(model, kind, block_size=2, head=True)
        return add_lora(model, **LORA, dora=dora, rngs=nnx.Rngs(1))

    return prepare


@pytest.mark.full
@pytest.mark.parametrize(
    "model, split, axis_type, kind",
    [
        *((model, TENSOR, *rest) for model, *rest in every_second(MODELS_WITH_ADAPTERS, AXIS_TYPES, QUANTISED)),
        *(("llama", split, AUTO, kind) for split in (SEQUENCE, BOTH) for kind in QUANTISED),
    ],
)
def test_adapters_are_split_as_their_matrices_quantised_or_not(model, split, axis_type, kind, devices):
    family, _, dora = model.partition(" ")
    sizes = tuple(dict(intermediate_size=16, num_key_value_heads=1, head_dim=4).items())
    problem = Problem(family, sizes, prepare=adapted(kind, dora == "dora"), trained=nnx.LoRAParam)
    assert_like_one_device(problem, split, devices, axis_type)


def outside(model, dora=False):
    model = add_lora(model, **LORA, dora=dora, targets=["lm_head", "q_proj"], rngs=nnx.Rngs(1))
    return train_more(model, tokens=dict(embed_tokens=[3, 17]))


def outside_by_dora(model):
    return outside(model, dora=True)


def embedding(model):
    return add_lora(model, **LORA, targets=["lm_head", "embed_tokens"], rngs=nnx.Rngs(1))


@pytest.mark.full
@pytest.mark.parametrize("prepare", [outside, outside_by_dora, embedding])
@pytest.mark.parametrize("vocab_size", [24, 23])
def test_adapters_of_the_vocabulary_and_trained_tokens_are_those_of_one_device(vocab_size, prepare, devices):
    problem = Problem("llama", (("vocab_size", vocab_size),), prepare=prepare, trained=nnx.LoRAParam)
    assert_like_one_device(problem, TENSOR, devices)


@pytest.mark.full
@pytest.mark.parametrize("call", ["log_probs", "token_loss", "logits"])
@pytest.mark.parametrize(
    "split, length, config",
    [(TENSOR, 12, ODD), (TENSOR, 13, ODD), (SEQUENCE, 13, {}), (BOTH, 13, ODD)],  # fsdp alone divides its vocabulary
)
def test_log_probs_token_losses_and_logits_are_those_of_one_device(split, length, config, call, devices):
    call = "last_logits" if call == "logits" and "sequence" not in split else call
    problem = Problem("llama", tuple(config.items()), length, call=getattr(_mesh, f"{call}_of"))
    assert_like_one_device(problem, split, devices)


@pytest.mark.full
@pytest.mark.parametrize(
    "families, splits",
    [
        (["llama"], [dict(data=2, tensor=2), dict(data=1, tensor=4), BOTH]),
        ([name for name in FAMILIES if name not in ("llama", *UNLIKE_LAYERS)], [BOTH]),
    ],
    ids=["llama", "others"],
)
def test_eight_devices_agree_over_three_axes(families, splits):
    """In its own process, since JAX makes its simulated devices once."""
    flags = re.sub(r"(host_platform_device_count)=\d+", r"\1=8", os.environ["XLA_FLAGS"])
    program = f"""
import jax
from tests.models.parallel._mesh import ODD, Problem, assert_like_one_device
from tests.models.parallel.test_tensor_and_sequence import AXIS_TYPES
jax.config.update("jax_default_matmul_precision", "highest")
for family in {families}:
    problem = Problem(family, tuple(ODD.items()) if family == "llama" else (), 11)
    for split in {splits}:
        for axis_type in AXIS_TYPES:
            assert_like_one_device(problem, split, jax.devices("cpu"), axis_type)
"""
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True, timeout=1200)


# --- training ---------------------------------------------------------------------------------------------------------

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def trained(layout, state, batch):
    """What twenty steps in micro-batches make of a state, and their losses."""
    kernels = KernelOptions(layout=layout)
    make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES), kernels=kernels, remat="full", rngs=nnx.Rngs(0))
    step, losses = jax.jit(make_step(nnx.split(nnx.eval_shape(make))[0], OPTIMIZER, micro_batches=2)), []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


@functools.cache
def trained_on_one_device():
    """Parameters, a batch, and the losses."""
    params, _, batch, *_ = _mesh.on_one_device(Problem("llama"))
    batch = {name: np.tile(x, (2, 1)) for name, x in batch.items() if name != "loss_weights"}
    return params, batch, trained(None, (params, OPTIMIZER.init(params)), batch)[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "split, axis_type", [(TENSOR, AUTO), (TENSOR, EXPLICIT), (SEQUENCE, AUTO), (BOTH, EXPLICIT)], ids=str
)
def test_twenty_steps_learn_what_one_device_learns(split, axis_type, devices):
    """With clipping and momentum; parameters and their moments stay where the layout puts them."""
    start, batch, expected = trained_on_one_device()
    layout, mesh = layout_of(split), mesh_of(split, devices, axis_type)
    with jax.set_mesh(mesh):
        state = (start, OPTIMIZER.init(start))
        lie = layout.shardings(state, mesh, OPTIMIZER)
        state, found = trained(layout, jax.device_put(state, lie), layout.place(batch))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.5
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, lie)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# --- what has no part in a result -------------------------------------------------------------------------------------


def test_a_device_of_padding_alone_has_no_part_in_scaled_logits(devices, rng):
    """Six entries of a vocabulary over four devices: two, two, two and none."""
    config = LlamaConfig(**SIZES | dict(vocab_size=6, logit_scale=0.3))
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 8), (6, 8)))
    targets = jnp.asarray(rng.integers(0, 6, (2, 4)), jnp.int32)
    mesh = jax.make_mesh((len(devices),), ("tensor",), (AxisType.Auto,), devices=devices)

    def value_and_grad(layout):
        loss = LanguageModelLoss(config, KernelOptions(layout=layout), "none", jnp.float32)

        def total(hidden, head):
            found = loss.log_probs(hidden, head, targets, jnp.array([5, 0]), temperature=0.7, entropy=True)
            own = jnp.sum(found.log_probs) + 2 * jnp.sum(found.entropy)
            return own + jnp.sum(jnp.sin(found.selected_log_probs))

        return jax.jit(jax.value_and_grad(total, (0, 1)))(hidden, head)

    expected = value_and_grad(None)
    with jax.set_mesh(mesh):
        found = value_and_grad(Layout(batch=(), fsdp=(), tensor="tensor"))
    for x, truth in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, truth, rtol=1e-5, atol=1e-6)


def test_a_tensor_axis_of_one_device_changes_nothing(devices):
    split = dict(tensor=1)
    kernels = KernelOptions(layout=layout_of(split))
    with jax.set_mesh(mesh_of(split, devices[:2])):
        make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES), kernels=kernels, rngs=nnx.Rngs(0))
        tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
        call = lambda x, at: make()(x, labels=x, segment_ids=x, positions=at).loss
        assert jax.eval_shape(call, tokens, tokens).shape == ()
