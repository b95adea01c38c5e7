"""A checkpoint's tokenizer: documents become token ids, with a label for each token that is trained on."""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from liger_jax.chat import template_sources
from liger_jax.chat.messages import IS_TRAINED, is_trained
from liger_jax.chat.strict_json import kind_of
from liger_jax.data import added_tokens, long_text
from liger_jax.data.added_tokens import AddedOnce, check_growth
from liger_jax.data.conversations import Conversations
from liger_jax.data.documents import Document
from liger_jax.data.files import checked, opened
from liger_jax.data.pieces import (
    Begun,
    completed,
    errors_at,
    failures,
    no_place,
    nothing_to_train_on,
    offsets_of,
    places,
)
from liger_jax.data.pieces import Piece as Piece
from liger_jax.models.core.config_fields import MOST, short
from liger_jax.models.hugging_face.checkpoint import TEMPLATES
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import digests
from liger_jax.user_errors import UserError, refusals_kept

FILE = "tokenizer.json"
_MOST_SAID = 500  # characters of another library's error
_MOST_OF_END = 40  # characters of what ends an answer


class Tokenizer:
    """The tokenizer of a checkpoint, from tokenizer.json and the small files beside it."""

    together = 1  # how many consecutive pieces share a row and are held out together
    kind = "piece"  # the name of such a group of pieces
    in_segments = False  # whether rows have segment ids, even if each has a single piece

    def __init__(self, source: Source | str | Path, vocab_size: int, stops: Sequence[int]):
        source = find(source, weights=False)
        folder, files = source.folder, source.tokenizer
        if (content := files[FILE]) is None:
            raise UserError(
                f"{folder} has no {FILE}. If it holds a tokenizer of another form, transformers writes one: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )
        if wrong := [stop for stop in stops if not 0 <= stop <= MOST]:
            raise UserError(f"{folder}: eos_token_id names {short(wrong[0])}, which is not a token. Correct it.")
        check_growth(folder / FILE, content)
        self._folder, self._files, self._vocab_size = folder, files, vocab_size
        self._media = source.media_tokens
        self._config = added_tokens.merged(self._json(added_tokens.CONFIG), self._json(added_tokens.MAP))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            added_tokens.add(self._tokenizer, folder, self._config, self._json(added_tokens.ADDED))
        except UserError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers raises nothing narrower, and its panics are no `Exception`
            raise UserError(f"{folder / FILE} cannot be read: {str(error)[:_MOST_SAID]}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = template_sources.special_tokens(self._config)
        eos = self._tokenizer.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None
        self._eos = next((stop for stop in (eos, *stops) if stop is not None), None)
        self._stops: list[int] = list(dict.fromkeys([*stops, *([] if eos is None else [eos])]))
        self.conversations = Conversations(self._tokenizer, lambda: self._chat_templates, self._special, folder)
        self.left_out: dict[str, str] = {}  # the reasons of documents without a piece, by their places
        self._once = AddedOnce(self.text)
        self._adds_none = not self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._chats_before = False  # whether documents that were encoded earlier were conversations
        self._has_joined = False  # whether a prompt that is a text was joined to its answer
        self._cut, self._count = ({"conversations": 0, "completions": 0} for _ in range(2))

    def pieces(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> list[Piece]:
        """Encodes documents, cuts them to the length of a row, and prints notes about them."""
        pieces = list(self.encoded(documents, length, refused))
        for note in self.notes(length):
            print(note)
        if not pieces and not refused:
            raise nothing_to_train_on()
        return pieces

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some of the documents, in a thread that begins at once, and cuts them to the length of a row.

        A text ends with the end-of-text token, and is cut into pieces of `length` tokens. A conversation is one piece,
        and so is a prompt with its completion; tokens beyond `length` are dropped. A token that ends a last answer is
        added to `stops`.
        """
        chats = [each for each in documents if each.messages is not None]
        completions = [each for each in documents if each.messages is None and each.prompt is not None]
        texts = [each for each in documents if each.messages is None and each.prompt is None and each.path is None]
        joined = [(each.prompt or "") + each.text for each in completions]
        begun_texts = Begun(texts, [each.text for each in texts], self._tokenizer.encode_batch_fast)
        begun = Begun(completions, joined, self._tokenizer.encode_batch)
        refused_chats, failed = None if refused is None else dict[str, UserError](), None
        rendered: list[tuple[Document, Any]] = []
        try:
            rendered = self._rendered(chats, refused_chats)
        except UserError as error:  # those of texts and completions come first
            failed = error
        encode = functools.partial(self._tokenizer.encode_batch, add_special_tokens=False)
        begun_chats = Begun([each for each, _ in rendered], [chat.text for _, chat in rendered], encode)

        def pieces_of() -> Iterator[Piece]:
            yield from self._texts(begun_texts, length, refused)
            yield from self._completions(begun, length, refused)
            if failed is not None:
                raise failed
            if refused is not None:
                refused.update(refused_chats or {})
            yield from self._chats([chat for _, chat in rendered], begun_chats, length, refused)

        return self._of_documents(documents, pieces_of(), length, refused)

    def _of_documents(
        self, documents: Sequence[Document], each: Iterator[Piece], length: int, refused: dict[str, UserError] | None
    ) -> Iterator[Piece]:
        """The pieces in the order of the documents, those that are trained on."""
        pieces: dict[int, list[Piece]] = {}
        for piece in each:
            pieces.setdefault(id(piece.document), []).append(piece)
        for document in documents:
            own = pieces.get(id(document), []) if document.path is None else self._long(document, length, refused)
            yield from (piece for piece in own if piece.is_scored)

    def side(self, piece: Piece, number: int) -> str:
        """The name of a piece within its group, such as "chosen"."""
        return ""

    def notes(self, length: int) -> list[str]:
        """Notes about all documents that were encoded."""
        notes = [*self.conversations.notes(), *self.notices().values()]
        for token, end in self.conversations.spelled.items():
            if token not in self._stops:
                notes.append(
                    f"the chat template ends an answer with {end[-_MOST_OF_END:]!r}, which is no token of its own in "
                    "this tokenizer, so that nothing ends a generated answer: take template and tokenizer of the same "
                    "model, or a template that prints the tokenizer's eos_token"
                )
        for kind, cut in self._cut.items():
            if cut:
                notes.append(f"{cut:,} of {self._count[kind]:,} {kind} are longer than --length={length}, and cut off")
        with contextlib.suppress(UserError):  # a damaged template is reported where it is needed
            if self._has_joined and self.has_template:
                notes.append(
                    "prompts that are texts are joined to their answers as they stand, without the tokenizer's chat "
                    'template; for a chat, write a prompt as [{"role": "user", "content": …}]'
                    f"{', or name the fields instruction and output' if self.kind == Tokenizer.kind else ''}"
                )
        return list(dict.fromkeys(notes))

    def notices(self) -> dict[str, str]:
        """The notices of texts and messages that were encoded since the last call: sentences by topic."""
        return self.conversations.notices() | self._once.notices()

    @property
    def stops(self) -> list[int]:
        """The tokens that end a text: the checkpoint's, and those that end the last answers of conversations.

        An id beyond the model's vocabulary is left out, since the model cannot generate it.
        """
        stops = [*self._stops, *(stop for stop in self.conversations.stops if stop not in self._stops)]
        return [stop for stop in stops if stop < self._vocab_size]

    @property
    def marks(self) -> dict[str, list[int]]:
        """The tokens that end answers, and those within them, by name, as `add_marks` takes them."""
        return {name: sorted(tokens) for name, tokens in self.conversations.marks.items()}

    @property
    def chats(self) -> bool:
        """Whether there were conversations, rather than texts alone."""
        return self._chats_before or self.conversations.are_there

    def add_marks(self, marks: Mapping[str, Sequence[int]], chats: bool = False) -> None:
        """Adds the `marks` of documents that were encoded earlier, and whether `chats` were among them."""
        self._chats_before |= chats
        for name, tokens in marks.items():
            self.conversations.marks[name] |= {*tokens}

    def identity(self) -> dict[str, Any]:
        """All that the tokens of a text depend on, apart from the text."""
        files = {name: digests.of_bytes(content) for name, content in self._files.items() if content}
        return files | {"vocab_size": self._vocab_size, "eos": self._eos, "media": sorted(self._media)}

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included, in order of the ids."""
        numbers = self._tokenizer.get_vocab(with_added_tokens=True)  # in another order in each process
        return dict(sorted(numbers.items(), key=lambda token: token[1]))

    @property
    def tells_the_time(self) -> bool:
        """Whether a chat template may print the date, so that it gives other tokens on another day."""
        return any("strftime_now" in source for source in self._chat_templates.values())

    def prompt(self, document: Document) -> np.ndarray:
        """The prompt's tokens, for a text that the model continues or a conversation that it answers."""
        is_text = document.messages is None
        text = document.text if is_text else self.conversations.prompt(document)
        with failures():
            encoded = self._tokenizer.encode(text, add_special_tokens=is_text)
        ids = encoded.ids[self._once.of(encoded, to_go_on=is_text)]
        if not ids:
            raise UserError(f"{document.where} has no tokens, and a model needs at least one to continue.")
        return self._checked(ids, document)

    def text(self, tokens: Sequence[int], special: bool = True) -> str:
        """The text of tokens, with the special ones or without."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._chat_templates)

    def _texts(self, begun: Begun, length: int, refused: dict[str, UserError] | None) -> list[Piece]:
        pieces = []
        for document, encoded in zip(begun.documents, begun.encodings(refused), strict=True):
            if encoded is None:
                continue
            ids = self._ids(encoded)
            if self._eos is not None and ids[-1:] != [self._eos]:
                ids = [*ids, self._eos]
            with refusals_kept(refused, document.where):
                tokens = self._checked(ids, document)
                for i in range(0, len(tokens), length):
                    some = tokens[i : i + length]
                    pieces.append(Piece(some, some, document, i, len(tokens)))
        return pieces

    def _completions(self, begun: Begun, length: int, refused: dict[str, UserError] | None) -> Iterator[Piece]:
        self._has_joined |= any((document.prompt or "").strip() for document in begun.documents)
        for document, encoded in zip(begun.documents, begun.encodings(refused), strict=True):
            if encoded is None:
                continue
            once = slice(None) if self._adds_none else self._once.of(encoded)
            ids, is_scored = encoded.ids[once], completed(offsets_of(encoded)[once], len(document.prompt or ""))
            if self._eos is not None and ids[-1:] != [self._eos]:
                ids, is_scored = [*ids, self._eos], np.append(is_scored, is_scored.any())
            with refusals_kept(refused, document.where):
                yield self._one(document, ids, is_scored, length, "completions")

    def _long(self, document: Document, length: int, refused: dict[str, UserError] | None) -> Iterator[Piece]:
        """The pieces of a text that is read in chunks."""
        ids, begin, path = [], 0, document.path or Path()
        with refusals_kept(refused, document.where), opened(path) as file, errors_at(document.where):
            ends = [] if self._eos is None else [self._eos]
            chunks = long_text.with_added(checked(path, file), self._tokenizer, self._once.note)
            for some in itertools.chain(chunks, [None]):
                is_end = some is None
                ids += (ends if ids[-1:] != ends else []) if some is None else some
                # The last token is kept back, since the end-of-text token may have to follow it.
                while len(ids) > length or is_end and ids:
                    tokens = self._checked(ids[:length], document)
                    yield Piece(tokens, tokens, document, begin)
                    ids, begin = ids[length:], begin + length

    def _chats(
        self, chats: Sequence[Any], begun: Begun, length: int, refused: dict[str, UserError] | None
    ) -> list[Piece]:
        pieces = []
        for document, chat, encoded in zip(begun.documents, chats, begun.encodings(refused), strict=True):
            if encoded is None:
                continue
            with refusals_kept(refused, document.where):
                ids, offsets = encoded.ids, offsets_of(encoded)
                is_answer = np.zeros(len(ids), bool)
                ends = []
                for span in chat.spans:
                    answer = places(offsets, chat.text, span)
                    is_answer[answer] = True
                    ends += [ids[i] for i in answer[-1:]]
                messages = document.messages or []
                if by_weight := _left_out_by(messages):
                    self.left_out[document.where] = f"only answers that {by_weight} leaves out"
                self.conversations.look_at_ends(messages, chat, ends)
                pieces.append(self._one(document, ids, is_answer, length, "conversations"))
        return pieces

    def _one(self, document: Document, ids: list[int], is_scored: np.ndarray, length: int, kind: str) -> Piece:
        """A document as one piece, which is cut off if it is longer than a row."""
        tokens = self._checked(ids, document)
        labels = np.where(is_scored, tokens, IGNORE_INDEX).astype(np.int32)
        self._cut[kind] += len(tokens) > length
        self._count[kind] += 1
        piece = Piece(tokens[:length], labels[:length], document, 0, len(tokens))
        if is_scored[1:].any() and not piece.is_scored:
            self.left_out[document.where] = no_place(length)
        return piece

    def _rendered(self, documents: list[Document], refused: dict[str, UserError] | None) -> list[tuple[Document, Any]]:
        """Conversations, and each as its chat template prints it."""
        rendered = []
        for document in documents:
            with refusals_kept(refused, document.where), errors_at(document.where):
                rendered.append((document, self.conversations.rendered(document)))
        return rendered

    @functools.cached_property
    def _chat_templates(self) -> dict[str, str]:
        """The chat templates by name, from the files that transformers reads."""
        names = {"default": "chat_template.jinja"}
        names |= {Path(name).stem: name for name in self._files if Path(name).parent == Path(TEMPLATES)}
        templates = {name: self._text(file) for name, file in names.items() if self._files[file] is not None}
        others = [each.get("chat_template") for each in (self._config, self._json("chat_template.json"))]
        return template_sources.by_name([templates, *others], self._folder)

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
            reason = f"it holds {kind_of(values)}, and must hold an object"
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise UserError(f"{self._folder / name} cannot be read: {reason}.")

    def _ids(self, encoded: Any) -> list[int]:
        """The tokens of a text, each of those that the tokenizer adds once."""
        return encoded.ids if self._adds_none else encoded.ids[self._once.of(encoded)]

    def _checked(self, ids: list[int], document: Document) -> np.ndarray:
        tokens = np.fromiter(ids, np.int64, len(ids))
        ends = (int(tokens.max(initial=0)), int(tokens.min(initial=0)))
        wrong = next((i for i in ends if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            name = self._tokenizer.id_to_token(wrong) if 0 <= wrong < 2**32 else "that ends a text"
            raise UserError(
                f"{document.where}: the token {name!r} has the id {wrong}, and the model's vocabulary has "
                f"{self._vocab_size} entries. Pass a model with its own tokenizer."
            )
        media = next((each for each in ids if each in self._media), None) if self._media else None
        if media is not None:
            raise UserError(
                f"{document.where}: the token {self._tokenizer.id_to_token(media)!r} is config.json's "
                f"{self._media[media]}, and stands for what is no text. Only text can be trained on: leave the row out."
            )
        return tokens.astype(np.int32)


def _left_out_by(messages: Sequence[Mapping[str, Any]]) -> str:
    """The fields that leave out all answers of a conversation; "" if one is trained on."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if any(map(is_trained, answers)):
        return ""
    names = [name for name in IS_TRAINED if any(message.get(name, True) in (0, False) for message in answers)]
    return " or ".join(map(repr, names))
