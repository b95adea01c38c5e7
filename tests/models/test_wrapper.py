"""Multimodal checkpoints: their language part is read, trained and saved, and the other parts stay as they are."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax.models import AutoModelForCausalLM
from tests.models import _hugging_face as hugging_face
from tests.models.test_multimodal_adapters import CASES, TEXT, VISION
from tests.models.test_parity import live, relative

OTHERS = {
    "vision_tower.embeddings.weight": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "vision_tower.count": np.array(7, np.int64),
    "multi_modal_projector.weight": np.float32([np.nan, -0.0, 1e-45]),
}


@pytest.fixture(params=["language_model.model.", "model.language_model."])
def folder(request, tmp_path):
    """A multimodal checkpoint with a tied Gemma 3, by the names of transformers 4 and 5."""
    source, _ = hugging_face.committed("gemma3")
    tensors = load_file(source / "model.safetensors").items()
    tensors = {name.replace("model.", request.param, 1): x for name, x in tensors}
    (tmp_path / "whole").mkdir()
    save_file(tensors | OTHERS, tmp_path / "whole" / "model.safetensors")
    text = json.loads((source / "config.json").read_text()) | {"eos_token_id": 5}
    config = {"model_type": "gemma3", "image_token_index": 9, "vision_config": {"a": [1]}, "eos_token_id": [1, 6]}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config | {"text_config": text}))
    (tmp_path / "whole" / "preprocessor_config.json").write_text("{ }")
    return tmp_path / "whole"


def changed(folder):
    """The model, as training would leave it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))
    return model


@pytest.mark.parametrize(["name", "max_shard_bytes"], [("again", 4000), ("whole", 5 * 10**9), ("whole", 4000)])
def test_a_save_writes_the_whole_checkpoint_with_the_model_s_weights(folder, name, max_shard_bytes):
    before, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    expected = AutoModelForCausalLM.from_pretrained(folder).config
    changed(folder).save_pretrained(folder.parent / name, max_shard_bytes=max_shard_bytes)
    saved = {key: x for file in (folder.parent / name).glob("*.safetensors") for key, x in load_file(file).items()}
    assert saved.keys() == before.keys()
    for key, x in before.items():
        if key in OTHERS:
            assert saved[key].tobytes() == x.tobytes() and saved[key].dtype == x.dtype and saved[key].shape == x.shape
        else:
            np.testing.assert_array_equal(saved[key], x + 1)
    found = json.loads((folder.parent / name / "config.json").read_text())
    assert all(found[key] == config[key] for key in config if key != "text_config")
    assert (folder.parent / name / "preprocessor_config.json").read_text() == "{ }"
    again = AutoModelForCausalLM.from_pretrained(folder.parent / name)
    assert again.config == expected and again.kept.stops == (1, 6)


def test_a_changed_architecture_is_written_into_the_whole_config(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, length=200, rope_scaling="linear")
    model.save_pretrained(tmp_path / "again", config_fields={"eos_token_id": 3})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config == model.config and again.config.rope_scaling.factor == 4.0 and again.kept.stops == (3,)


def test_the_language_part_is_saved_alone_where_that_is_asked_for(folder, tmp_path):
    model = changed(folder)
    model.kept = dataclasses.replace(model.kept, whole=None)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "gemma3_text"
    assert all(name.startswith("model.") for name in load_file(tmp_path / "again" / "model.safetensors"))


def test_a_save_after_the_whole_checkpoint_is_gone_says_so(folder, tmp_path):
    model = changed(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="came from, has neither model.safetensors nor"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "config.json").exists()


@live
@pytest.mark.parametrize("case", ["gemma3", "gemma4", "mistral3", "ministral3", "qwen3_vl"])
def test_transformers_computes_with_what_a_save_wrote_into_its_multimodal_model(case, tmp_path, rng):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.manual_seed(int(rng.integers(2**31)))
    of_qwen = dict(hidden_size=16, intermediate_size=16, depth=2, num_heads=2, patch_size=8)
    of_qwen |= dict(out_hidden_size=32, deepstack_visual_indexes=[0])
    of_gemma_4 = dict(num_kv_shared_layers=1, layer_types=["full_attention"] * 2, vocab_size_per_layer_input=61)
    of_gemma_4 |= dict(hidden_size_per_layer_input=4, global_head_dim=8)
    cases = CASES | {
        "gemma4": ("Gemma4Config", of_gemma_4, VISION | dict(num_key_value_heads=2, head_dim=8, patch_size=8)),
        "ministral3": ("Mistral3Config", dict(model_type="ministral3"), CASES["mistral3"][2]),
        "qwen3_vl": ("Qwen3VLConfig", dict(rope_parameters=dict(rope_theta=100.0, mrope_section=[4, 2, 2])), of_qwen),
    }
    name, text, vision = cases[case]
    config = getattr(transformers, name)(text_config=TEXT | text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    model.save_pretrained(tmp_path / "theirs")
    ours = changed(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    tokens = rng.integers(0, 61, (2, 20))
    with torch.no_grad():
        logits = again.eval()(input_ids=torch.from_numpy(tokens)).logits.numpy()
    assert relative(ours(jnp.asarray(tokens, jnp.int32)).logits, logits) < 1e-4
    before, after = model.state_dict(), again.state_dict()
    others = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert others and all(torch.equal(before[name], after[name]) for name in others)
