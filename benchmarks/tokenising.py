"""Tokenising a run's data beside the tokenizer's `encode_batch` alone, on texts of as many bytes.

The data is Python's standard library: texts of some 1,500 characters, conversations of one to three turns of them,
and prompts with completions. The tokenizer is a byte-level BPE of 16,000 tokens that is trained on a part
of it. A run's tokenising reads JSON lines, renders conversations, makes labels, and writes tokens with their digests.
Both run in turns in one process, and figures are medians. Beside the rates stands the processor's time of all threads.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Plain
from tokenizers import decoders, models, pre_tokenizers, trainers

from liger_jax.data import reading, token_cache
from liger_jax.data.sources import data_sources
from liger_jax.data.tokenizer import Tokenizer

CHARACTERS, TOGETHER, LENGTH = 1500, 1024, 2048
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Prints a row for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns of which medians are taken")
    parser.add_argument("--megabytes", type=int, default=8, help="of each kind of data")
    options = parser.parse_args()
    print("| data | MB | encode_batch, MB/s | ours, MB/s | ratio | processor's s, alone | ours | beyond, ms/MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        write_checkpoint(place)
        for kind, rows in (("texts", texts()), ("conversations", conversations()), ("completions", completions())):
            measure(place, kind, rows, options)


def measure(folder: pathlib.Path, kind: str, rows: Iterator[dict[str, Any]], options: argparse.Namespace) -> None:
    """Times both on rows of one kind."""
    path, size, plain = folder / f"{kind}.jsonl", 0, []
    with path.open("w") as file:
        while size < options.megabytes * 10**6:
            row = next(rows)
            plain.append(printed(row))
            size += len(plain[-1].encode())
            file.write(json.dumps(row) + "\n")
    alone, ours = [], []
    for _ in range(options.turns):
        tokenizer = Tokenizer(str(folder), 16_000, [])
        alone.append(timed(lambda tokenizer=tokenizer: encode(tokenizer, plain)))
        ours.append(timed(lambda tokenizer=tokenizer: tokenise(tokenizer, folder, path)))
    seconds, processor = ([statistics.median(each[i] for each in both) for both in (alone, ours)] for i in range(2))
    rates, mb = [size / 1e6 / each for each in seconds], size / 1e6
    print(
        f"| {kind} | {mb:.1f} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.2f} | {processor[0]:.2f} | "
        f"{processor[1]:.2f} | {(processor[1] - processor[0]) / mb * 1000:.0f} |",
        flush=True,
    )


def encode(tokenizer: Tokenizer, plain: list[str]) -> None:
    """The tokenizer alone, with as many texts at a time as a run."""
    for begin in range(0, len(plain), TOGETHER):
        tokenizer._tokenizer.encode_batch(plain[begin : begin + TOGETHER])


def tokenise(tokenizer: Tokenizer, folder: pathlib.Path, path: pathlib.Path) -> None:
    """What a run does before its first step."""
    read = lambda source: reading.documents_of(source, None, None, None)
    token_cache.write(folder / "tokens", "key", data_sources([str(path)]), read, tokenizer, LENGTH)


def timed(call: Any) -> tuple[float, float]:
    """Seconds, and the processor's."""
    began, of_processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - of_processor


def write_checkpoint(folder: pathlib.Path) -> None:
    """Writes the tokenizer's files."""
    tokenizer = Plain(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=[END, TURN, TURN_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(itertools.islice(chunks(), 2000), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def chunks() -> Iterator[str]:
    """Texts of the standard library, over and over."""
    while True:
        for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = path.read_text(errors="ignore")
            yield from (text[at : at + CHARACTERS] for at in range(0, len(text), CHARACTERS))


def texts() -> Iterator[dict[str, Any]]:
    """Rows of texts."""
    return ({"text": chunk} for chunk in chunks())


def conversations() -> Iterator[dict[str, Any]]:
    """Rows of conversations, whose questions are short."""
    each = chunks()
    for turns in itertools.cycle((1, 1, 2, 3)):
        pairs = [(next(each)[:300], next(each)) for _ in range(turns)]
        roles = ("user", "assistant")
        yield {
            "messages": [
                dict(role=role, content=text) for pair in pairs for role, text in zip(roles, pair, strict=True)
            ]
        }


def completions() -> Iterator[dict[str, Any]]:
    """Rows of prompts and completions."""
    each = chunks()
    while True:
        yield {"prompt": next(each)[:300], "completion": next(each)}


def printed(row: dict[str, Any]) -> str:
    """The text that a row becomes."""
    if "messages" in row:
        return "".join(f"{TURN}{m['role']}\n{m['content']}{TURN_END}\n" for m in row["messages"])
    return row["text"] if "text" in row else row["prompt"] + row["completion"]


if __name__ == "__main__":
    main()
