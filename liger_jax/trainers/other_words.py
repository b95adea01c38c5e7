"""Options of other trainers: the names that they have here, and an answer where there is no such option."""

import difflib
from collections.abc import Container, Iterable

# Other trainers' names of options. Each has the options here that may be meant, of which a command has one or none.
ELSEWHERE = {
    "--lr": ("--learning-rate",),
    "--max-steps": ("--steps",),
    "--num-steps": ("--steps",),
    "--num-train-epochs": ("--epochs",),
    "--num-epochs": ("--epochs",),
    "--batch-size": ("--batch",),
    "--bs": ("--batch",),
    "--gradient-accumulation-steps": ("--micro-batches",),
    "--grad-accum": ("--micro-batches",),
    "--max-length": ("--length", "--seq", "--max-new-tokens"),
    "--max-seq-length": ("--length", "--seq"),
    "--seq-len": ("--length", "--seq"),
    "--seq-length": ("--length", "--seq"),
    "--cutoff-len": ("--length",),
    "--max-tokens": ("--max-new-tokens",),
    "--model-name-or-path": ("--model",),
    "--base-model": ("--model",),
    "--dataset": ("--data",),
    "--dataset-name": ("--data",),
    "--train-file": ("--data",),
    "--train-dataset": ("--data",),
    "--eval-dataset": ("--eval-data",),
    "--text-column": ("--column",),
    "--dataset-text-field": ("--column",),
    "--packing": ("--pack",),
    "--output": ("--out",),
    "--output-dir": ("--out",),
    "--rank": ("--lora",),
    "--lora-r": ("--lora",),
    "--lora-rank": ("--lora",),
    "--use-peft": ("--lora",),
    "--load-in-4bit": ("--quantize",),
    "--load-in-8bit": ("--quantize",),
    "--gradient-checkpointing": ("--remat",),
    "--scheduler": ("--schedule",),
    "--lr-scheduler": ("--schedule",),
    "--lr-scheduler-type": ("--schedule",),
    "--warmup-ratio": ("--warmup",),
    "--warmup-steps": ("--warmup",),
    "--wd": ("--weight-decay",),
    "--max-grad-norm": ("--clip",),
    "--grad-clip": ("--clip",),
    "--save-total-limit": ("--keep",),
    "--save-steps": ("--every",),
    "--eval-steps": ("--every",),
    "--early-stopping": ("--patience",),
    "--early-stopping-patience": ("--patience",),
    "--target-modules": ("--lora-targets",),
    "--lora-target-modules": ("--lora-targets",),
    "--r": ("--lora",),
    "--optim": ("--optimizer",),
    "--loss-type": ("--divergence",),
    "--report-to": ("--log",),
    "--push-to-hub": ("--push",),
    "--hub-model-id": ("--push",),
    "--overwrite-output-dir": ("--fresh",),
    "--accelerator": ("--device",),
    "--peft-config": ("--lora",),
    "--use-rslora": ("--rslora",),
    "--use-dora": ("--dora",),
    "--num-generations": ("--group",),
    "--max-prompt-length": ("--prompt-length",),
    "--max-completion-length": ("--completion-length",),
    "--num-iterations": ("--updates",),
    "--scale-rewards": ("--advantages",),
    "--epsilon": ("--epsilon-low",),
    "--importance-sampling-level": ("--importance-level",),
    "--vllm-importance-sampling-mode": ("--importance-sampling",),
    "--vllm-importance-sampling-cap": ("--importance-max",),
    "--vllm-importance-sampling-clip-max": ("--importance-max",),
    "--mask-truncated-completions": ("--mask-truncated",),
    "--log-completions": ("--samples",),
    "--num-completions-to-print": ("--samples",),
}
_DPO = "--cpo-alpha"  # an option that its command alone has
_REFERENCE = "The reference is the model as the run finds it, and needs no option"
_TEMPLATE = "The chat template is the tokenizer's: put another one into chat_template.jinja in the model's folder"
# By an option's name: an option that only the commands have which are meant, and the sentence to print.
_HINTS = {
    "--beta": ("--search", "plan reads none of the options of dpo's loss, nor that loss: leave them out"),
    "--max-length": (
        _DPO,
        "--length counts both answers of a pair, each after its prompt: pass twice as much as for one",
    ),
    "--max-prompt-length": (_DPO, "A pair that is longer than --length is cut at its end"),
    "--max-completion-length": (_DPO, "A pair that is longer than --length is cut at its end"),
    "--truncation-mode": (_DPO, "A pair that is longer than --length is cut at its end"),
    "--ref-model": (_DPO, _REFERENCE),
    "--ref-adapter-name": (_DPO, _REFERENCE),
    "--model-adapter-name": (_DPO, "Pass the adapters' folder as --model"),
    "--precompute-ref-log-probs": (_DPO, "That is done wherever adapters cannot be switched off for the reference"),
    "--sync-ref-model": (_DPO, "The reference stays. Start once more from the result, which is then its own reference"),
    "--rpo-alpha": (_DPO, "It is --loss sigmoid,sft --loss-weights 1,ALPHA"),
    "--simpo-gamma": (_DPO, "It is --gamma"),
    "--alpha": (_DPO, "It is --lora-alpha of adapters, and --reward-alpha of --loss alphapo"),
    "--loss-type": (_DPO, "It is --loss"),
    "--reward-funcs": ("--reward", "It is --reward, which takes functions as TRL calls them"),
    "--bf16": ("--param-dtype", "bfloat16 is the default of --dtype; --param-dtype bfloat16 holds weights so, too"),
    "--fp16": ("--param-dtype", "There is no float16 training: bfloat16 is the default of --dtype"),
    "--per-device-train-batch-size": (
        "--batch",
        "It is --batch, the whole step's rows over all devices and micro-batches",
    ),
    "--resume-from-checkpoint": ("--fresh", "Repeat the same command: it goes on from its newest checkpoint"),
    "--reward-weights": ("--reward", "A weight follows its function: --reward module:function=0.5"),
    "--torch-dtype": ("--param-dtype", "Weights have --param-dtype, and the computation has --dtype"),
    "--chat-template": ("--check", _TEMPLATE),
    "--chat-template-path": ("--check", _TEMPLATE),
    "--group-by-length": ("--pack", "Documents of a step share rows; with --pack so do those of the whole data"),
}
_TRAINS = "--fresh"  # an option that all commands that train have, and no other command
_MESH = "Devices are given by --mesh, such as --mesh fsdp=4"
_ANSWERS = "That is the default: of conversations and completions only the answers are trained on"
_PYTHON = "No command has it: in Python add_lora takes patterns of ranks and layers, train_more whole modules"
_BETAS = "No command changes it: beta1 is 0.9, beta2 0.999 and epsilon 1e-8"
# The sentences of all commands that train, where `_HINTS` has none.
_HINTS_OF_TRAINERS = {
    "--deepspeed": f"There is no DeepSpeed here. {_MESH}",
    "--fsdp": _MESH,
    "--fsdp-config": _MESH,
    "--ddp-backend": _MESH,
    "--load-best-model-at-end": "The result is the last step's, or by --patience the best one's; --result-of STEP "
    "makes one of a checkpoint that is kept",
    "--eval-strategy": "Held-out rows are scored at each checkpoint, after --every steps",
    "--save-strategy": "There is a checkpoint after --every steps, and one at the end",
    "--assistant-only-loss": _ANSWERS,
    "--completion-only-loss": _ANSWERS,
    "--train-on-responses-only": _ANSWERS,
    "--use-liger-kernel": "The models call their kernels by themselves",
    "--attn-implementation": "Attention's kernel is chosen for the device",
    "--neftune-noise-alpha": "There is no noise on embeddings here",
    "--label-smoothing-factor": "No command smooths the labels of tokens; the losses do in Python, by label_smoothing=",
    "--adam-beta1": _BETAS,
    "--adam-beta2": _BETAS,
    "--adam-epsilon": _BETAS,
    "--modules-to-save": _PYTHON,
    "--rank-pattern": _PYTHON,
    "--alpha-pattern": _PYTHON,
    "--layers-to-transform": _PYTHON,
    "--init-lora-weights": "There is one way: A is drawn and B is 0, as by PEFT's default",
    "--chat-template": _TEMPLATE,
    "--chat-template-path": _TEMPLATE,
    "--processing-class": "The tokenizer is the model's own",
    "--logging-steps": "Each step's figures are in log.csv",
}
_VALUES = {  # of other trainers
    "constant_with_warmup": "It is constant with --warmup",
    "polynomial": "It is linear",
    "adamw_torch": "It is adamw",
    "adamw_torch_fused": "It is adamw",
    "adamw_bnb_8bit": "It is adamw8bit",
    "paged_adamw_8bit": "It is adamw8bit",
    "sgd": "No command has it: in Python make_step takes any optimizer of optax's",
    "adafactor": "No command has it: in Python make_step takes any optimizer of optax's",
    "lion": "No command has it: in Python make_step takes any optimizer of optax's",
    "muon": "No command has it: in Python make_step takes any optimizer of optax's",
    "chunked_nll": "It is nll, which holds no logits",
}
_COMMANDS = {  # what other packages call a command, or a method is called
    "sft": "finetune", "train": "finetune", "fit": "finetune", "pretrain": "finetune", "lora": "finetune --lora",
    "qlora": "finetune --lora --quantize nf4", "kto": "dpo --loss kto", "orpo": "dpo --loss orpo",
    "simpo": "dpo --loss simpo", "alphapo": "dpo --loss alphapo", "cpo": "dpo --loss cpo", "ipo": "dpo --loss ipo",
    "rloo": "grpo --advantages rloo",
    "ppo": "grpo", "rl": "grpo", "rlhf": "grpo", "gkd": "distill", "kd": "distill", "inference": "generate",
    "infer": "generate", "predict": "generate", "complete": "generate", "memory": "plan", "estimate": "plan",
    "info": "doctor", "env": "doctor", "eval": "finetune --eval-data FILE --steps 1", "merge": "finetune --merge",
    "export": "finetune --result-of STEP", "push": "finetune --push ID", "upload": "finetune --push ID",
}  # fmt: skip
# By an option and one of its values: the sentence for a value that it does not have.
_VALUES_OF = {
    ("--loss", "logits"): "plan's --loss says whether a step's logits are held, and none of dpo's losses changes its "
    "answer: leave it out, and count both answers of a pair in --length"
}


def meant(name: str, known: Iterable[str]) -> str:
    """A question that names what was meant.

    >>> meant("--modle", ["--model", "--data"]), meant("--lr", ["--learning-rate"]), meant("--bs", ["--out"])
    (' Did you mean --model?', ' Did you mean --learning-rate?', '')
    """
    known = list(known)
    spelled = name.replace("_", "-").lower()
    near = [spelled] if spelled in known else [each for each in ELSEWHERE.get(spelled, ()) if each in known]
    near = near or [each for each in known if each.startswith(spelled) and len(spelled) > 3]
    near = near or difflib.get_close_matches(spelled, known, n=1, cutoff=0.7)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def in_other_words(name: str, known: Container[str]) -> str:
    """A sentence about an option of other trainers.

    >>> in_other_words("--simpo_gamma", ["--cpo-alpha", "--gamma"]), in_other_words("--simpo-gamma", ["--data"])
    (' It is --gamma.', '')
    """
    name = name.replace("_", "-").lower()
    of_command, hints = _HINTS.get(name, ("", ""))
    if of_command not in known:
        hints = _HINTS_OF_TRAINERS.get(name, "") if _TRAINS in known else ""
    return f" {hints}." if hints else ""


def value_in_other_words(value: str) -> str:
    """A sentence about a value that other trainers take.

    >>> value_in_other_words("constant_with_warmup"), value_in_other_words("cosine")
    ('. It is constant with --warmup.', '')
    """
    return f". {_VALUES[value]}." if value in _VALUES else ""


def command_in_other_words(name: str) -> str:
    """A question that names a command by its name elsewhere.

    >>> command_in_other_words("kto"), command_in_other_words("fintune")
    (' Did you mean liger-jax dpo --loss kto?', '')
    """
    return f" Did you mean liger-jax {_COMMANDS[name.lower()]}?" if name.lower() in _COMMANDS else ""


def value_of_another_command(option: str, values: Container[str]) -> str:
    """A sentence about a value that an option does not have, and the same option of another command has."""
    hints = [each for (name, own), each in _VALUES_OF.items() if option == name and own in values]
    return f". {hints[0]}." if hints else ""
