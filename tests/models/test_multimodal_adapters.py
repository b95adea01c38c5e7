"""Adapters of the language part of a multimodal checkpoint, which are shared with transformers' whole model."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face import checkpoint
from liger_jax.models.lora import add_lora, load_adapters, save_adapters
from tests.models._llama import make_model, random_tokens
from tests.models.test_lora import adapted
from tests.models.test_lora import live as with_peft
from tests.models.test_parity import relative

PLAIN, WHOLE = "base_model.model.model.layers.", "base_model.model.model.language_model.layers."
# Of each family that has one, a multimodal model: its config, the language part's and the vision part's own fields.
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
PATCHES = VISION | dict(image_size=16, patch_size=8)
SAM = dict(output_channels=8, mlp_dim=16, window_size=2, global_attn_indexes=[0], patch_size=16, image_size=64)
CASES = {
    "gemma3": ("Gemma3Config", dict(model_type="gemma3_text", sliding_window=8), PATCHES),
    "mistral3": ("Mistral3Config", dict(model_type="mistral", sliding_window=5), PATCHES | dict(head_dim=8)),
    "llava": ("LlavaConfig", dict(model_type="llama"), PATCHES | dict(model_type="clip_vision_model")),
    "got_ocr2": ("GotOcr2Config", dict(model_type="qwen2"), VISION | SAM),
    "lighton_ocr": ("LightOnOcrConfig", dict(model_type="qwen3"), PATCHES | dict(head_dim=8)),
}
TEXT = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, initializer_range=0.3,
)  # fmt: skip


def names_in(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config["target_modules"]


def test_adapters_of_a_multimodal_checkpoint_have_the_names_of_the_whole_model(tmp_path, rng):
    model, tokens = adapted(), random_tokens(rng)
    model.kept = checkpoint.Kept(whole=checkpoint.Whole("{}", ""))
    save_adapters(model, tmp_path, base_model="org/name")
    tensors, targets = names_in(tmp_path)
    assert all(name.startswith(WHOLE) for name in tensors)
    a, prefix = ".lora_A.weight", "base_model.model."
    assert sorted(targets) == sorted(name[len(prefix) : -len(a)] for name in tensors if name.endswith(a))
    np.testing.assert_array_equal(load_adapters(make_model(), tmp_path)(tokens).logits, model(tokens).logits)


def test_adapters_of_other_parts_are_left_out_with_a_warning(tmp_path, rng):
    model, tokens = adapted(), random_tokens(rng)
    model.kept = checkpoint.Kept(whole=checkpoint.Whole("{}", ""))
    save_adapters(model, tmp_path)
    other = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(names_in(tmp_path)[0] | {other: np.ones((3, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match=f"has 1 tensors for other parts of a multimodal model, such as {other}"):
        loaded = load_adapters(make_model(), tmp_path)
    np.testing.assert_array_equal(loaded(tokens).logits, model(tokens).logits)


def test_the_base_model_s_folder_says_what_the_names_are(tmp_path):
    model = adapted()
    make_model().save_pretrained(tmp_path / "text")
    values = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": values}))
    for folder, prefix in (("text", PLAIN), ("whole", WHOLE)):
        other = checkpoint.Whole("{}", "") if folder == "text" else None  # it came from the other one
        model.kept = checkpoint.Kept(whole=other)
        save_adapters(model, tmp_path / "adapters", base_model=str(tmp_path / folder))
        assert all(name.startswith(prefix) for name in names_in(tmp_path / "adapters")[0])


@with_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("case", CASES)
def test_transformers_and_peft_share_adapters_of_multimodal_models_with_us(case, tmp_path, rng):
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    torch.manual_seed(int(rng.integers(2**31)))
    name, text, vision = CASES[case]
    config = getattr(transformers, name)(text_config=TEXT | text, vision_config=vision)
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if type(config) in known else transformers.AutoModelForImageTextToText
    auto.from_config(config).float().save_pretrained(tmp_path / "base")
    tokens = rng.integers(0, TEXT["vocab_size"], (2, 12))

    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=torch.from_numpy(tokens)).logits.numpy()

    ours = lambda model: model(jnp.asarray(tokens, jnp.int32)).logits
    theirs = auto.from_pretrained(tmp_path / "base")
    base = logits(theirs)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert relative(ours(model), base) < 1e-4

    add_lora(model, 4, alpha=8, rngs=nnx.Rngs(0))
    for path, b in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            b[...] = 0.3 * jax.random.normal(jax.random.key(3), b.shape)
    save_adapters(model, tmp_path / "ours", base_model=str(tmp_path / "base"))
    truth = np.asarray(ours(model))
    assert np.abs(truth - base).max() > 0.1 * np.abs(base).max()  # the adapters count
    assert relative(logits(auto.from_pretrained(tmp_path / "ours")), truth) < 1e-4
    whole = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "ours")
    assert sum("lora_A" in name for name, _ in whole.named_parameters()) == 14  # and none of the vision part
    assert relative(logits(whole), truth) < 1e-4

    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    theirs = peft.get_peft_model(theirs, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="tensors for other parts of a multimodal model"):
        loaded = load_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "theirs")
    assert relative(ours(loaded), logits(theirs)) < 1e-4
