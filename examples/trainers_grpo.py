"""`trainers.grpo` on a model of letters, from nothing to the picture of its reward, on a CPU in less than two minutes.

    python -m examples.trainers_grpo [--steps 150]

A prompt says `write c:`, and the reward is the share of the answer that is the letter c. The model starts with random
weights and learns from the reward alone. The program writes the model, the run's `log.csv` and grpo.png to its folder
(--out). The picture shows the mean reward, and how much the rewards of one prompt's answers differ.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import all_flags, needed_packages, run

with needed_packages(__name__):
    import string

    from flax import nnx
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from examples._lib import report
    from liger_jax import trainers
    from liger_jax.models import Qwen2Config, Qwen2ForCausalLM

LETTERS = "abcd"


def named_letter(completions: list[str], letter: list[str]) -> list[float]:
    """The reward: the share of each completion that is its letter.

    Args:
        completions: texts.
        letter: the field `letter` of each completion's line.

    Returns:
        A number for each completion.
    """
    return [text.count(own) / max(1, len(text)) for text, own in zip(completions, letter, strict=True)]


def main(argv: list[str] | None = None) -> list[float]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The mean reward of each step.
    """
    flags = all_flags(argparse.ArgumentParser(), argv, 150, "runs/trainers_grpo")
    folder: Path = flags.out
    make_model(folder / "letters")
    result = trainers.grpo(
        folder / "letters",
        [{"prompt": f"write {letter}:", "letter": letter} for letter in LETTERS * 2],
        rewards=[named_letter],
        out=folder,
        fresh=True,
        steps=flags.steps,
        every=1000,
        batch=64,
        group=8,
        micro_batches=4,
        prompt_length=16,
        completion_length=4,
        learning_rate=3e-3,
        schedule="constant",
    )
    rewards, spreads = (result.metrics[name].tolist() for name in ("reward", "reward_std"))
    steps, few = range(1, len(rewards) + 1), max(1, len(rewards) // 10)
    print(f"mean reward: {sum(rewards[:few]) / few:.2f} → {sum(rewards[-few:]) / few:.2f}")
    panels = {
        "mean reward": {"sampled answers": (steps, rewards)},
        "standard deviation of the reward": {"answers to one prompt": (steps, spreads)},
    }
    report.curves(panels, "GRPO: the named letter becomes likelier", folder / "grpo.png")
    return rewards


def make_model(folder: Path) -> None:
    """Writes a model of random weights, whose tokens are characters.

    Args:
        folder: where its files go.
    """
    characters = ["<end>", *string.ascii_lowercase, " ", ":"]
    tokenizer = Tokenizer(models.WordLevel({each: i for i, each in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    config = Qwen2Config(
        vocab_size=len(characters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    Qwen2ForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(folder, config_fields={"eos_token_id": 0})
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(run(main))
