"""Tokens that the files beside tokenizer.json add to it, with the numbers that transformers gives them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from liger_jax.commands._errors import UserError
from liger_jax.models.core.config_fields import short

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG, ADDED, MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def merged(config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of tokenizer_config.json, with those of special_tokens_map.json where transformers reads it.

    `special_tokens`: the second file's. They count where the first one lists no added tokens.
    """
    return dict(config) if _DECODER in config else {**config, **special_tokens}


def add(tokenizer: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Adds to a tokenizer what `AutoTokenizer.from_pretrained` adds: listed tokens, and special ones that it lacks.

    `added`: numbers by token, of added_tokens.json. It counts where the config lists no added tokens.
    """
    special = dict.fromkeys(content for content, _ in _special(config))
    if _DECODER in config:
        listed = sorted(_listed(folder / CONFIG, config[_DECODER]), key=lambda each: each[0])
    else:
        listed = sorted(_legacy(folder / ADDED, added, special), key=lambda each: each[0])
    before = {token.content for _, token in listed if tokenizer.token_to_id(token.content) is not None}
    own = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if _DECODER not in config:  # tokenizer.json says more of a token than the older file
        listed = [each for each in listed if each[1].content not in own]
    names = own | {token.content for _, token in listed}
    tokenizer.add_tokens([token for _, token in listed])
    tokenizer.add_tokens(
        [_token(value, is_special=True) for content, value in _special(config) if content not in names]
    )
    for number, token in listed:
        given = tokenizer.token_to_id(token.content)
        if token.content not in before and given != number:
            file = CONFIG if _DECODER in config else ADDED
            raise UserError(
                f"{folder}: {file} gives the token {short(token.content)} the number {number}, and tokenizer.json, "
                f"which lacks it, leaves it {given}. Save the tokenizer again: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )


def _special(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The special tokens that have a name, and those that have none: each with its content and as the config has it."""
    others = [name for name in config if name.endswith("_token") and name not in NAMED]
    values = [config.get(name) for name in (*NAMED, *others)]
    extra = next((config[name] for name in _EXTRA if config.get(name)), ())
    values += list(extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ())
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content:
            yield content, value


def _listed(path: Path, decoder: Any) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    """The tokens of `added_tokens_decoder`, each with its number."""
    for number, value in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        if not number.isdecimal() or not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise UserError(f"{path}: {_DECODER} must hold tokens by their numbers, and has {short({number: value})}.")
        yield int(number), _token(value, is_special=False)


def _legacy(path: Path, added: Mapping[str, Any], special: Mapping[str, None]) -> Iterator[tuple[int, Any]]:
    """The tokens of added_tokens.json, each with its number."""
    for content, number in added.items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path} must hold numbers by token, and has {short({content: number})}.")
        yield number, tokenizers.AddedToken(content, normalized=content not in special, special=content in special)


def _token(value: Any, is_special: bool) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=is_special, normalized=not is_special)
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return tokenizers.AddedToken(value["content"], **flags | ({"special": True} if is_special else {}))
