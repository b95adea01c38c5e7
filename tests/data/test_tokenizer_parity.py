"""Tokens that only files beside tokenizer.json add have transformers' numbers. `make parity` installs transformers."""

import functools
import importlib
import importlib.util
import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Plain

from liger_jax.data.documents import Document
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.user_errors import UserError

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
pytestmark = [pytest.mark.parity, pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is absent")]
TEXT = "a <x> b<y>c <z>\n<x><y> </s><pad> d"


def files(rng, numbers):
    """The contents of the files beside tokenizer.json, of any kind; `numbers` gives those of tokens."""
    flag = lambda: bool(rng.integers(2))
    token = lambda content: {
        "content": content, "special": flag(), "lstrip": flag(), "rstrip": flag(), "single_word": False,
        "normalized": flag(),
    }  # fmt: skip
    special = {"eos_token": "</s>", "pad_token": "<pad>", "sep_token": "<z>"}
    named: dict = {name: value for name, value in special.items() if flag()}
    named |= {"additional_special_tokens": ["<y>", "<x>"][: 1 + flag()]} if flag() else {}
    new = list(rng.permutation(["<x>", "<y>", "<z>", "</s>"])[: rng.integers(1, 5)])
    found: dict = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    kind = rng.choice(["listed", "older", "named"])
    if kind == "listed":
        listed = {str(numbers(new)[content]): token(content) for content in new}
        found["tokenizer_config.json"] |= {"added_tokens_decoder": listed, **named}
    elif kind == "older":
        found["added_tokens.json"] = numbers(new)
        found |= {"special_tokens_map.json": {"eos_token": "<y>"}} if flag() else {}
        found["tokenizer_config.json"] |= named
    else:
        found["tokenizer_config.json"] |= named
    return found


def numbers_of(plain, are_right, tokens):
    """The number of each token: its own, or the next free one; or one too many."""
    new = iter(range(plain.get_vocab_size() + (not are_right), 10_000))
    own = plain.get_vocab(with_added_tokens=True)
    return {token: own[token] if token in own else next(new) for token in tokens}


@pytest.mark.parametrize("number", range(12))
def test_numbers_are_those_of_transformers(number, rng, tmp_path):
    auto = importlib.import_module("transformers").AutoTokenizer
    for i in range(4):
        folder = tmp_path / str(i)
        folder.mkdir()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {each: i for i, each in enumerate(alphabet)} | ({"</s>": len(alphabet)} if rng.integers(2) else {})
        plain = Plain(models.BPE(vocab, []))
        plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        plain.add_tokens([AddedToken("<x>", special=bool(rng.integers(2)))] if rng.integers(2) else [])
        plain.save(str(folder / "tokenizer.json"))
        beside = files(rng, functools.partial(numbers_of, plain, bool(rng.integers(8))))
        for name, content in beside.items():
            (folder / name).write_text(json.dumps(content))
        theirs = auto.from_pretrained(folder)
        try:
            ours = Tokenizer(Source(folder), 1000, [])
        except UserError as error:
            assert "would get the id" in str(error), beside  # a number that a token does not get
            continue
        found = ours.prompt(Document("here", TEXT)).tolist()
        assert found == theirs(TEXT, add_special_tokens=False)["input_ids"], beside
        assert ours.stops == ([] if theirs.eos_token_id is None else [theirs.eos_token_id]), beside
