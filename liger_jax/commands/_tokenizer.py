"""A checkpoint's tokenizer: documents become token ids, with a label for each token that is trained on."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from liger_jax.commands._data import Document
from liger_jax.commands._errors import UserError, needed_packages, refusals_kept
from liger_jax.commands._normalizer import check_growth
from liger_jax.models.core.config_fields import MOST, short
from liger_jax.models.hugging_face.checkpoint import TEMPLATES
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.ops.labels import IGNORE_INDEX

FILE = "tokenizer.json"
_MOST_SAID = 500  # characters of another library's error


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document's tokens, or a part of them that fills a row.

    Attributes:
        tokens: (tokens,) int32.
        labels: (tokens,) int32, the token where it is trained on and -100 elsewhere.
        document: the document.
        begin: the place of the first token in the document.
        total: how many tokens the document has.
    """

    tokens: np.ndarray
    labels: np.ndarray
    document: Document | None = None
    begin: int = 0
    total: int = 0

    @property
    def is_scored(self) -> bool:
        """Whether a token is trained on. The first one cannot be: nothing stands before it."""
        return bool(np.any(self.labels[1:] != IGNORE_INDEX))


class Tokenizer:
    """The tokenizer of a checkpoint, from tokenizer.json and the small files beside it.

    Args:
        source: the checkpoint, or its folder.
        vocab_size: entries of the model's vocabulary.
        stops: the tokens that end a text by the checkpoint's config.

    Raises:
        UserError: there is no tokenizer.json, or one of the files is damaged.
    """

    def __init__(self, source: Source | str | Path, vocab_size: int, stops: Sequence[int]):
        source = find(source, weights=False)
        folder, files = source.folder, source.tokenizer
        if (content := files[FILE]) is None:
            raise UserError(
                f"{folder} has no {FILE}. If it holds a tokenizer of another form, transformers writes one: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )
        if wrong := [stop for stop in stops if not 0 <= stop <= MOST]:
            raise UserError(f"{folder}: eos_token_id names {short(wrong[0])}, which is no token. Mend its config.")
        check_growth(folder / FILE, content)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers raises nothing narrower, and its panics are no Exceptions
            raise UserError(f"{folder / FILE} cannot be read: {str(error)[:_MOST_SAID]}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder, self._files, self._vocab_size = folder, files, vocab_size
        self._config = self._json("special_tokens_map.json") | self._json("tokenizer_config.json")
        self._special = _special_tokens(self._config)
        eos = self._tokenizer.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None
        self._eos = next((stop for stop in (eos, *stops) if stop is not None), None)
        self.stops = list(dict.fromkeys([*stops, *([] if eos is None else [eos])]))

    def pieces(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> list[Piece]:
        """Encodes documents and cuts them to the length of a row.

        A text ends with the end-of-text token, and is cut into pieces of `length` tokens. A conversation is one piece,
        and what is longer is dropped. A token that ends an answer is added to `stops`.

        Args:
            documents: texts and conversations.
            length: the most tokens of a piece.
            refused: where errors of single documents go, by where they are; `None` to raise the first.

        Returns:
            The pieces in which a token is trained on.

        Raises:
            UserError: a token is not in the model's vocabulary, there is no chat template or it fails, or nothing is
                left to train on.
        """
        texts = [document for document in documents if document.messages is None]
        chats = [document for document in documents if document.messages is not None]
        pieces = self._texts(texts, length, refused) + (self._chats(chats, length, refused) if chats else [])
        scored = [piece for piece in pieces if piece.is_scored]
        if not scored and not refused:
            raise UserError("The data has no token to train on: each is predicted from those before it.")
        return scored

    def prompt(self, document: Document) -> np.ndarray:
        """The tokens behind which a model goes on with a text, or answers a conversation.

        Args:
            document: the text or the conversation.

        Returns:
            (tokens,) int32.

        Raises:
            UserError: there are no tokens, one is not in the model's vocabulary, there is no chat template, or it
                fails.
        """
        if (messages := document.messages) is None:
            text = document.text
        else:
            with needed_packages():
                from liger_jax.commands._chat import ChatTemplate
            template = ChatTemplate(self._chosen(self._chat_templates(), document.tools), self._special)
            text = template.prompt(messages, document.tools, document.values)
        with _failures():
            ids = self._tokenizer.encode(text, add_special_tokens=messages is None).ids
        if messages is None and ids[-1:] == [self._eos] and not text.endswith(self._special.get("eos_token", "\0")):
            ids = ids[:-1]  # some tokenizers end each text
        if not ids:
            raise UserError(f"{document.where} has no tokens, and a model goes on behind at least one.")
        return self._checked(ids, document)

    def text(self, tokens: Sequence[int], special: bool = True) -> str:
        """The text of tokens, with the special ones or without."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._chat_templates())

    def _texts(self, documents: list[Document], length: int, refused: dict[str, UserError] | None) -> list[Piece]:
        pieces, texts = [], [document.text for document in documents]
        encodings = self._encoded(documents, texts, self._tokenizer.encode_batch_fast, refused)
        for document, encoded in zip(documents, encodings, strict=True):
            if encoded is None:
                continue
            ids = encoded.ids
            if self._eos is not None and ids[-1:] != [self._eos]:
                ids = [*ids, self._eos]
            with refusals_kept(refused, document.where):
                tokens = self._checked(ids, document)
                for i in range(0, len(tokens), length):
                    part = tokens[i : i + length]
                    pieces.append(Piece(part, part, document, i, len(tokens)))
        return pieces

    def _chats(self, documents: list[Document], length: int, refused: dict[str, UserError] | None) -> list[Piece]:
        rendered = self._rendered(documents, refused)
        encode = lambda texts: self._tokenizer.encode_batch(texts, add_special_tokens=False)
        encodings = self._encoded([d for d, _, _ in rendered], [text for _, text, _ in rendered], encode, refused)
        pieces, cut, stops = [], 0, set()
        for (document, text, spans), encoded in zip(rendered, encodings, strict=True):
            if encoded is None:
                continue
            with refusals_kept(refused, document.where):
                tokens = self._checked(encoded.ids, document)
                is_answer = np.zeros(len(tokens), bool)
                for span in spans:
                    places = _places(np.array(encoded.offsets), text, span)
                    is_answer[places] = True
                    stops.update(tokens[places[-1:]].tolist())
                labels = np.where(is_answer, tokens, IGNORE_INDEX)
                cut += len(tokens) > length
                pieces.append(Piece(tokens[:length], labels[:length], document, 0, len(tokens)))
        added = self._tokenizer.get_added_tokens_decoder()
        special = {stop for stop in stops if stop in added and added[stop].special}
        self.stops += sorted(special - set(self.stops))
        if cut:
            print(f"{cut:,} of {len(documents):,} conversations are cut off, as longer than --length={length}")
        return pieces

    def _rendered(
        self, documents: list[Document], refused: dict[str, UserError] | None
    ) -> list[tuple[Document, str, list[tuple[int, int]]]]:
        """Conversations, their texts, and where the assistant speaks. Prints what is to be known of them, once."""
        sources, templates, rendered = self._chat_templates(), {}, []
        with needed_packages():
            from liger_jax.commands._chat import ChatTemplate
        for document in documents:
            with refusals_kept(refused, document.where), _errors_at(document.where):
                source = self._chosen(sources, document.tools)
                if source not in templates:
                    templates[source] = ChatTemplate(source, self._special)
                found = templates[source].render(document.messages or [], document.tools, document.values)
                rendered.append((document, *found))
        for note in dict.fromkeys(note for template in templates.values() for note in template.notes.sentences()):
            print(note)
        return rendered

    def _chat_templates(self) -> dict[str, str]:
        """The chat templates by name, "default" among them or not, from the places where transformers looks."""
        names = {"default": "chat_template.jinja"}
        names |= {Path(name).stem: name for name in self._files if Path(name).parent == Path(TEMPLATES)}
        found: Any = {name: self._text(file) for name, file in names.items() if self._files[file] is not None}
        for each in (self._config, self._json("chat_template.json")):
            found = found or each.get("chat_template")
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list):  # several by name
            if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in found):
                raise UserError(
                    f"The chat_template of the tokenizer in {self._folder} is a list, and must then be of objects, "
                    "each with a name and a template."
                )
            found = {each["name"]: each.get("template") for each in found}
        found = found if isinstance(found, dict) else {}
        return {name: each for name, each in found.items() if isinstance(name, str) and isinstance(each, str)}

    def _text(self, name: str) -> str:
        try:
            return (self._files[name] or b"").decode()
        except ValueError as error:
            raise UserError(f"{self._folder / name} cannot be read: {error}.") from error

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if there is no such file."""
        if self._files[name] is None:
            return {}
        try:
            values = json.loads(self._text(name))
            if isinstance(values, dict):
                return values
            reason = f"it holds a {type(values).__name__}, and must hold an object"
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise UserError(f"{self._folder / name} cannot be read: {reason}.")

    def _chosen(self, sources: dict[str, str], tools: Any) -> str:
        """The template for a conversation: "tool_use" where there are tools and such a template, else "default"."""
        name = "tool_use" if tools is not None and "tool_use" in sources else "default"
        if name in sources:
            return sources[name]
        if sources:
            raise UserError(
                f"The tokenizer in {self._folder} has the chat templates {', '.join(sorted(sources))}, and none is the "
                "default. Put the one to take into chat_template.jinja there."
            )
        raise UserError(
            f"The data has messages, and the tokenizer in {self._folder} has no chat template. Take an instruct "
            "model's, or put one into chat_template.jinja there."
        )

    def _encoded(
        self,
        documents: list[Document],
        texts: list[str],
        encode: Callable[[list[str]], list[Any]],
        refused: dict[str, UserError] | None,
    ) -> list[Any]:
        """The encodings of texts, `None` for one that is refused. If all at once fail, they are encoded one by one."""
        try:
            with _failures():
                return encode(texts)
        except UserError:
            found: list[Any] = [None] * len(texts)
            for i, document in enumerate(documents):
                with refusals_kept(refused, document.where), _errors_at(document.where), _failures():
                    (found[i],) = encode(texts[i : i + 1])
            return found

    def _checked(self, ids: list[int], document: Document) -> np.ndarray:
        wrong = next((i for i in (max(ids, default=0), min(ids, default=0)) if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            name = self._tokenizer.id_to_token(wrong) if 0 <= wrong < 2**32 else "that ends a text"
            raise UserError(
                f"{document.where}: the token {name!r} has the number {wrong}, and the model's vocabulary has "
                f"{self._vocab_size} entries. Pass a model with its own tokenizer."
            )
        return np.asarray(ids, np.int32)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """A context for the tokenizer. A panic of its Rust code is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"the tokenizer fails: {str(error)[:_MOST_SAID]}.") from error


@contextlib.contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """A context for a document, whose errors begin with its place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _places(offsets: np.ndarray, text: str, span: tuple[int, int]) -> np.ndarray:
    """The tokens of a stretch of text. One that begins before it belongs to it if only white space stands there."""
    (begin, end), (begins, ends) = span, offsets.reshape(-1, 2).T
    before = begin
    while before and text[before - 1].isspace():
        before -= 1
    return np.flatnonzero((begins >= before) & (begins < end) & ((begins >= begin) | (ends > begin)))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, each a string or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
