"""Models by the names that people know them by, and by their config.json."""

import json
import time

import jax
import pytest

from liger_jax.models.auto import FAMILIES
from liger_jax.planner import plan
from liger_jax.planner.architectures import MODELS, architecture
from liger_jax.planner.model_names import VARIANTS
from tests.models._hugging_face import COMMITTED, EXPERTS, GOLDEN

PUBLISHED = {  # parameters as the models' publishers count them, in billions; of Gemma 3 from 4b on the language part
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98,
    "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.9,
    "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.3-70b": 70.55,
    "mistral-7b-v0.1": 7.242, "mistral-7b-v0.2": 7.242, "mistral-7b-v0.3": 7.248, "mistral-nemo-2407": 12.25,
    "mistral-small-24b-2501": 23.57,
    "qwen2-0.5b": 0.494, "qwen2-1.5b": 1.544, "qwen2-7b": 7.616, "qwen2-72b": 72.71,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "llama-7b": 6.738, "llama-13b": 13.02, "tinyllama-1.1b": 1.100, "falcon3-7b": 7.456, "falcon3-10b": 10.31,
    "smollm-135m": 0.1345, "smollm-360m": 0.3618, "smollm-1.7b": 1.711,
    "smollm2-135m": 0.1345, "smollm2-360m": 0.3618, "smollm2-1.7b": 1.711,
    "deepseek-coder-1.3b": 1.346, "deepseek-coder-6.7b": 6.741, "deepseek-coder-33b": 33.34,
    "yi-6b": 6.061, "yi-1.5-6b": 6.061, "yi-1.5-9b": 8.829, "yi-1.5-34b": 34.39,
    "ministral-8b-2410": 8.020, "mistral-small-2409": 22.25, "mistral-large-2407": 122.6, "codestral-22b-v0.1": 22.25,
    "qwen1.5-0.5b": 0.464, "qwen1.5-1.8b": 1.837, "qwen1.5-4b": 3.950, "qwen1.5-7b": 7.721, "qwen1.5-14b": 14.17,
    "gemma-2b": 2.506, "gemma-7b": 8.538, "gemma-2-2b": 2.614, "gemma-2-9b": 9.242, "gemma-2-27b": 27.23,
    "gemma-3-270m": 0.268, "gemma-3-1b": 1.000, "gemma-3-4b": 3.880, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01,
    "gemma-4-e2b": 4.628, "gemma-4-e4b": 7.463, "gemma-4-31b": 30.70,
    "olmo-2-0425-1b": 1.485, "olmo-2-1124-7b": 7.299, "olmo-2-1124-13b": 13.72, "olmo-2-0325-32b": 32.23,
    "olmo-3-1025-7b": 7.298, "olmo-3-1125-32b": 32.23, "exaone-4.0-1.2b": 1.279, "exaone-4.0-32b": 32.00,
    "glm-4-9b-0414": 9.400, "glm-4-32b-0414": 32.57, "ministral-3-3b-2512": 3.429, "ministral-3-8b-2512": 8.490,
    "ministral-3-14b-2512": 13.51,
    "lfm2-350m": 0.3545, "lfm2-700m": 0.7425, "lfm2-1.2b": 1.170, "lfm2-2.6b": 2.569,
    "granite-3.0-2b": 2.534, "granite-3.0-8b": 8.171, "granite-3.1-2b": 2.534, "granite-3.1-8b": 8.171,
    "phi-3-mini-4k": 3.821, "phi-3-mini-128k": 3.821, "phi-3-medium-4k": 13.96, "phi-3-medium-128k": 13.96,
    "phi-3.5-mini": 3.821, "phi-4": 14.66, "phi-4-mini": 3.836, "smollm3-3b": 3.075,
    "mixtral-8x7b-v0.1": 46.70, "mixtral-8x22b-v0.1": 140.6, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.1,
    # As transformers counts them, without vision and without layers that predict several tokens.
    "qwen3-next-80b-a3b": 79.67, "qwen3.5-9b": 8.954, "qwen3.5-35b-a3b": 34.66, "olmo-hybrid-7b": 7.431,
    "olmoe-1b-7b-0924": 6.919, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.8,
}  # fmt: skip


def test_models_have_as_many_parameters_as_is_published():
    found = {name: architecture(name).num_parameters / 1e9 for name in MODELS}
    assert found == pytest.approx(PUBLISHED, rel=1e-3)


def test_a_token_meets_as_many_parameters_of_experts_as_is_published():
    active = {"mixtral-8x7b-v0.1": 12.88, "qwen3-30b-a3b": 3.35, "olmoe-1b-7b-0924": 1.282, "gpt-oss-20b": 4.19}
    found = {name: architecture(name).num_active_parameters / 1e9 for name in active}
    assert found == pytest.approx(active, rel=2e-3)
    assert architecture("qwen3-0.6b").num_active_parameters == architecture("qwen3-0.6b").num_parameters


@pytest.mark.parametrize(
    "name, known",
    {
        "Qwen/Qwen2-0.5B": "qwen2-0.5b",
        "Qwen/Qwen3-8B": "qwen3-8b",
        "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
        "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5-7b-instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
        "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": "llama-3.2-1b",
        "HuggingFaceH4/zephyr-7b-beta": "mistral-7b-v0.1",
        "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
        "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
        "mistral-7b": "mistral-7b-v0.3",
        "google/gemma-2-2b-it": "gemma-2-2b",
        "google/gemma-3-4b-pt": "gemma-3-4b",
        "Gemma-2-2B": "gemma-2-2b",
        "HuggingFaceTB/SmolLM3-3B-Base": "smollm3-3b",
        "ibm-granite/granite-3.3-8b-instruct": "granite-3.1-8b",
        "allenai/Olmo-3-7B-Think": "olmo-3-1025-7b",
        "LGAI-EXAONE/EXAONE-4.0-1.2B": "exaone-4.0-1.2b",
        "google/gemma-4-E2B-it": "gemma-4-e2b",
        "zai-org/GLM-4-32B-Base-0414": "glm-4-32b-0414",
        "mistralai/Ministral-3-8B-Instruct-2512": "ministral-3-8b-2512",
        "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini-4k",
        "allenai/OLMo-2-1124-7B-Instruct": "olmo-2-1124-7b",
    }.items(),
)
def test_models_are_known_by_their_ids_on_hugging_face(name, known):
    assert architecture(name).config == architecture(known).config


def test_a_llama_3_takes_8192_positions_and_a_3_1_takes_131072():
    assert [architecture(name).config.longest_sequence for name in ("llama-3-8b", "llama-3.1-8b")] == [8192, 131072]


@pytest.mark.parametrize(
    "name, meant",
    [("lama-3-8b", "llama-3-8b"), ("qwen2-0.5", "qwen2-0.5b"), ("google/gemma2-2b", "gemma-2-2b")],
)
def test_a_name_that_is_nearly_known_is_asked_for(name, meant):
    with pytest.raises(ValueError, match=f"is neither a file nor known. Did you mean '{meant}'"):
        architecture(name)


VARIANT_FIELDS = {  # of config.json on Hugging Face: positions, tied head, dtype
    "Qwen/Qwen2.5-7B": (131072, False, "bfloat16"),
    "Qwen/Qwen2.5-7B-Instruct": (32768, False, "bfloat16"),
    "Qwen/Qwen2.5-Math-1.5B": (4096, True, "bfloat16"),
    "Qwen/Qwen3-8B-Base": (32768, False, "bfloat16"),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (131072, False, "bfloat16"),
    "meta-llama/Llama-2-7b-chat-hf": (4096, False, "float16"),
    "Qwen/Qwen3-VL-8B-Thinking": (262144, False, "bfloat16"),
    "Qwen/Qwen3-VL-2B-Instruct": (262144, True, "bfloat16"),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (131072, False, "bfloat16"),
    "google/gemma-2-9b": (8192, True, "float32"),
    "google/gemma-2-9b-it": (8192, True, "bfloat16"),
    "unsloth/gemma-2-9b-bnb-4bit": (8192, True, "bfloat16"),
}


@pytest.mark.parametrize("name", VARIANT_FIELDS)
def test_variants_of_a_size_keep_their_own_fields(name):
    found = architecture(name)
    fields = found.config.longest_sequence, found.config.tie_word_embeddings, found.dtype
    assert fields == VARIANT_FIELDS[name]


def test_every_variant_has_a_model():
    for name, (key, fields) in VARIANTS.items():
        assert key in MODELS and name not in MODELS
        assert architecture(name).config.num_hidden_layers == architecture(key).config.num_hidden_layers
        assert set(fields) <= {
            "max_position_embeddings",
            "tie_word_embeddings",
            "torch_dtype",
            "vocab_size",
            "rope_theta",
        }


@pytest.mark.parametrize(
    "name, kind",
    {
        "microsoft/Phi-3.5-MoE-instruct": "is a mixture of experts of another family",
        "Qwen/Qwen1.5-MoE-A2.7B": "is a mixture of experts of another family",
        "deepseek-ai/DeepSeek-R1": "is a mixture of experts",
        "state-spaces/mamba-2.8b": "is a state-space or recurrent model",
        "meta-llama/Llama-3.2-11B-Vision-Instruct": "is a model of images beside text",
        "Qwen/Qwen2.5-VL-7B-Instruct": "is a model of images beside text",
        "openai/whisper-large-v3": "is a model of sound",
        "google-t5/t5-small": "is an encoder with a decoder",
        "Qwen/Qwen3-Embedding-8B": "is an embedding or a reward model",
        "FacebookAI/roberta-base": "is an encoder",
        "EleutherAI/pythia-1b": "is of another family, 'pythia'",
        "gpt-5": "is a model whose weights are not public",
        "TheBloke/Llama-2-7B-GGUF": "has its weights in GGUF",
    }.items(),
)
def test_a_model_of_another_kind_is_called_by_its_kind(name, kind):
    with pytest.raises(ValueError) as refusal:
        architecture(name)
    assert kind in str(refusal.value) and "Did you mean" not in str(refusal.value)


def test_a_name_with_a_known_model_in_it_is_no_other_model():
    with pytest.raises(ValueError, match="If it was trained from 'llama-3.1-8b', plan with that name"):
        architecture("NousResearch/Hermes-3-Llama-3.1-8B")
    with pytest.raises(ValueError) as refusal:
        architecture("qwen3-11b")
    assert "Did you mean" not in str(refusal.value)  # no neighbour of another size
    with pytest.raises(ValueError, match="Did you mean 'mixtral-8x7b-v0.1'"):  # its family is here
        architecture("mistralai/Mixtral-8x7B-v9.9")


def test_a_checkpoint_of_bitsandbytes_keeps_its_codes(tmp_path):
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    values = MODELS["qwen2-0.5b"] | {"torch_dtype": "bfloat16", "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(values))
    least = dict(device="t4", lora=16, remat="full")
    found, named = (plan(name, **least) for name in (tmp_path, "unsloth/Qwen2-0.5B-bnb-4bit"))
    assert found.run.quantize == named.run.quantize == "nf4" and found.needed == named.needed
    assert found.needed < plan("qwen2-0.5b", **least).needed
    with pytest.raises(ValueError, match="has weights in nf4, and quantised weights cannot be trained"):
        plan(tmp_path, device="t4")
    with pytest.raises(ValueError, match="quantize='int8': .* has weights in nf4"):
        plan(tmp_path, device="t4", lora=16, quantize="int8")
    how["bnb_4bit_quant_type"] = "fp4"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="bnb_4bit_quant_type='fp4' must be 'nf4'"):
        plan(tmp_path, device="t4", lora=16)


def test_config_json_is_read(tmp_path):
    values = MODELS["qwen2-0.5b"] | {"num_hidden_layers": 2, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = architecture(tmp_path)
    layers = jax.tree.leaves(found.abstract()[1]["model"]["layers"])
    assert {leaf.shape[0] for leaf in layers} == {2}
    assert found.num_parameters == architecture(tmp_path / "config.json").num_parameters
    text = dict(model_type="gemma3_text", hidden_size=64, num_hidden_layers=2, vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert architecture(tmp_path).config.vocab_size == 512  # the language part of a model that also sees


def test_every_family_is_planned_from_its_config_json():
    """By the tiny checkpoints that transformers wrote."""
    planned = {plan(GOLDEN / case, batch=2, seq=8, device="h200").run.model.family for case in (*COMMITTED, *EXPERTS)}
    assert planned == set(FAMILIES.values())


def test_what_lies_in_a_folder_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2-0.5b").mkdir()
    assert architecture("qwen2-0.5b").config.num_hidden_layers == 24  # a folder without a config.json says nothing
    (tmp_path / "qwen2-0.5b" / "config.json").write_text(json.dumps(MODELS["qwen2-0.5b"] | {"num_hidden_layers": 3}))
    assert architecture("qwen2-0.5b").config.num_hidden_layers == 3


def test_sizes_without_end_are_refused_or_answered_in_a_moment(tmp_path):
    """In turn 5,000 layers slide and one does not: as modules these would take minutes."""
    sizes = dict(model_type="gemma3_text", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    many = dict(sizes, intermediate_size=128, num_hidden_layers=9999, sliding_window_pattern=5001, vocab_size=10**9)
    path = tmp_path / "config.json"
    start = time.process_time()
    path.write_text(json.dumps(many))
    layer = architecture(path)
    found = plan(path, batch=8, seq=128, device="h200")
    assert 9999 * 3 * 64 * 128 < layer.num_parameters - 64 * 10**9 < 9999 * 6 * 64 * 128 and not found.fits
    for field in ("num_hidden_layers", "vocab_size"):
        path.write_text(json.dumps(many | {field: 10**15}))
        with pytest.raises(ValueError, match=f"from {path}: {field}=1000000000000000 must be an int from 1 to"):
            plan(path, batch=8, seq=128, device="h200")
    assert time.process_time() - start < 3
