"""`describe` knows every parameter of every family, by its kind, its axes and its checkpoint's names."""

import jax
import pytest
from flax import nnx
from safetensors import safe_open

from liger_jax.models.core.parameters import describe, parameter
from liger_jax.models.hugging_face import weights
from liger_jax.models.lora import add_lora, save_adapters, with_dropout
from liger_jax.models.quantized import quantize
from liger_jax.planner.architectures import architecture
from tests.models import _hugging_face as hugging_face
from tests.models._llama import make_model

# A file in nf4 has codes in other shapes: tests/models/test_nf4.py.
FAMILIES = sorted(path.name for path in hugging_face.GOLDEN.iterdir() if path.is_dir() and path.name != "llama_nf4")
SCANS = pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])


def described(model):
    """What each leaf is, and its shape."""
    leaves = jax.tree.leaves(nnx.state(model))
    return [(info, leaf.shape) for info, leaf in zip(describe(model).values(), leaves, strict=True)]


@SCANS
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_s_parameters_have_their_checkpoint_s_names_and_shapes(family, scan):
    folder = hugging_face.GOLDEN / family
    found, stacked = {}, []
    model = architecture(folder)
    for info, shape in described(nnx.merge(*model.abstract(scan_layers=scan))):
        experts = shape[info.expert_axis] * info.tensors_of_expert if info.tensors_of_expert else 1
        assert len({*info.tensor_names}) == experts * (shape[0] if info.stacked else 1)
        assert not found.keys() & set(info.tensor_names)
        found |= dict.fromkeys(info.tensor_names, info.tensor_shape(shape))
        stacked.append(info.stacked)
    assert found == weights.shapes(folder)  # OLMo Hybrid's files hold a convolution in pieces
    assert any(stacked) == (scan and not model.config.layers_differ)


@SCANS
def test_kinds_and_axes_of_quantised_weights_and_adapters(scan):
    layers = 1 if scan else 0

    def make():
        model = quantize(make_model(scan_layers=scan), "nf4", block_size=16, head=True)
        add_lora(model, 3, alpha=6, targets=("q_proj",), dropout=0.1, dora=True, rngs=nnx.Rngs(1))
        return with_dropout(model, jax.random.key(0))

    infos = describe(nnx.eval_shape(make))
    stack = ("model", "layers") if scan else ("model", "layers", 1)
    found = lambda *path: (lambda x: (x.kind, x.layer_axis, x.in_axis, x.out_axis))(infos[path])
    of_layer = lambda *path: found(*stack, "self_attn", "q_proj", *path)
    assert found("model", "embed_tokens") == ("embedding", None, 0, 1)
    assert found("lm_head", "codes") == ("head_codes", None, 1, 0)
    assert found("lm_head", "scales") == ("head_scales", None, 1, 0)
    assert found("model", "norm", "scale") == ("norm", None, None, 0)
    first = 0 if scan else None
    assert of_layer("kernel", "codes") == ("kernel_codes", first, layers, layers + 1)
    assert of_layer("kernel", "scales") == ("kernel_scales", first, layers, layers + 1)
    assert of_layer("lora_a") == ("lora_a", first, layers, None)
    assert of_layer("lora_b") == ("lora_b", first, None, layers + 1)
    assert of_layer("magnitude") == ("magnitude", first, None, layers)
    assert of_layer("dropout_key") == ("dropout_key", first, None, None)
    assert infos[*stack, "self_attn", "q_proj", "kernel", "codes"].tensor_names[-1] == (
        "model.layers.1.self_attn.q_proj.weight"
    )


@SCANS
def test_adapters_have_peft_s_names_and_shapes(scan, tmp_path):
    options = dict(alpha=6, targets=("q_proj",), dora=True)
    model = add_lora(make_model(scan_layers=scan), 3, **options, rngs=nnx.Rngs(1))
    for _, layer in nnx.iter_graph(model):
        if hasattr(layer, "lora_b"):
            layer.lora_b[...] += 1  # files leave out adapters that do nothing
    save_adapters(model, tmp_path)
    found = {}
    for info, shape in described(model):
        if info.kind in ("lora_a", "lora_b", "magnitude"):
            names = [f"base_model.model.{name}" for name in info.tensor_names]
            found |= dict.fromkeys(names, info.tensor_shape(shape))
    with safe_open(tmp_path / "adapter_model.safetensors", framework="numpy") as file:
        assert found == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def test_layers_after_a_scan_are_numbered():
    info = parameter(("model", "last_layers", "2", "mlp", "up_proj", "kernel"), (8, 16))
    assert (info.layer_axis, info.in_axis, info.tensor_names) == (None, 0, ("model.layers.2.mlp.up_proj.weight",))


def test_a_leaf_that_is_no_parameter_is_refused():
    with pytest.raises(ValueError, match=r"0.count \(\) is not a parameter of a model.*shardings\(\(params, state\)"):
        parameter((0, "count"), ())
    with pytest.raises(ValueError, match=r"up_proj.kernel has shape \(8, 16\).*after an axis of layers"):
        parameter(("model", "layers", "mlp", "up_proj", "kernel"), (8, 16))
    with pytest.raises(ValueError, match=r"bias.codes \(4,\) is not a parameter"):
        parameter(("q_proj", "bias", "codes"), (4,))
