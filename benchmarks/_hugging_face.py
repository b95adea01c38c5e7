"""A training step of a Hugging Face model in torch: as it is, with Liger's kernels, compiled, recomputed, adapters."""

import importlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Step(NamedTuple):
    """What is measured, of ours and of others."""

    run: Callable[[], Any]  # makes one step, and returns its loss
    wait: Callable[[Any], Any]  # until that step has ended
    peak_bytes: Callable[[], int | None]  # the most that this process has held at once; None on a CPU
    device: str
    needed_bytes: int | None = None  # by the compiler


def patch_with_liger(model_type: str) -> None:
    """Replaces modules of transformers by Liger's, with Liger's defaults; before a model is made."""
    getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{model_type}")()


def random_model(values: dict[str, Any]) -> Any:
    """A model in bfloat16, on the GPU if there is one. `values`: config.json."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        values = json.loads(json.dumps(values))  # lists rather than tuples, as out of the file
        config = transformers.AutoConfig.for_model(**values, use_cache=False)
        # Attention is transformers' choice, torch's fused one; but that has no softcap, and transformers 5.17 leaves it
        # out of a Gemma 2 without a word.
        attention = "eager" if values.get("attn_logit_softcapping") else None
        # Of transformers' ways to run experts the one over torch's grouped products, which is its fastest.
        experts = {"experts_implementation": "grouped_mm"} if values.get("num_experts_per_tok") else {}
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention, **experts
        )


def training_step(
    values: dict[str, Any],
    tokens: np.ndarray,
    *,
    compiled: bool,
    recomputed: bool,
    learning_rate: float,
    decay: float,
    rank: int | None = None,
) -> Step:
    """The step of a random model in bfloat16, AdamW's state too.

    `values`: config.json. `tokens`: (B, T), which are the labels too. `compiled`: by torch.compile. `recomputed`: with
    gradient checkpointing. `learning_rate`: AdamW's. `decay`: the weights' decay. `rank`: of adapters on all
    projections of layers, which alone are trained; PEFT's, in bfloat16. None for none.
    """
    torch = importlib.import_module("torch")
    cuda = torch.cuda if torch.cuda.is_available() else None
    model = random_model(values).train()
    ids = torch.tensor(tokens, dtype=torch.int64, device="cuda" if cuda else "cpu")
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if rank is not None:
        peft = importlib.import_module("peft")
        adapters = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=decay, fused=True)
    call = torch.compile(model) if compiled else model

    def run():
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if cuda is None:
        return Step(run, lambda _: None, lambda: None, "cpu")
    return Step(run, lambda _: cuda.synchronize(), cuda.max_memory_allocated, cuda.get_device_name())


class Generation(NamedTuple):
    """A generation of transformers."""

    # of new tokens, temperature and top_p or None for the likeliest, and the tokens that end a row
    run: Callable[[int, dict[str, float] | None, list[int]], Any]
    wait: Callable[[Any], Any]
    device: str


def generation(values: dict[str, Any], prompts: np.ndarray) -> Generation:
    """Generation by a random model in bfloat16, with a static cache; on a GPU transformers compiles its steps.

    `values`: config.json. `prompts`: (B, T).
    """
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    cuda = torch.cuda if torch.cuda.is_available() else None
    with torch.device("cuda" if cuda else "cpu"):
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(values)))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.tensor(prompts, dtype=torch.int64)
        mask = torch.ones_like(ids)
    model.generation_config.pad_token_id = 0

    def run(new, sampled, stops):
        model.generation_config.eos_token_id = stops or None
        torch.manual_seed(0)  # the same tokens again, up to the ends
        choice = {"do_sample": False} if sampled is None else {"do_sample": True, "top_k": 0, **sampled}
        options = dict(max_new_tokens=new, cache_implementation="static", **choice)
        return model.generate(input_ids=ids, attention_mask=mask, **options)

    if cuda is None:
        return Generation(run, lambda _: None, "cpu")
    return Generation(run, lambda _: cuda.synchronize(), cuda.get_device_name())
