"""Checkpoints that bitsandbytes has quantised to nf4: read as they are, to the bit."""

import importlib
import importlib.util
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.core.parameters import describe, kernel_of, projections
from liger_jax.models.hugging_face import nf4
from liger_jax.models.lora import add_lora, trainable
from liger_jax.models.quantized import QuantizedParam, is_quantized
from tests.models._hugging_face import EXPECTED, GOLDEN

# Of transformers 5.24 and bitsandbytes 0.50 on a CPU: bfloat16, double quantisation, and one projection left dense, the
# down_proj of layer 1. `expected.safetensors` has what `bitsandbytes.functional.dequantize_4bit` makes of it.
FOLDER = GOLDEN / "llama_nf4"
HAS_BITSANDBYTES = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "bitsandbytes"))


def read(folder=FOLDER, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "from_pretrained: .*down_proj.kernel.* become dense")
        return AutoModelForCausalLM.from_pretrained(folder, **options)


@jax.jit
def dense(kernel):
    """As float32, from the computation's dtype and from float32 itself."""
    return kernel.astype(jnp.bfloat16).astype(jnp.float32), kernel.astype(jnp.float32)


def check_bits(model, expected):
    """Every projection's weights are `expected`, whatever dtype the computation has."""
    for path, layer in projections(model):
        info = kernel_of(path, layer)
        for found in dense(layer.kernel[...]):
            for i, name in enumerate(info.tensor_names):
                part = found[i] if info.stacked else found
                np.testing.assert_array_equal(np.asarray(part).T, np.asarray(expected[name], np.float32), name)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "nf4")


def test_weights_are_those_of_bitsandbytes_to_the_bit_and_keep_their_codes():
    with pytest.warns(UserWarning, match=r"\['model.layers.mlp.down_proj.kernel'\] of .* become dense, since not all"):
        model = AutoModelForCausalLM.from_pretrained(FOLDER)
    check_bits(model, load_file(FOLDER / EXPECTED))
    held = {path[-1]: layer.kernel for path, layer in projections(model)}
    assert type(held.pop("down_proj")) is nnx.Param
    assert len(held) == 6 and all(type(kernel) is QuantizedParam for kernel in held.values())
    assert {kernel[...].scales.dtype for kernel in held.values()} == {jnp.dtype("float32")}


def test_layers_of_their_own_stay_quantised_where_another_is_dense():
    model = AutoModelForCausalLM.from_pretrained(FOLDER, scan_layers=False)
    check_bits(model, load_file(FOLDER / EXPECTED))
    assert [is_quantized(layer.mlp.down_proj.kernel[...]) for layer in model.model.layers] == [True, False]


def test_a_save_is_dense(tmp_path):
    expected = load_file(FOLDER / EXPECTED)
    read().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(np.array_equal(x, expected[name]) and x.dtype == expected[name].dtype for name, x in saved.items())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.full
def test_adapters_train_beside_it(tmp_path):
    model, tokens = read(dtype=jnp.float32), jnp.arange(24).reshape(2, 12)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=jnp.float32)
    graph, adapters, base = trainable(add_lora(model, 4, alpha=8, rngs=nnx.Rngs(0)))
    loss = lambda adapters: nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss
    value, gradients = jax.jit(jax.value_and_grad(loss))(adapters)
    exact = nnx.jit(lambda model: model(tokens, labels=tokens).loss)(again)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.full
def test_a_mesh_splits_codes_and_scales_so_that_blocks_stay_whole(devices):
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices)
    specs = lambda name, shape: P(None, "fsdp") if name.endswith("kernel") else P()
    model = read(mesh=mesh, partition_specs=specs, dtype=jnp.float32)
    check_bits(model, load_file(FOLDER / EXPECTED))
    kernel = model.model.layers.self_attn.q_proj.kernel[...]
    assert kernel.codes.sharding.spec == kernel.scales.sharding.spec == P(None, None, "fsdp")


def test_a_stand_in_has_the_structure_of_what_is_read():
    source = importlib.import_module("liger_jax.models.hugging_face.source").find(FOLDER)
    weights = importlib.import_module("liger_jax.models.hugging_face.weights")
    model = read(dtype=jnp.float32)
    make = lambda: type(model)(model.config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    stand_in = nnx.eval_shape(lambda: weights.quantized_as_in(source.folder, make()))
    assert nnx.state(stand_in, nnx.Param).keys() == nnx.state(model, nnx.Param).keys()
    shapes = lambda model: jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model))
    assert jax.tree.structure(nnx.state(stand_in)) == jax.tree.structure(nnx.state(model))
    assert shapes(stand_in) == shapes(model) and describe(stand_in).keys() == describe(model).keys()


@pytest.mark.parametrize(
    ["fields", "name"],
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes' fp4"),
        ({"load_in_4bit": True}, "bitsandbytes' fp4"),  # its default
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes' int8"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "fp8"}, "'fp8'"),
        (["nf4"], r"\['nf4'\]"),
    ],
)
def test_other_quantised_checkpoints_are_refused_by_name(fields, name, folder):
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=f"quantization_config is {name}, and must be .* nf4 or absent: take the model"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


def test_what_is_damaged_or_contradicts_is_refused(folder):
    with pytest.raises(ValueError, match=r"quantize='int8', but .* is nf4 already. Leave it out."):
        AutoModelForCausalLM.from_pretrained(folder, quantize="int8")
    weight = "model.layers.0.mlp.up_proj.weight"
    as_name = lambda part: f"{weight}{part}"
    original = load_file(folder / "model.safetensors")
    cases = {
        as_name(".quant_map"): (np.linspace(-1, 1, 16, dtype=np.float32), "quant_map is not the code book of nf4"),
        as_name(".absmax"): (np.zeros(3, np.uint8), "of shape .64, 64. needs 64 absmax, not 3"),
        as_name(""): (np.zeros((5, 1), np.uint8), "of shape .64, 64. needs 2048 codes, not 5"),
        as_name(".quant_state.bitsandbytes__nf4"): (np.frombuffer(b"{", np.uint8), "has a damaged quant_state"),
    }
    for name, (tensor, message) in cases.items():
        save_file(original | {name: tensor}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"up_proj.weight.*{message}"):
            read(folder)
    save_file({name.replace("__nf4", "__fp4"): x for name, x in original.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is bitsandbytes' fp4; only nf4 is supported"):
        read(folder)


def test_blocks_that_span_rows_are_read_dense(rng):
    """A weight (3, 96) of blocks of 64: of its five blocks the last is short, and two belong to two rows."""
    codes, scales = rng.integers(0, 256, 144).astype(np.uint8), rng.random(5).astype(np.float32)
    book = np.asarray(nf4.NF4, np.float32)
    fields = {"blocksize": 64, "shape": [3, 96], "dtype": "float32"}
    tensor = nf4.Nf4Tensor("x", {"": codes, ".absmax": scales, ".quant_map": book}, fields)
    every = [code for byte in codes for code in (byte >> 4, byte & 15)]
    expected = [book[code] * scales[i // 64] for i, code in enumerate(every)]
    np.testing.assert_array_equal(tensor[:].ravel(), np.asarray(expected, np.float32))


@pytest.mark.parity
@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="torch, transformers or bitsandbytes is absent")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("double", [False, True])
def test_fresh_checkpoints_are_read_to_the_bit(dtype, double, tmp_path):
    torch, transformers, functional = map(importlib.import_module, ("torch", "transformers", "bitsandbytes.functional"))
    config = transformers.Qwen2Config(
        vocab_size=29, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    load, dtype = transformers.AutoModelForCausalLM.from_pretrained, getattr(torch, dtype)
    transformers.Qwen2ForCausalLM(config).to(dtype).save_pretrained(tmp_path / "dense")
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype
    )
    load(tmp_path / "dense", quantization_config=how, dtype=dtype, device_map="cpu").save_pretrained(tmp_path / "nf4")
    theirs = load(tmp_path / "nf4", device_map="cpu")
    expected = {
        name: functional.dequantize_4bit(x.data, x.quant_state).float().numpy()
        for name, x in theirs.named_parameters()
        if getattr(x, "quant_state", None) is not None
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
    for path, layer in projections(model):
        for i, name in enumerate(kernel_of(path, layer).tensor_names):
            found = jax.jit(lambda kernel, i=i: kernel[i].astype(jnp.float32))(layer.kernel[...])
            np.testing.assert_array_equal(np.asarray(found).T, expected.pop(name))
    assert not expected
