"""A folder of adapters loads as the model that they belong to, with them."""

import json

import numpy as np
import pytest

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.adapted_source import base_of
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.lora import save_adapters
from tests.models._llama import make_model, random_tokens
from tests.models.test_lora import SMALL, adapted


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, adapters for it, and the model with both."""
    base, adapters = (tmp_path_factory.mktemp(name) for name in ("base", "adapters"))
    make_model(SMALL).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    model = adapted(SMALL, targets=("q_proj",))
    save_adapters(model, adapters, base_model=str(base))
    return base, adapters, model


def test_adapters_load_as_their_model_with_them(folders, rng):
    _, adapters, model = folders
    tokens = random_tokens(rng)
    loaded = AutoModelForCausalLM.from_pretrained(adapters)
    np.testing.assert_allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)


def test_a_tokenizer_and_stops_beside_the_adapters_count_before_the_model_s(folders, tmp_path):
    base, adapters, _ = folders
    (tmp_path / "adapter_config.json").write_bytes((adapters / "adapter_config.json").read_bytes())
    found, name = base_of(Source(tmp_path))
    assert (found.folder, name, found.tokenizer["tokenizer.json"]) == (base, str(base), b"{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    found, _ = base_of(Source(tmp_path))
    assert found.tokenizer["tokenizer.json"] == b"[]" and found.stops == (5,)


@pytest.mark.parametrize(
    "fields, error, message",
    [
        (dict(base_model_name_or_path=None), ValueError, "base_model_name_or_path=None must name the model"),
        (
            dict(base_model_name_or_path="../nowhere/x"),
            FileNotFoundError,
            "holds adapters for the model '../nowhere/x'",
        ),
        (dict(base_model_name_or_path="."), ValueError, "'.' is a folder of adapters"),
        (dict(revision="v2"), ValueError, "revision='v2' of"),
    ],
    ids=["none", "absent", "adapters", "revision"],
)
def test_adapters_whose_model_is_not_to_be_had_are_refused(fields, error, message, folders, tmp_path, monkeypatch):
    config = json.loads((folders[1] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | fields))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)
