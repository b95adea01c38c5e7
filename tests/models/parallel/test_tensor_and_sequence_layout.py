"""How a tensor or a sequence axis splits batches, parameters and checkpoints, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from liger_jax.models import (
    KernelOptions,
    Layout,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from liger_jax.models.lora import add_lora
from liger_jax.models.quantized import quantize
from tests.models.parallel._mesh import FAMILIES, SIZES, layout_of, mesh_of

TENSOR, SEQUENCE = dict(tensor=2), dict(sequence=2)
AXES = ("fsdp", "tensor")
LAYOUT = layout_of(TENSOR)

# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_shifted_padded_and_put_in_the_order_of_chunks(devices):
    mesh, layout = mesh_of(SEQUENCE, devices[:2]), layout_of(SEQUENCE)
    tokens = np.arange(10, 22).reshape(2, 6)
    batch = dict(input_ids=tokens, labels=tokens, segment_ids=np.array([[1, 1, 1, 2, 2, 2]] * 2), scale=3.0,
                 loss_weights=np.ones((2, 6), np.float32), of_rows=np.ones(2, np.float32))  # fmt: skip
    with jax.set_mesh(mesh):
        placed = layout.place(batch)
        again = layout.place(placed)
        of_one_document = layout.place(dict(input_ids=tokens))["positions"]
    assert of_one_document.tolist() == [[0, 1, 5, 5, 2, 3, 4, 5]]
    assert of_one_document.sharding.spec == P(None, "sequence")
    # Chunks of two, 0 and 3 on the first device, 1 and 2 on the second; the last two positions are padding.
    assert placed["input_ids"][0].tolist() == [10, 11, 15, 15, 12, 13, 14, 15]
    assert placed["shift_labels"][0].tolist() == [11, 12, -100, -100, -100, 14, 15, -100]
    assert placed["positions"].tolist() == [[0, 1, 2, 2, 2, 0, 1, 2]] * 2  # of each document
    assert placed["segment_ids"][0].tolist() == [1, 1, 0, 0, 1, 2, 2, 2]  # a router counts no padding
    assert placed["loss_weights"][0].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert set(placed) == {*batch, "shift_labels", "positions"} - {"labels"}
    assert placed["input_ids"].addressable_shards[1].data.tolist() == [[12, 13, 14, 15], [18, 19, 20, 21]]
    assert [x.sharding.spec for x in (placed["positions"], placed["of_rows"])] == [P("fsdp", "sequence"), P("fsdp")]
    for name, x in placed.items():
        np.testing.assert_array_equal(x, again[name])


def test_tokens_alone_are_their_own_labels_and_padding_fits_a_tensor_axis(devices):
    if len(devices) < 4:
        pytest.skip("a mesh of two axes")
    both = TENSOR | SEQUENCE
    layout, mesh = layout_of(both), mesh_of(both, devices)
    placed = layout.place(jnp.arange(10).reshape(2, 5), mesh)
    assert {name: x.shape for name, x in placed.items()} == dict(
        input_ids=(2, 8), shift_labels=(2, 8), positions=(1, 8), token_mask=(2, 8)
    )
    assert placed["token_mask"][0].tolist() == [1, 1, 0, 0, 1, 1, 1, 0]  # chunks 0, 3, 1, 2
    assert "token_mask" not in layout.place(jnp.arange(16).reshape(2, 8), mesh)


def test_what_cannot_be_split_into_rows_is_refused(devices):
    mesh, layout, tokens = mesh_of(SEQUENCE, devices[:2]), layout_of(SEQUENCE), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"the batch has no input_ids, but \['chosen', 'rejected'\]"):
        layout.place(dict(chosen=dict(input_ids=tokens), rejected=dict(input_ids=tokens)), mesh)
    with pytest.raises(ValueError, match="labels and shift_labels exclude each other"):
        layout.place(dict(input_ids=tokens, labels=tokens, shift_labels=tokens), mesh)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_split_over_the_sequence_axis_too():
    axes, layout = ("fsdp", "tensor", "sequence"), layout_of(TENSOR | SEQUENCE)
    mesh, params = AbstractMesh((2, 1, 2), axes), {"up_proj": {"kernel": jnp.zeros((8, 4))}}
    spec_of = lambda layout, mesh=mesh: layout.shardings(params, mesh)["up_proj"]["kernel"].spec
    assert spec_of(layout) == P(("fsdp", "sequence"))
    assert spec_of(Layout(batch=("fsdp",), fsdp=("fsdp",), tensor="tensor", sequence="sequence")) == P("fsdp")
    assert spec_of(layout, AbstractMesh((2, 2, 2), axes)) == P(("fsdp", "sequence"), "tensor")
    alone = Layout(batch=(), fsdp="sequence", sequence="sequence")
    assert spec_of(alone, AbstractMesh((4,), ("sequence",))) == P("sequence")


def specs_of(prepare=lambda model: model, sizes=(2, 2), **config):
    """The specs by the ends of the parameters' names."""
    make = lambda: prepare(Qwen2ForCausalLM(Qwen2Config(**SIZES | config), rngs=nnx.Rngs(0)))
    found = LAYOUT.shardings(nnx.eval_shape(make), AbstractMesh(sizes, AXES))
    flat = jax.tree.leaves_with_path(found)
    names = [re.sub(r"\W+", ".", jax.tree_util.keystr(path)).removesuffix(".value") for path, _ in flat]
    return {name: leaf.spec for name, (_, leaf) in zip(names, flat, strict=True)}


def assert_specs(found, **expected):
    for name, spec in expected.items():
        ends = f".{name.replace('__', '.')}"
        of_name = {spec for path, spec in found.items() if re.sub(r"\.value\b", "", path).rstrip(".").endswith(ends)}
        assert of_name == {spec}, (name, of_name)


def test_matrices_are_split_over_both_axes():
    assert_specs(
        specs_of(),
        q_proj__kernel=P(None, "fsdp", "tensor"),
        q_proj__bias=P(None, ("tensor", "fsdp")),
        k_proj__kernel=P(None, "fsdp", "tensor"),
        o_proj__kernel=P(None, ("tensor", "fsdp")),
        up_proj__kernel=P(None, "fsdp", "tensor"),
        down_proj__kernel=P(None, ("tensor", "fsdp")),
        input_layernorm__scale=P(None, "fsdp"),
        embed_tokens=P(("tensor", "fsdp")),
        lm_head=P(("tensor", "fsdp")),
    )


def test_a_matrix_s_second_axis_is_split_where_the_first_is_not_divided_by_both():
    assert_specs(
        specs_of(vocab_size=22, intermediate_size=14, hidden_size=8),
        down_proj__kernel=P(None, "tensor", "fsdp"),
        up_proj__kernel=P(None, "fsdp", "tensor"),
        embed_tokens=P("tensor", "fsdp"),
        lm_head=P("tensor", "fsdp"),
    )


def test_a_vocabulary_that_is_not_divided_is_whole_along_the_tensor_axis():
    assert_specs(specs_of(vocab_size=23), embed_tokens=P(None, "fsdp"), lm_head=P(None, "fsdp"))


def test_codes_and_adapters_are_split_as_their_matrix():
    adapted = lambda model: add_lora(quantize(model, "nf4", block_size=2), rank=2, alpha=4, rngs=nnx.Rngs(1))
    assert_specs(
        specs_of(adapted, intermediate_size=16),
        up_proj__kernel__codes=P(None, None, ("tensor", "fsdp")),
        up_proj__kernel__scales=P(None, None, ("tensor", "fsdp")),
        up_proj__lora_a=P(),
        up_proj__lora_b=P(None, None, "tensor"),
        down_proj__kernel__codes=P(None, "tensor", "fsdp"),
        down_proj__lora_a=P(None, "tensor"),
        down_proj__lora_b=P(),
    )
    fused = nnx.eval_shape(lambda: Phi3ForCausalLM(Phi3Config(**SIZES), rngs=nnx.Rngs(0)))
    found = LAYOUT.shardings(fused, AbstractMesh((2, 2), AXES))
    of_gate_up = jax.tree.leaves(found["model"]["layers"]["mlp"]["gate_up_proj"]["kernel"])
    assert [sharding.spec for sharding in of_gate_up] == [P(None, ("tensor", "fsdp"))]
    with pytest.raises(ValueError, match="tensor=2 does not divide axis 1 of .*down_proj.kernel.scales.* nearest"):
        specs_of(lambda model: quantize(model, "nf4", block_size=4))


@pytest.mark.parametrize("kind", [None, pytest.param("nf4", marks=pytest.mark.full)])
def test_a_checkpoint_is_read_as_the_layout_of_its_kernels_says(kind, devices, tmp_path):
    mesh = mesh_of(TENSOR, devices[:2])
    config = LlamaConfig(**SIZES | (dict(hidden_size=128, intermediate_size=128, head_dim=32) if kind else {}))
    LlamaForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, mesh=mesh, kernels=KernelOptions(layout=LAYOUT), quantize=kind, param_dtype=jnp.float32
    )
    state = nnx.state(model)
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, LAYOUT.shardings(state, mesh))), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert model.lm_head[...].addressable_shards[0].data.shape == (12, config.hidden_size)


# --- what is refused --------------------------------------------------------------------------------------------------


def of_labels(model, x):
    return model(x, labels=x).loss


@pytest.mark.parametrize(
    "split, match, call, family, config",
    [
        (TENSOR, r"do not divide num_attention_heads=5\. The nearest .* is 1", of_labels, "llama",
         dict(num_attention_heads=5, num_key_value_heads=5, hidden_size=10)),
        (TENSOR, r"do not divide intermediate_size=15\. The nearest .*=4 and intermediate_size=15 is 1", of_labels,
         "llama", dict(intermediate_size=15)),
        (TENSOR, r"do not divide vocab_size=23\. .*final_logit_softcapping=30.0 bounds", of_labels, "gemma2",
         dict(vocab_size=23)),
        (TENSOR, "cache is given on a mesh with 2 devices along tensor='tensor'",
         lambda model, x: model(x, cache=model.init_cache(2, 8)), "llama", {}),
        (SEQUENCE, "labels are given on a mesh with 2 devices along sequence=",
         lambda model, x: model(x, labels=x, positions=x), "llama", {}),
        (SEQUENCE, "positions is not given on a mesh with 2 devices .*layout.place", lambda model, x: model(x),
         "llama", {}),
        (SEQUENCE, r"input_ids has 6 positions .* a row of 4·n positions",
         lambda model, x: model(x[:, :6], positions=x[:, :6]), "llama", {}),
        (SEQUENCE, "cache is given on a mesh with 2 devices along sequence=",
         lambda model, x: model(x, positions=x, cache=model.init_cache(2, 8)), "llama", {}),
        (SEQUENCE, "logits_to_keep is given on a mesh with 2 devices",
         lambda model, x: model(x, positions=x, logits_to_keep=3), "llama", {}),
        (SEQUENCE, "labels are given on a mesh with 2 devices",
         lambda model, x: model.log_probs(x, labels=x, positions=x), "llama", {}),
        (SEQUENCE, "cache is given on a mesh with 2 devices along seq",
         lambda model, x: model.generate(x, max_new_tokens=2), "llama", {}),
    ],
)  # fmt: skip
def test_what_an_axis_cannot_split_is_refused(split, match, call, family, config, devices):
    model_class, config_class, fields = FAMILIES[family]
    kernels = KernelOptions(layout=layout_of(split))
    make = lambda: model_class(config_class(**SIZES | fields | config), kernels=kernels, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(split, devices[:2])), pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda x: call(make(), x), jax.ShapeDtypeStruct((2, 8), jnp.int32))


def test_cudnn_does_not_run_on_a_part_of_a_row(devices):
    kernels = KernelOptions(layout=layout_of(SEQUENCE), attention="cudnn")
    make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES), kernels=kernels, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(SEQUENCE, devices[:2])), pytest.raises(ValueError, match="causal_attention.*cudnn"):
        jax.eval_shape(lambda x: make()(x, positions=x).logits, jax.ShapeDtypeStruct((2, 8), jnp.int32))


def test_a_model_s_shardings_ask_for_whole_heads():
    config = LlamaConfig(**SIZES | dict(num_attention_heads=2, head_dim=8))  # 16 columns, which 4 divides
    model = nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="4 devices, which do not divide num_attention_heads=2. The nearest .* is 2"):
        LAYOUT.shardings(model, AbstractMesh((1, 4), AXES))


def test_a_matrix_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="router.kernel is a matrix that tensor=2 cannot split"):
        LAYOUT.shardings({"router": {"kernel": jnp.zeros((4, 4))}}, AbstractMesh((1, 2), AXES))
    with pytest.raises(ValueError, match="tensor=3 does not divide axis 1 of q_proj.kernel.* nearest to 3 is 2"):
        LAYOUT.shardings({"q_proj": {"kernel": jnp.zeros((4, 8))}}, AbstractMesh((1, 3), AXES))
