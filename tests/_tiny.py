"""A tiny checkpoint with its own tokenizer, in a folder as Hugging Face's are."""

import json
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from liger_jax.models import Qwen2Config, Qwen2ForCausalLM

WORDS = "one two three four five six seven eight nine ten".split()
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def checkpoint(folder: Path, vocab_size: int = 320, width: int = 16) -> Path:
    """Writes a model with random weights, a byte-level BPE trained on the words, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text(100)], trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=width, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    eos = tokenizer.token_to_id("<|endoftext|>")
    Qwen2ForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(folder, config_fields={"eos_token_id": eos})
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def text(count: int, begin: int = 0) -> str:
    """Words in a fixed order, so that each word tells the next."""
    return " ".join(WORDS[(begin + i) % len(WORDS)] for i in range(count))


def chats(count: int) -> str:
    """JSON lines of conversations, in which the assistant says the words that come next."""
    lines = []
    for i in range(count):
        answers = [{"role": "user", "content": text(2, i)}, {"role": "assistant", "content": text(3, i + 2)}]
        lines.append(json.dumps({"messages": [*answers, {"role": "user", "content": "and?"}, answers[1]]}))
    return "\n".join(lines)


def pairs(count: int) -> str:
    """JSON lines of pairs of conversations, whose chosen answers begin with "one", and the others with "six"."""
    lines = []
    for i in range(count):
        chosen, rejected = ([{"role": "assistant", "content": text(3 + i % 2, begin)}] for begin in (0, 5))
        asked = [{"role": "user", "content": text(2, i)}]
        lines.append(json.dumps({"prompt": asked, "chosen": chosen, "rejected": rejected}))
    return "\n".join(lines)


def prompts(count: int) -> str:
    """JSON lines of prompts, each with the letter that is rewarded."""
    return "\n".join(json.dumps({"prompt": text(2 + i % 3, i), "letter": "e"}) for i in range(count))


def answers(count: int) -> str:
    """JSON lines of single answers with labels, of which those that begin with "one" are good."""
    lines = []
    for i in range(count):
        good = i % 3 != 0
        asked, answer = text(2, i), text(3 + i % 2, 0 if good else 5)
        row = {"prompt": [{"role": "user", "content": asked}], "label": good}
        lines.append(json.dumps(row | {"completion": [{"role": "assistant", "content": answer}]}))
    return "\n".join(lines)
