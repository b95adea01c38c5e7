"""What options of other trainers are here where no option has their meaning, or one has another measure."""

from collections.abc import Container

_DPO = "--cpo-alpha"  # an option that its command alone has
_REFERENCE = "The reference is the model as the run finds it, and needs no option"
# By the options' names: an option of the commands that are meant, and what is to be said.
_TOLD = {
    "--beta": ("--search", "plan reads none of the options of dpo's loss, nor that loss: leave them out"),
    "--max-length": (
        _DPO,
        "--length counts both answers of a pair, each behind its prompt: pass twice as much as for one",
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
    "--loss-type": (_DPO, "It is --loss"),
    "--reward-funcs": (
        "--reward",
        "It is --reward module:function, and a function takes the completions of one prompt",
    ),
    "--bf16": (
        "--param-dtype",
        "bfloat16 is the default of --dtype; --param-dtype bfloat16 holds weights so, too",
    ),
    "--fp16": ("--param-dtype", "There is no float16 training: bfloat16 is the default of --dtype"),
    "--per-device-train-batch-size": (
        "--batch",
        "It is --batch, the whole step's rows over all devices and micro-batches",
    ),
    "--resume-from-checkpoint": ("--fresh", "Repeat the same command: it goes on from its newest checkpoint"),
    "--reward-weights": ("--reward", "A weight stands behind its function: --reward module:function=0.5"),
}

# By an option and one of its values: what is to be said of a value that it does not have.
_VALUES = {
    ("--loss", "logits"): "plan's --loss says whether a step's logits are held, and none of dpo's losses changes its "
    "answer: leave it out, and count both answers of a pair in --length",
}


def in_other_words(name: str, known: Container[str]) -> str:
    """A sentence about an option of other trainers.

    Args:
        name: what was typed.
        known: the command's options.

    Returns:
        The sentence behind a space; empty if there is nothing to say.

    Example:
        >>> in_other_words("--simpo_gamma", ["--cpo-alpha", "--gamma"]), in_other_words("--simpo-gamma", ["--data"])
        (' It is --gamma.', '')
    """
    of_command, told = _TOLD.get(name.replace("_", "-").lower(), ("", ""))
    return f" {told}." if told and of_command in known else ""


def value_in_other_words(name: str, values: Container[str]) -> str:
    """A sentence about a value that an option does not have.

    Args:
        name: the option.
        values: those that it has.

    Returns:
        The sentence behind a space; empty if there is nothing to say.
    """
    told = [each for (option, value), each in _VALUES.items() if option == name and value in values]
    return f" {told[0]}." if told else ""
