"""What a tokenizer's files add: tokens that tokenizer.json lacks, tokens around each text, and a normalizer's text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from liger_jax.models.core.config_fields import short
from liger_jax.models.hugging_face import config_json
from liger_jax.user_errors import UserError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG, ADDED, MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


_MOST_GROWTH = 100  # the factor by which a normalizer's replacements may lengthen a text


def merged(config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of tokenizer_config.json, with those of special_tokens_map.json where transformers reads it.

    `special_tokens`: those of the second file. They are used where the first one lists no added tokens.
    """
    return dict(config) if _DECODER in config else {**config, **special_tokens}


def add(tokenizer: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Adds to a tokenizer what `AutoTokenizer.from_pretrained` adds: listed tokens, and special ones that it lacks.

    `added`: ids by token, of added_tokens.json. They are used where the config lists no added tokens.
    """
    special = dict.fromkeys(content for content, _ in _special(config))
    if _DECODER in config:
        listed = sorted(_listed(folder / CONFIG, config[_DECODER]), key=lambda each: each[0])
    else:
        listed = sorted(_legacy(folder / ADDED, added, special), key=lambda each: each[0])
    before = {token.content for _, token in listed if tokenizer.token_to_id(token.content) is not None}
    own = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if _DECODER not in config:  # tokenizer.json has more fields of a token than the older file
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
                f"{folder}: {file} gives the token {short(token.content)} the id {number}, but tokenizer.json does "
                f"not have the token, which would get the id {given}. Save the tokenizer again: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )


def _special(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The special tokens with a name and those without one: each one's content, and its value in the config."""
    others = [name for name in config if name.endswith("_token") and name not in NAMED]
    values = [config.get(name) for name in (*NAMED, *others)]
    extra = next((config[name] for name in _EXTRA if config.get(name)), ())
    values += list(extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ())
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content:
            yield content, value


def _listed(path: Path, decoder: Any) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    """The tokens of `added_tokens_decoder`, each with its id."""
    for number, value in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        if not number.isdecimal() or not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise UserError(f"{path}: {_DECODER} must hold tokens by their numbers, and has {short({number: value})}.")
        yield int(number), _token(value, is_special=False)


def _legacy(path: Path, added: Mapping[str, Any], special: Mapping[str, None]) -> Iterator[tuple[int, Any]]:
    """The tokens of added_tokens.json, each with its id."""
    for content, number in added.items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path} must hold numbers by token, and has {short({content: number})}.")
        yield number, tokenizers.AddedToken(content, normalized=content not in special, special=content in special)


def _token(value: Any, is_special: bool) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=is_special, normalized=not is_special)
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return tokenizers.AddedToken(value["content"], **flags | ({"special": True} if is_special else {}))


def check_growth(path: Path, content: bytes) -> None:
    """Refuses a normalizer that makes a text many times as long, which would fill the memory."""
    try:
        values = config_json.loads(content, path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {str(error).removeprefix(f'{path} ')[:500]}") from error
    if (growth := _growth(values.get("normalizer"))) > _MOST_GROWTH:
        raise UserError(
            f"{path}: its normalizer can make a text {growth:.3g} times as long, and {_MOST_GROWTH} times is the most. "
            "Pass a model with another tokenizer."
        )


def _growth(normalizer: Any) -> float:
    """The factor by which a normalizer's replacements can lengthen a text."""
    if not isinstance(normalizer, dict):
        return 1.0
    parts = normalizer.get("normalizers")
    if isinstance(parts, list):
        return math.prod(map(_growth, parts))
    pattern, new = normalizer.get("pattern"), normalizer.get("content")
    if not isinstance(pattern, dict) or not isinstance(new, str):
        return 1.0
    old = pattern.get("String")
    return max(1.0, len(new) / max(1, len(old))) if isinstance(old, str) else 1.0 + len(new)


class AddedOnce:
    """The texts of a run that already begin or end with the tokens which the tokenizer adds."""

    def __init__(self, text: Callable[[Sequence[int]], str]):
        self._text, self._texts = text, dict[tuple[str, str], int]()

    def of(self, encoded: Any, to_go_on: bool = False) -> slice:
        """The tokens of an encoded text, each of the added ones once."""
        ids, is_added = encoded.ids, encoded.special_tokens_mask
        if 0 not in is_added:
            return slice(0, len(ids))
        first, last = is_added.index(0), len(ids) - is_added[::-1].index(0)  # the text's own tokens
        begin, end, after = 0, len(ids), len(ids) - last
        if first and ids[first : 2 * first] == ids[:first]:
            begin = first
            self.note("begin", ids[:first])
        if to_go_on:
            end = last
        elif after and ids[last - after : last] == ids[last:]:
            end = last
            self.note("end", ids[last:])
        return slice(begin, end)

    def note(self, verb: str, tokens: Sequence[int]) -> None:
        """Notes that a text has tokens which the tokenizer adds."""
        about = verb, self._text(tokens)
        self._texts[about] = self._texts.get(about, 0) + 1

    def notices(self) -> dict[str, str]:
        """The notices of such texts since the last call: sentences by topic."""
        noted, self._texts = self._texts, {}
        sentences = {}
        for (verb, tokens), number in noted.items():
            texts = f"1 text {verb}s" if number == 1 else f"{number:,} texts {verb}"
            sentences[f"{verb} {tokens}"] = (
                f"{texts} with {tokens!r}, which the tokenizer adds as well: it is there once"
            )
        return sentences
