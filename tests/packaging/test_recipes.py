"""The recipes of the pages: rows as they stand there are read, and the commands make of them what the page says."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from liger_jax.commands import main
from liger_jax.data import formats, preferences
from liger_jax.planner.planning import plan
from liger_jax.user_errors import UserError
from tests import _tiny

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def recipe(page: str) -> str:
    """The section of a page that goes from a data set to a result."""
    text = (DOCS / page).read_text(encoding="utf-8").partition("\n## From a data set to a result\n")[2]
    assert text, page
    return text.partition("\n## ")[0]


def rows(text: str) -> list[dict]:
    """The JSON objects of a text's blocks."""
    found, decoder = [], json.JSONDecoder()
    for block in FENCE.finditer(text):
        at, block = 0, block["text"].strip()
        while block.startswith("{") and at < len(block):
            row, end = decoder.raw_decode(block, at)
            found.append(row)
            at = end + len(block[end:]) - len(block[end:].lstrip())
    return found


def reader(page: str, row: dict):
    """What reads a row of a page."""
    if page == "dpo.md":
        return preferences.labelled if "label" in row else preferences.pair
    return formats.prompt if page == "grpo.md" else formats.document


@pytest.mark.parametrize("page, least", [("finetune.md", 1), ("dpo.md", 5), ("grpo.md", 1)])
def test_the_rows_of_a_page_are_read(page, least):
    found = rows((DOCS / page).read_text(encoding="utf-8"))
    assert len(found) >= least
    for row in found:
        assert reader(page, row)("the page's row", row)


def test_pairs_of_the_recipe_are_asked_once():
    (row,) = rows(recipe("dpo.md"))
    chosen: Any = preferences.pair("the page's row", row)
    for read, answer in ((chosen, "Red."), (chosen.rejected, "It is cold.")):
        assert [message["content"] for message in read.messages] == ["Name a warm colour.", answer]


PUBLISHED = {  # the columns of data sets, with made-up contents
    "roneneldan/TinyStories": {"text": "Once."},
    "trl-lib/Capybara": {
        "source": "s", "num_turns": 1,
        "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}],
    },
    "trl-lib/ultrafeedback_binarized": {
        "chosen": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}],
        "rejected": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "No."}],
        "score_chosen": 8.0, "score_rejected": 2.0,
    },
}  # fmt: skip


def test_data_sets_of_the_recipe_are_read_by_their_columns():
    commands = re.findall(r"^liger-jax (finetune|dpo) .*--data (\S+)", recipe("finetune.md"), re.MULTILINE)
    assert [name for _, name in commands] == [*PUBLISHED]
    for command, name in commands:
        read = preferences.pair if command == "dpo" else formats.document
        assert not read("a row", dict(PUBLISHED[name])).is_empty
    alpaca = {"instruction": "Say it.", "input": "", "output": "It.", "text": "Say it. It."}
    with pytest.raises(UserError, match="Choose one: --format alpaca or --format text."):
        formats.document("a row", alpaca)
    assert formats.document("a row", alpaca, form="alpaca").messages


def test_the_memory_of_the_recipe_is_that_of_the_planner():
    cells = re.findall(r"([\d.]+) GiB(?:; with `--quantize nf4` ([\d.]+))?", recipe("finetune.md"))
    told = [float(size) for of_row in cells for size in of_row if size]
    adapters = dict(batch=4, seq=2048, lora=16)
    asked = [
        ("qwen2-0.5b", dict(batch=8, seq=2048)),
        ("llama-3-8b", adapters),
        ("llama-3-8b", adapters | dict(quantize="nf4")),
        ("llama-3.2-1b", dict(batch=8, seq=4096, param_dtype="bfloat16")),
    ]
    least = lambda model, options: plan(model, **options, packed=True, remat="full", device="h200").totals["fused"]
    found = [least(*each) / 2**30 for each in asked]
    assert found == pytest.approx(told, abs=0.06)


def run(name: str, text: str, changes: dict[str, str]) -> int:
    """Runs the command of a page with other values for some of its options, and options besides."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"liger-jax {name} ")]
    arguments = shlex.split(line)[1:]
    for option, value in changes.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    return main(arguments)


def figures(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full
def test_pairs_become_adapters_by_the_command_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _tiny.checkpoint(tmp_path / "model")
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(recipe("dpo.md")) * 12))
    small = {"--model": "model", "--data": "pairs.jsonl", "--length": "128", "--batch": "2", "--steps": "2"}
    assert run("dpo", recipe("dpo.md"), small | {"--eval-share": "0.2", "--every": "2"}) == 0
    assert figures(Path("runs/feedback/log.csv"))[-1]["eval_rewards/accuracies"]
    assert Path("runs/feedback/adapters/adapter_model.safetensors").is_file()


@pytest.mark.full
def test_questions_become_adapters_by_the_command_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _tiny.checkpoint(tmp_path / "model")
    prepare, reward, attempt = [
        block["text"] for block in FENCE.finditer(recipe("grpo.md")) if block["kind"] == "python"
    ]
    exec(prepare, {})
    Path("solved.py").write_text(reward)
    small = {"--model": "model", "--steps": "2", "--group": "2", "--batch": "4", "--micro-batches": "2"}
    sizes = {"--prompt-length": "256", "--completion-length": "8"}
    assert run("grpo", recipe("grpo.md"), small | sizes) == 0
    assert [float(row["rewards/right/mean"]) for row in figures(Path("runs/sums/log.csv"))] == [0, 0]
    assert Path("runs/sums/adapters/adapter_model.safetensors").is_file()
