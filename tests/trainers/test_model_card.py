"""The card of a result, and its way to a hub that is not there."""

import json
import re

import pytest

from liger_jax.trainers import model_card, result
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError

huggingface_hub = pytest.importorskip("huggingface_hub")
HELD_OUT = "20 steps; held out: loss 5.756 → 5.714"


def card(method=FinetuneOptions, **options):
    settings = Settings.of(method, **({"model": "org/base", "data": "org/rows"} | options))
    precision = dict(dtype="bfloat16", param_dtype="float32")
    return model_card.text(settings, HELD_OUT, precision=precision, devices="1 × cpu", chats=True)


def fields_of(text):
    """The fields before the text, of which each is a line of JSON, and so of YAML."""
    head = re.match("---\n(.*?)\n---\n", text, re.DOTALL)
    assert head is not None
    return {name: json.loads(value) for name, _, value in (line.partition(": ") for line in head[1].splitlines())}


def test_a_card_has_what_a_run_is_and_what_it_has_changed():
    text = card(lora=8, learning_rate=3e-4, steps=20)
    assert fields_of(text) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "datasets": ["org/rows"],
        "tags": ["liger-jax", "finetune", "lora"],
    }
    for said in ("AutoPeftModelForCausalLM", "rank 8", "peak rate 3.0e-04", "20 steps", HELD_OUT, "1 × cpu", "JAX "):
        assert said in text
    assert fields_of(card(PairOptions))["tags"] == ["liger-jax", "dpo"]


def test_a_card_has_no_folder_of_the_machine(tmp_path):
    (tmp_path / "chats.jsonl").touch()
    text = card(model=str(tmp_path / "base"), data=[f"{tmp_path / 'chats.jsonl'}=2"])
    assert str(tmp_path) not in text and "| data | chats.jsonl |" in text and "# base, trained by" in text
    assert not {"base_model", "datasets"} & fields_of(text).keys()


def test_a_result_without_its_card_is_whole(tmp_path):
    settings = Settings.of(FinetuneOptions, model="m", data="d", out=str(tmp_path))
    (target := result.folder(settings)).mkdir()
    (target / "config.json").touch()
    model_card.write(target, "a card")
    finished = {target.name: result.record(settings, target, early=False)}
    assert result.is_there(settings, finished)
    (target / model_card.FILE).unlink()
    assert result.is_there(settings, finished)
    (target / "config.json").unlink()
    assert not result.is_there(settings, finished)


class Hub:
    """A hub that keeps what it is asked."""

    def __init__(self):
        self.calls = []

    def __call__(self):
        return self

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            if name == "whoami":
                raise OSError("Token is required.")
            return "https://hub/me/tuned"

        return call


def test_a_result_is_pushed_into_a_repository_that_is_private_if_it_is_new(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(huggingface_hub, "HfApi", hub := Hub())
    assert model_card.push("me/tuned", tmp_path) == "https://hub/me/tuned"
    (made, names, options), (sent, _, where) = hub.calls
    assert (made, names, options) == ("create_repo", ("me/tuned",), dict(private=True, exist_ok=True))
    assert sent == "upload_folder" and where["repo_id"] == "me/tuned" and where["folder_path"] == tmp_path
    assert f"pushing {tmp_path} to me/tuned …" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="^--push=me/tuned: Token is required. Log in by hf auth login, or set HF_TOKEN"
    ):
        model_card.check_push("me/tuned")


def test_what_is_no_repository_is_refused():
    with pytest.raises(UserError, match="--push=tuned must be an owner and a name, such as me/tuned."):
        Settings.of(FinetuneOptions, model="m", data="d", push="tuned")
