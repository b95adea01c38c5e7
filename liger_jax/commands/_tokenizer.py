"""A checkpoint's tokenizer: documents become token ids, with a label for each token that is trained on."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from liger_jax.commands._data import Document
from liger_jax.commands._errors import UserError, needed_packages
from liger_jax.ops.labels import IGNORE_INDEX

FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document's tokens, or a part of them that fills a row.

    Attributes:
        tokens: (tokens,) int32.
        labels: (tokens,) int32, the token where it is trained on and -100 elsewhere.
    """

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def is_scored(self) -> bool:
        """Whether a token is trained on. The first one cannot be: nothing stands before it."""
        return bool(np.any(self.labels[1:] != IGNORE_INDEX))


class Tokenizer:
    """The tokenizer of a checkpoint, from tokenizer.json and the small files beside it.

    Args:
        folder: the checkpoint's.
        vocab_size: entries of the model's vocabulary.
        stops: the tokens that end a text by the checkpoint's config.

    Raises:
        UserError: there is no tokenizer.json, or one of the files is damaged.
    """

    def __init__(self, folder: Path, vocab_size: int, stops: Sequence[int]):
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder} has no {FILE}. If it holds a tokenizer of another form, transformers writes one: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
        except Exception as error:  # tokenizers raises nothing narrower
            raise UserError(f"{folder / FILE} cannot be read: {error}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder, self._vocab_size = folder, vocab_size
        self._config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self._special = _special_tokens(self._config)
        eos = self._tokenizer.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None
        self._eos = next((stop for stop in (eos, *stops) if stop is not None), None)
        self.stops = list(dict.fromkeys([*stops, *([] if eos is None else [eos])]))

    def pieces(self, documents: Sequence[Document], length: int) -> list[Piece]:
        """Encodes documents and cuts them to the length of a row.

        A text ends with the end-of-text token, and is cut into pieces of `length` tokens. A conversation is one piece,
        and what is longer is dropped. A token that ends an answer is added to `stops`.

        Args:
            documents: texts and conversations.
            length: the most tokens of a piece.

        Returns:
            The pieces in which a token is trained on.

        Raises:
            UserError: a token is not in the model's vocabulary, there is no chat template or it fails, or nothing is
                left to train on.
        """
        texts = [document for document in documents if document.messages is None]
        chats = [document for document in documents if document.messages is not None]
        pieces = self._texts(texts, length) + (self._chats(chats, length) if chats else [])
        scored = [piece for piece in pieces if piece.is_scored]
        if not scored:
            raise UserError("The data has no token to train on: each is predicted from those before it.")
        return scored

    def _texts(self, documents: list[Document], length: int) -> list[Piece]:
        pieces = []
        for document, encoded in zip(
            documents, self._tokenizer.encode_batch_fast([d.text for d in documents]), strict=True
        ):
            ids = encoded.ids
            if self._eos is not None and ids[-1:] != [self._eos]:
                ids = [*ids, self._eos]
            tokens = self._checked(ids, document)
            pieces += [Piece(part, part) for i in range(0, len(tokens), length) for part in [tokens[i : i + length]]]
        return pieces

    def _chats(self, documents: list[Document], length: int) -> list[Piece]:
        template, rendered = self._chat_template(), []
        for document in documents:
            try:
                rendered.append(template.render(document.messages, document.tools))
            except UserError as error:
                raise UserError(f"{document.where}: {error}") from error
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        pieces, cut, stops = [], 0, set()
        for document, encoded, (_, spans) in zip(documents, encodings, rendered, strict=True):
            tokens = self._checked(encoded.ids, document)
            begins = np.array([begin for begin, _ in encoded.offsets])
            is_answer = np.zeros(len(tokens), bool)
            for begin, end in spans:
                places = np.flatnonzero((begins >= begin) & (begins < end))
                is_answer[places] = True
                stops.update(tokens[places[-1:]].tolist())
            piece = Piece(tokens[:length], np.where(is_answer, tokens, IGNORE_INDEX)[:length])
            cut += len(tokens) > length
            pieces.append(piece)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {stop for stop in stops if stop in added and added[stop].special}
        self.stops += sorted(special - set(self.stops))
        if cut:
            print(f"{cut:,} of {len(documents):,} conversations are cut off, as longer than --length={length}")
        return pieces

    def _chat_template(self) -> Any:
        with needed_packages():
            from liger_jax.commands._chat import ChatTemplate
        path, found = self._folder / "chat_template.jinja", self._config.get("chat_template")
        if path.is_file():
            found = path.read_text(encoding="utf-8")
        elif isinstance(found, list):  # several by name
            found = {each.get("name"): each.get("template") for each in found}.get("default")
        found = found or _json(self._folder / "chat_template.json").get("chat_template")
        if not isinstance(found, str):
            raise UserError(
                f"The data has messages, and the tokenizer in {self._folder} has no chat template. Take an instruct "
                "model's, or put one into chat_template.jinja there."
            )
        return ChatTemplate(found, self._special)

    def _checked(self, ids: list[int], document: Document) -> np.ndarray:
        tokens = np.asarray(ids, np.int32)
        if tokens.size and (largest := int(tokens.max())) >= self._vocab_size:
            raise UserError(
                f"{document.where}: the token {self._tokenizer.id_to_token(largest)!r} has the number {largest}, and "
                f"the model's vocabulary has {self._vocab_size} entries. Pass a model with its own tokenizer."
            )
        return tokens


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        reason = f"it holds a {type(values).__name__}, and must hold an object"
    except ValueError as error:
        reason = str(error)
    raise UserError(f"{path} cannot be read: {reason}.")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, each a string or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
