"""Unsloth's training step of adapters, on a checkpoint of random weights."""

import importlib
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks import _hugging_face, tokenising

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The library counts its loads on the hub, and waits for it where there is none.
OFFLINE = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}


def write_checkpoint(folder: pathlib.Path, values: dict[str, Any]) -> None:
    """Random bfloat16 weights in transformers' files, beside a tokenizer. `values`: config.json."""
    tokenising.write_checkpoint(folder)
    _hugging_face.random_model(values).save_pretrained(folder)


def training_step(
    folder: pathlib.Path,
    tokens: np.ndarray,
    *,
    four_bits: bool,
    recomputed: bool,
    learning_rate: float,
    decay: float,
    rank: int,
) -> _hugging_face.Step:
    """The step of float32 adapters on all projections of the layers, which is the library's default.

    `folder`: a checkpoint. `tokens`: (B, T), which are the labels too. `four_bits`: whether the weights are made nf4.
    `recomputed`: by the library's checkpoints, which keep the layers' inputs on the host. `learning_rate`: AdamW's.
    `decay`: of the adapters.
    """
    os.environ.update(OFFLINE)
    maker = importlib.import_module("unsloth").FastLanguageModel  # before transformers, which it changes
    torch = importlib.import_module("torch")
    checkpoints = {"use_gradient_checkpointing": "unsloth" if recomputed else False}
    model, _ = maker.from_pretrained(
        str(folder),
        max_seq_length=tokens.shape[1],
        dtype=torch.bfloat16,
        load_in_4bit=four_bits,
        local_files_only=True,
        **checkpoints,
    )
    model = maker.get_peft_model(model, r=rank, lora_alpha=rank, target_modules=PROJECTIONS, **checkpoints)
    maker.for_training(model)
    ids = torch.tensor(tokens, dtype=torch.int64, device="cuda")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=decay, fused=True)

    def run():
        with torch.autocast("cuda", torch.bfloat16):  # as its trainer does
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    cuda = torch.cuda
    cuda.reset_peak_memory_stats()  # without what loading took
    return _hugging_face.Step(run, lambda _: cuda.synchronize(), cuda.max_memory_allocated, cuda.get_device_name())
