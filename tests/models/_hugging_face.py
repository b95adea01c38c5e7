"""Small checkpoints of Hugging Face's own models, and what these compute with them.

    python -m tests.models._hugging_face qwen3

writes this folder of `golden/`, or without a case all of them, with PyTorch and transformers. The tests read them where
neither is installed, and make fresh ones where both are.
"""

import argparse
import importlib
import pathlib
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = pathlib.Path(__file__).parent / "golden"
EXPECTED = "expected.safetensors"
SIZES = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    initializer_range=0.3,  # logits far from uniform
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8,
    rope_theta=500.0,
)
# A head of 8 columns, 6 of which are rotated; 20 tokens are more than in training, and a prompt of 8 is not.
LONG = dict(
    hidden_size=32,
    original_max_position_embeddings=12,
    rope_parameters=dict(
        rope_type="longrope",
        short_factor=[1.0, 1.5, 2.0],
        long_factor=[2.0, 5.0, 9.0],
        rope_theta=100.0,
        partial_rotary_factor=0.75,
    ),
)
# No padding token: PyTorch gives its row of the embedding no gradient, and starts it at zero.
NO_IDS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
GEMMA = dict(head_dim=6, tie_word_embeddings=True, pad_token_id=None)
# Softcaps that bend, where the family has them, and a scale of the scores that is not the head's.
WINDOW = dict(sliding_window=5, query_pre_attn_scalar=3)
# Heads of other widths in the layers with full attention.
GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, sliding_window=5, global_head_dim=8,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=29,
)  # fmt: skip
# Two of four experts, and a balancing loss that counts.
MOE = dict(NO_IDS, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.3)
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=100.0, truncate=False, beta_fast=4.0
)  # fmt: skip
YARN_BY_TYPE = dict(
    full_attention={**YARN, "truncate": True},
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
GROWTH = dict(original_max_position_embeddings=6, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=0.5)
DELTA_HEADS = dict(
    initializer_range=0.1,  # with 0.3 rounding is 1e-3 of some gradients: a norm divides small results of heads
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
)
DELTA = dict(
    DELTA_HEADS,
    head_dim=8,
    rope_parameters=dict(rope_theta=100.0, rope_type="default", partial_rotary_factor=0.5),
)
CONV = dict(norm_eps=1e-5, tie_word_embeddings=True, block_auto_adjust_ff_dim=True, block_multiple_of=8)
SHARED = dict(num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=12)
ALPHA = dict(rope_type="dynamic", factor=1.0, alpha=50.0)
MULTIPLIERS = dict(embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=1.7)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 6, "num_key_value_heads": 4}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama_dynamic": (  # longer than in training, where it begins to scale
        "Llama",
        {
            "max_position_embeddings": 12,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        },
    ),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 100.0,
            }
        },
    ),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_biases": ("Qwen3", {"attention_bias": True, "head_dim": 6}),
    "gemma2_biases": ("Gemma2", {**GEMMA, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "olmo2": ("Olmo2", NO_IDS),
    "olmo3": ("Olmo3", {**NO_IDS, "num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": YARN_BY_TYPE}),
    "olmo3_types": ("Olmo3", {**NO_IDS, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    "exaone4": ("Exaone4", {**NO_IDS, "num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": LLAMA3}),
    "exaone4_full": (
        "Exaone4",
        {**NO_IDS, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "hunyuan": ("HunYuanDenseV1", {**NO_IDS, "head_dim": 6, "rope_parameters": {**ALPHA, "rope_theta": 100.0}}),
    "hunyuan_biases": ("HunYuanDenseV1", {**NO_IDS, "head_dim": 4, "attention_bias": True}),
    "glm4": (
        "Glm4",
        {**NO_IDS, "head_dim": 8, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}},
    ),
    "glm4_plain": ("Glm4", {**NO_IDS, "head_dim": 4, "attention_bias": False, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3", {**NO_IDS, "head_dim": 6, "rope_parameters": {**YARN, **GROWTH, "truncate": True}}),
    "ministral3_window": ("Ministral3", {**NO_IDS, "head_dim": 6, "sliding_window": 5}),
    "granite": ("Granite", {**NO_IDS, **MULTIPLIERS}),
    "granite_tied": ("Granite", {**NO_IDS, **MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    "smollm3": ("SmolLM3", {**NO_IDS, "num_hidden_layers": 5, "no_rope_layer_interval": 2, "rope_parameters": LLAMA3}),
    "smollm3_window": (
        "SmolLM3",
        {**NO_IDS, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "phi3": ("Phi3", {**NO_IDS, **LONG, "sliding_window": 5}),
    "phi3_short": ("Phi3", {**NO_IDS, **LONG, "original_max_position_embeddings": 20}),
    "phi3_plain": (
        "Phi3",
        {**NO_IDS, "head_dim": 10, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.6}},
    ),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 4}),
    "mixtral_window": ("Mixtral", {**MOE, "num_local_experts": 3, "sliding_window": 5, "output_router_logits": False}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 6},
    ),
    "qwen3_moe_normalized": (
        "Qwen3Moe",
        {**MOE, "num_experts": 5, "moe_intermediate_size": 8, "norm_topk_prob": True, "num_hidden_layers": 3},
    ),
    "olmoe": ("Olmoe", {**MOE, "num_experts": 4}),
    "gpt_oss": (
        "GptOss",
        {**MOE, "num_local_experts": 4, "head_dim": 6, "sliding_window": 5, "rope_parameters": YARN},
    ),
    # One pattern of four layers, and one layer left over. Two heads of values share one of keys.
    "qwen3_next": ("Qwen3Next", {**MOE, **SHARED, **DELTA, "num_hidden_layers": 5}),
    "qwen3_next_dense": (
        "Qwen3Next",
        {
            **MOE,
            **SHARED,
            **DELTA,
            "linear_num_key_heads": 1,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "layer_types": ["linear_attention", "full_attention"],
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5": ("Qwen3_5", {**NO_IDS, **DELTA, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**MOE, **SHARED, **DELTA, "layer_types": ["full_attention", "linear_attention"]}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**NO_IDS, **DELTA_HEADS, "num_hidden_layers": 5, "rope_theta": None, "linear_allow_neg_eigval": False},
    ),
    "olmo_hybrid_rope": (
        "OlmoHybrid",
        {**NO_IDS, "initializer_range": 0.1, "layer_types": ["full_attention", "linear_attention"], "hidden_size": 32},
    ),
    "lfm2": (
        "Lfm2",
        {**NO_IDS, **CONV, "num_hidden_layers": 5, "full_attn_idxs": [1, 3]},
    ),
    "lfm2_biases": (
        "Lfm2",
        {**NO_IDS, **CONV, "conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1], "block_multiple_of": 10},
    ),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", {**GEMMA, **WINDOW, "num_hidden_layers": 3}),  # one pattern of two, and one layer left over
    "gemma2_full": (
        "Gemma2",
        {
            **GEMMA,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("Gemma3", {**GEMMA, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma4": (
        "Gemma4",
        {**GEMMA, **GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "use_double_wide_mlp": True},
    ),
    "gemma4_keys": (
        "Gemma4",
        {**GEMMA, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {name: x for name, x in {**GEMMA, **GEMMA4}.items() if not name.endswith("per_layer_input")}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma3_pattern": (
        "Gemma3",
        {
            **GEMMA,
            **WINDOW,
            "num_hidden_layers": 8,  # one pattern of six, and two layers left over
            "query_pre_attn_scalar": 200,  # eight layers of sharp attention make 1e-3 of float32's rounding
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "qwen3_next", "qwen3_5_moe")
COMMITTED = (
    "llama",
    "qwen2",
    "gemma2",
    "gemma3",
    "gemma4",
    "olmo2",
    "granite",
    "phi3",
    "exaone4",
    "glm4",
    "hunyuan",
    "ministral3",
    "olmo3",
    "smollm3",
    "qwen3_5",
    "olmo_hybrid",
    "lfm2",
    "llama_tied",
    "gemma",
    "qwen3",
    "mistral",
    "llama_biases",
)


PROMPT = np.array([[1] * 8, [0] * 3 + [1] * 5])  # the mask of `tokens`' first positions; the second row is padded


class Expected(NamedTuple):
    """Float32 logits, loss, and gradients by the checkpoint's names, for tokens (B, T) with labels (B, T).

    `bfloat16_errors` are the `rms_error`s of logits and gradients of the same model in bfloat16. `greedy` are the
    likeliest tokens after those that `PROMPT` masks.
    """

    tokens: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    loss: np.ndarray
    bfloat16_errors: np.ndarray
    greedy: np.ndarray
    gradients: dict[str, np.ndarray]


def rms_error(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """The root mean square over all numbers, each as a share of its array's largest."""
    assert found.keys() == exact.keys()
    largest = lambda name: np.abs(exact[name]).max() or 1.0  # an expert that no token chose has no gradient
    errors = [(np.asarray(x, np.float64) - exact[name]) / largest(name) for name, x in found.items()]
    return float(np.sqrt(np.mean(np.concatenate([error.ravel() for error in errors]) ** 2)))


def make(case: str, folder: pathlib.Path, seed: int) -> Expected:
    """Writes a random model of the case, and returns what it computes."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.manual_seed(seed)
    family, options = CASES[case]
    text = "Text" if family in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe") else ""
    fields = {**SIZES, **options}
    if family == "Qwen3_5Moe":  # in which no layer is dense
        del fields["intermediate_size"]
    config = getattr(transformers, f"{family}{text}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    model.set_attn_implementation("eager")  # the other ones ignore softcaps in some versions of transformers
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        if name.endswith("A_log"):  # a state that decays too fast has gradients of rounding errors
            torch.nn.init.normal_(parameter, -1.0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    model.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (2, 20))
    labels = np.where(rng.random(tokens.shape) < 0.2, -100, tokens)

    def run(model):
        out = model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels))
        out.loss.backward()
        gradients = {}
        for name, p in model.named_parameters():
            gradients |= as_in_files(family, name, p.grad.float().numpy())
        return out.logits.detach().float().numpy(), out.loss.detach().numpy(), gradients

    logits, loss, gradients = run(model)
    prompt, mask = torch.from_numpy(tokens[:, : PROMPT.shape[1]]), torch.from_numpy(PROMPT)
    has_router_loss, model.config.output_router_logits = getattr(model.config, "output_router_logits", False), False
    greedy = model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    model.config.output_router_logits = has_router_loss  # which transformers cannot form beside a cache
    model.zero_grad()
    rough_logits, _, rough_gradients = run(model.bfloat16())
    errors = rms_error({"": rough_logits}, {"": logits}), rms_error(rough_gradients, gradients)
    return Expected(tokens, labels, logits, loss, np.asarray(errors), greedy[:, PROMPT.shape[1] :].numpy(), gradients)


def as_in_files(family: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter of transformers by its names in files, where experts have tensors of their own."""
    if family == "Mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    stem, _, last = name.rpartition(".")
    if family == "GptOss" or not stem.endswith(".experts"):
        return {name: array}
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
    if family == "Mixtral":
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[last]
    parts = np.split(array, len(names), axis=1)
    return {
        f"{stem}.{e}.{own}.weight": part[e] for own, part in zip(names, parts, strict=True) for e in range(len(array))
    }


def committed(case: str) -> tuple[pathlib.Path, Expected]:
    """A folder of `golden/` and what its model computes."""
    arrays = load_file(GOLDEN / case / EXPECTED)
    gradients = {name[len("gradient ") :]: x for name, x in arrays.items() if name.startswith("gradient ")}
    others = {name: x for name, x in arrays.items() if name in Expected._fields}
    return GOLDEN / case, Expected(**others, gradients=gradients)


def main():
    known = (*COMMITTED, *EXPERTS)
    parser = argparse.ArgumentParser(description="Writes the folders of tests/models/golden.")
    parser.add_argument("case", nargs="*", help=f"the cases to write, of {', '.join(known)}; all without one")
    cases = parser.parse_args().case
    if unknown := {*cases} - {*known}:
        parser.error(f"{', '.join(sorted(unknown))}: not in COMMITTED and not in EXPERTS. Add it there.")
    for case in cases or known:
        expected = make(case, GOLDEN / case, seed=0)
        arrays = {f"gradient {name}": x for name, x in expected.gradients.items()}
        arrays |= {name: np.asarray(x) for name, x in expected._asdict().items() if name != "gradients"}
        save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, GOLDEN / case / EXPECTED)
        (GOLDEN / case / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
