"""Small checkpoints of Hugging Face's own models, and what these compute with them.

    python -m tests.models._hugging_face

writes the folders of `golden/`, with PyTorch and transformers. The tests read them where neither is installed, and make
fresh ones where both are.
"""

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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 6, "num_key_value_heads": 4}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
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
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
}
COMMITTED = ("llama", "qwen2", "llama_tied")


class Expected(NamedTuple):
    """Of tokens (B, T) with labels (B, T): float32 logits, loss, and gradients by the names of the checkpoint."""

    tokens: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    loss: np.ndarray
    gradients: dict[str, np.ndarray]


def make(case: str, folder: pathlib.Path, seed: int) -> Expected:
    """Writes a random model of the case, and returns what it computes."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.manual_seed(seed)
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (2, 20))
    labels = np.where(rng.random(tokens.shape) < 0.2, -100, tokens)
    out = model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels))
    out.loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return Expected(tokens, labels, out.logits.detach().numpy(), out.loss.detach().numpy(), gradients)


def committed(case: str) -> tuple[pathlib.Path, Expected]:
    """A folder of `golden/` and what its model computes."""
    arrays = load_file(GOLDEN / case / EXPECTED)
    gradients = {name[len("gradient ") :]: x for name, x in arrays.items() if name.startswith("gradient ")}
    others = {name: x for name, x in arrays.items() if name in Expected._fields}
    return GOLDEN / case, Expected(**others, gradients=gradients)


def main():
    for case in COMMITTED:
        expected = make(case, GOLDEN / case, seed=0)
        arrays = {f"gradient {name}": x for name, x in expected.gradients.items()}
        arrays |= {name: np.asarray(x) for name, x in expected._asdict().items() if name != "gradients"}
        save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, GOLDEN / case / EXPECTED)
        (GOLDEN / case / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
