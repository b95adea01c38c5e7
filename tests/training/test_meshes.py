"""Which devices a run takes: the mesh that is named, or the most that divide it."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM
from liger_jax.training import meshes

OF = lambda size: lambda layout: {"q_proj": {"kernel": jax.ShapeDtypeStruct((size, 4), jnp.float32)}}


@pytest.mark.parametrize(
    ["rows", "width", "number", "why"],
    [
        (8, 12, 4, ""),
        (6, 12, 3, "splits the batch into 4 shards, which do not divide the 6 rows"),
        (8, 6, 2, r"fsdp=4 does not divide axis 0 of q_proj.kernel, whose shape is \(6, 4\)"),
        (7, 12, 1, "which do not divide the 7 rows that are computed at once. "),
        (1, 12, 1, "which do not divide the 1 row that is computed at once. "),
    ],
)
def test_the_most_devices_along_fsdp_that_divide_batch_and_weights(rows, width, number, why):
    devices = jax.devices("cpu")[:4]
    found = meshes.chosen(None, devices, rows, OF(width))
    assert found.sizes == {"data": 1, "fsdp": number, "tensor": 1, "sequence": 1, "expert": 1}
    assert (found.mesh is None) == (number == 1 and jax.default_backend() == "cpu")
    told = f"devices: {f'fsdp={number}' if number > 1 else 'one'} of 4 × cpu"
    assert found.line.startswith(told) and (found.line == told) == (not why)
    if why:
        assert re.search(why, found.line)
        idle = 4 - number
        assert f"; {idle} {'is' if idle == 1 else 'are'} idle, since " in found.line


@pytest.mark.parametrize("rows, width, number", [(8, 12, 4), (8, 6, 4), (6, 12, 3), (7, 12, 1)])
def test_of_the_meshes_of_most_devices_one_is_chosen_with_its_reason(rows, width, number):
    asked = []

    def choose(found):
        asked.append([(sizes["data"], sizes["fsdp"]) for sizes in found])
        return len(found) - 1, "the last one"

    found = meshes.chosen("auto", jax.devices("cpu")[:4], rows, OF(width), choose)
    splits = {4: [(1, 4), (2, 2), (4, 1)], 3: [(1, 3), (3, 1)]}.get(number)
    if (rows, width) == (8, 6):
        splits = splits[1:]  # four devices of fsdp do not divide the matrix
    assert asked == ([] if splits is None else [splits])
    assert found.sizes["data"] == number and ("4 × cpu; the last one" in found.line) == (number > 1)
    assert number == 4 or re.search(r"; \d (is|are) idle, since .*\.$", found.line)


@pytest.mark.parametrize("experts, rows, last", [(0, 8, None), (6, 8, None), (8, 8, "expert"), (6, 6, "expert")])
def test_a_mesh_of_experts_is_the_last_one_where_its_devices_divide_them(experts, rows, last):
    asked = []
    choose = lambda found: asked.append(found) or (len(found) - 1, "the last one")
    devices = meshes.chosen(None, jax.devices("cpu")[:4], rows, OF(12), choose, "", experts)
    number = 4 if rows == 8 else 3
    (given,) = asked
    assert [sizes["expert"] for sizes in given[:3]].count(1) == (3 if number == 4 else 2)
    assert devices.sizes[last or "data"] == number and (given[-1]["expert"] == number) == (last is not None)


def test_one_device_is_no_mesh_and_says_nothing():
    assert meshes.chosen(None, jax.devices("cpu")[:1], 7, OF(3)) == meshes.Devices()
    devices, tree = meshes.Devices(), {"a": 1}
    assert devices.place(tree) is tree and devices.placed(tree) is tree and devices.shardings(tree) is None


@pytest.mark.parametrize("text", [None, "fsdp=2"])
def test_a_model_that_cannot_be_made_is_no_fault_of_the_mesh(text):
    def model(layout):
        raise ValueError("No weight is called 'q'.")

    with pytest.raises(ValueError, match=r"^No weight is called 'q'\.$"):
        meshes.chosen(text, jax.devices("cpu")[:4], 4, model, lambda found: (0, ""))


def test_a_mesh_has_all_axes_and_its_layout_names_those_with_devices():
    found = meshes.chosen("data=2, fsdp=2", jax.devices("cpu")[:4], 4, OF(4))
    assert dict(found.mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "sequence": 1, "expert": 1}
    assert found.layout == Layout(batch=("data", "fsdp"), fsdp="fsdp")
    placed = found.place({"labels": jnp.zeros((4, 3)), "scale": 2.0})
    assert placed["labels"].sharding.spec == P(("data", "fsdp")) and placed["scale"].sharding.is_fully_replicated
    assert meshes.layout_of(meshes.parse_mesh("tensor=2,sequence=2")).axes == ("data", "fsdp", "tensor", "sequence")
    assert meshes.layout_of(meshes.parse_mesh("expert=2")).expert == "expert"


def test_processes_must_all_be_in_the_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    devices = [types.SimpleNamespace(device_kind="cpu") for _ in range(4)]
    with pytest.raises(ValueError, match=r"mesh='fsdp=2' has 2 devices, and there are 4 in 2 processes, all of which"):
        meshes.chosen("fsdp=2", devices, 4, OF(4))


@pytest.mark.parametrize("text", ["", "fsdp", "fsdp=", "fsdp=-1", "fsdp=1.5", "fsdp=²", "Fsdp=2", "fsdp=2,", "fsdp==2"])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match=r"mesh='.*' *: .*(is not an axis|needs a number of devices)"):
        meshes.parse_mesh(text)


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
@pytest.mark.parametrize("mesh", ["sequence=2,tensor=2", "fsdp=2,tensor=2", "fsdp=2,sequence=2"])
def test_a_model_whose_devices_share_rows_generates_what_one_device_does(mesh):
    config = LlamaConfig(
        vocab_size=30 if "tensor" in mesh else 32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    make = lambda layout: LlamaForCausalLM(config, kernels=KernelOptions(layout=layout), rngs=nnx.Rngs(0))
    prompts, mask = jnp.arange(20).reshape(4, 5) % 30, jnp.ones((4, 5), bool).at[1:3, :2].set(False)
    options = dict(attention_mask=mask, max_new_tokens=9, eos_token_id=(), return_log_probs=True)
    tokens, log_probs = make(None).generate(prompts, **options)
    found = meshes.chosen(mesh, jax.devices()[:4], 4, lambda layout: nnx.eval_shape(lambda: make(layout)))
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(found.layout_of_rows)))
    params = found.placed(nnx.state(make(None)))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    with found.context():
        shown = nnx.merge(graph, params).generate(prompts, **options)
    assert shown[0].tolist() == tokens.tolist()
    assert jnp.allclose(shown[1], log_probs, atol=1e-5)
