"""Data for your own training loop: documents, their tokens and labels, and rows."""

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import _options
from liger_jax.data import files
from liger_jax.data.documents import Document as Document
from liger_jax.data.options import RowOptions
from liger_jax.models.core.config_fields import MOST, short
from liger_jax.models.hugging_face import source
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import pack, pack_pairs, pad
from liger_jax.user_errors import needed_packages, python_words, user_errors


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a document, or of a section of it that fills a row.

    Attributes:
        input_ids: int32 (tokens,).
        labels: int32 (tokens,), unshifted: a token's own id where it is trained on, and -100 elsewhere.
        where: the place of its document in the data, in words.
        rejected: the tokens of the other answer, where these are those of a pair's chosen one.
        desirable: whether the answer is good, where its row has a label that says so.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    where: str = ""
    rejected: "Tokens | None" = None
    desirable: bool | None = None


def read(
    data: Any,
    *,
    column: str | None = None,
    format: str | None = None,
    subset: str | None = None,
) -> list[Document]:
    """Reads texts, completions and conversations, as `liger-jax finetune` does, or preferences, as `dpo` does.

    Args:
        data: files, globs, folders or datasets' ids; or an iterable of dicts, such as a list or a `datasets.Dataset`.
        column: the field that is trained on; `None` for what the fields' names say.
        format: the format of the rows, if they have the fields of several; "pairs" for those with `chosen` and
            `rejected`, and "unpaired" for those with `completion` and `label`.
        subset: the configuration of a dataset of the hub.

    Returns:
        Documents with a `text`, or with `messages`, or with a `prompt` before the text; each says `where` it was. The
        chosen answer of a pair has the other one in `rejected`, and a single answer has its label in `desirable`.

    Raises:
        TypeError: `data` is neither.
        ValueError: a file or a row cannot be used, or there is no text; the sentence names the place and the cure.

    Example:
        >>> [document.text for document in read([{"text": "one"}, {"text": "two"}])]
        ['one', 'two']
    """
    with _words():
        reading = importlib.import_module("liger_jax.data.reading")
        names, own = given_rows(data, "data")
        if format not in (None, *(known := reading.formats_of_rows())):
            raise ValueError(f"format={format!r} must be one of {', '.join(known)}.")
        if not own:
            return reading.read(names, column, subset, form=format)
        documents = list(reading.rows_to_documents(own["data"], "data", column, format))
        reading.check_named(column, [document.is_named for document in documents])
        if not (full := reading.with_text(documents)):
            raise reading.no_text(names, rows=own["data"])
        return full


def tokens(
    checkpoint: str | os.PathLike[str], documents: Iterable[Document], *, length: int | None = None
) -> list[Tokens]:
    """Encodes documents by a checkpoint's tokenizer and chat template, with a label for each token that is trained on.

    Of a text all tokens are trained on, of a prompt with its completion the completion's, and of a conversation those
    that the assistant wrote, with the mark that ends each answer. Of a pair both answers are. What is to be known of
    the documents is printed.

    Args:
        checkpoint: the folder or id of a checkpoint, whose weights are not read.
        documents: what `read` returns.
        length: the most tokens of one: a longer text is cut into several, and of a longer conversation or completion
            the rest is dropped. Both answers of a pair share it. `None` cuts nothing.

    Returns:
        The tokens of each document that has one to train on, in their order; for a pair those of the chosen answer,
        with the other one's in `rejected`. A pair of equal answers is left out.

    Raises:
        ImportError: the package tokenizers is missing.
        TypeError: `documents` are no documents, or of several kinds.
        ValueError: the tokenizer, its chat template or a document cannot be used.

    Example:
        >>> documents = read("chats.jsonl")  # doctest: +SKIP
        >>> batch = rows(tokens("./llama", documents, length=2048), length=2048)  # doctest: +SKIP
    """
    documents = list(documents)
    if wrong := [each for each in documents if not isinstance(each, Document)]:
        raise TypeError(f"documents holds {type(wrong[0]).__name__}: pass what data.read makes of rows or files.")
    kinds = {(each.rejected is not None, each.desirable is not None) for each in documents}
    if len(kinds) > 1:
        raise TypeError("documents holds pairs, answers with labels or texts together. Pass those of one kind.")
    with _words():
        answers = importlib.import_module("liger_jax.data.answers")
        kind = {(True, False): answers.PairTokenizer, (False, True): answers.UnpairedTokenizer}.get((*kinds, ())[0])
        encoder = _tokenizer(checkpoint, kind)
        pieces = encoder.pieces(documents, MOST if length is None else length)
    if kind and encoder.left_out:
        where, why = next(iter(encoder.left_out.items()))
        print(f"{len(encoder.left_out):,} of {len(documents):,} {encoder.kind}s are left out, first {where}: {why}")
    if kind is answers.PairTokenizer:
        chosen, rejected = map(_tokens_of, pieces[0::2]), map(_tokens_of, pieces[1::2])
        return [dataclasses.replace(one, rejected=other) for one, other in zip(chosen, rejected, strict=True)]
    return [_tokens_of(each) for each in pieces]


def _tokens_of(piece: Any) -> Tokens:
    document = piece.document
    return Tokens(piece.tokens, piece.labels, *((document.where, None, document.desirable) if document else ()))


def rows(tokens: Iterable[Tokens], length: int, *, packed: bool = True) -> Mapping[str, np.ndarray]:
    """Lays tokens into rows for `model(**batch)`, as `training.pack` and `training.pad` do.

    Args:
        tokens: what `tokens` returns.
        length: tokens in a row.
        packed: whether several documents share a row, in which none attends to another; else each has its own.

    Returns:
        int32 arrays of (rows, length): `input_ids`, `labels`, and `segment_ids` and `positions` where rows are packed.
        Of a pair the chosen answer comes first: where rows are packed, chosen answers are segments 1, 3, … of their
        rows, as `training.pack_pairs` lays them; else rows 0, 2, ….

    Raises:
        ValueError: `length` is less than 1, or there is no token; or a pair is longer, where rows are packed.

    Example:
        >>> some = [Tokens(np.array([5, 6, 7]), np.array([-100, 6, 7])), Tokens(np.array([8]), np.array([8]))]
        >>> rows(some, length=4)["labels"].tolist()
        [[-100, 6, 7, 8]]
    """
    some = list(tokens)
    others = [each.rejected for each in some if each.rejected is not None]
    if others and packed:
        chosen, rejected = ([each.input_ids for each in side] for side in (some, others))
        labels = dict(chosen_labels=[each.labels for each in some], rejected_labels=[each.labels for each in others])
        return pack_pairs(chosen, rejected, length, **labels)[0]
    lay, some = pack if packed else pad, _answers(some)
    return lay([each.input_ids for each in some], length, labels=[each.labels for each in some])


def _answers(tokens: Iterable[Tokens]) -> list[Tokens]:
    """The tokens of single answers, the chosen one of a pair before the rejected one."""
    return [side for each in tokens for side in (each, each.rejected) if side is not None]


class ChatTemplate:
    """A checkpoint's chat template, by which runs print conversations.

    Args:
        checkpoint: as in `tokens`.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError: the tokenizer cannot be used.

    Example:
        >>> template = ChatTemplate("./llama")  # doctest: +SKIP
        >>> text, answers = template.render([{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}])
        ... # doctest: +SKIP
        >>> [text[begin:end] for begin, end in answers]  # doctest: +SKIP
        ['b<|im_end|>']
    """

    def __init__(self, checkpoint: str | os.PathLike[str]):
        with _words():
            self._conversations = _tokenizer(checkpoint).conversations

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Prints a conversation.

        Args:
            messages: objects with `role` and `content`, and what else the template knows.
            tools: the functions that the template describes; `None` for none.
            chat_template_kwargs: more variables of the template, such as `{"enable_thinking": False}`.

        Returns:
            The text, and where in it each answer that is trained on begins and ends, with the mark that ends it.

        Raises:
            ValueError: there is no template, or it does not take the messages.

        Example:
            >>> ChatTemplate("./llama").render([{"role": "assistant", "content": "b"}])[0]  # doctest: +SKIP
        """
        with _words():
            formats = importlib.import_module("liger_jax.data.formats")
            row = dict(messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
            conversation = self._conversations.rendered(formats.document("messages", row, form="messages"))
        return conversation.text, conversation.spans

    def prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Prints a conversation up to the words that the assistant is to say next.

        Args:
            messages: as in `render`; the last one is not the assistant's.
            tools: as in `render`.
            chat_template_kwargs: as in `render`.

        Returns:
            The text.

        Raises:
            ValueError: as in `render`.

        Example:
            >>> ChatTemplate("./llama").prompt([{"role": "user", "content": "a?"}])  # doctest: +SKIP
        """
        with _words():
            formats = importlib.import_module("liger_jax.data.formats")
            row = dict(messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
            return self._conversations.prompt(formats.prompt("messages", row))


def prompt(checkpoint: str | os.PathLike[str], asked: str | list[dict[str, Any]]) -> jax.Array:
    """Encodes what a model goes on from: a text, or the messages of a conversation that the assistant answers next.

    Args:
        checkpoint: as in `tokens`.
        asked: a text, or messages, each with `role` and `content`, to which the chat template is applied.

    Returns:
        Token ids, int32 (tokens,). `model.generate` takes them as a batch, `prompt(…)[None]`.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError: the tokenizer, its chat template or the messages cannot be used.

    Example:
        >>> ids = prompt("./llama", [{"role": "user", "content": "How many?"}])  # doctest: +SKIP
        >>> text("./llama", model.generate(ids[None], max_new_tokens=20)[0, len(ids) :])  # doctest: +SKIP
    """
    with _words():
        formats = importlib.import_module("liger_jax.data.formats")
        return jnp.asarray(_tokenizer(checkpoint).prompt(formats.prompt("prompt", {"prompt": asked})))


def text(checkpoint: str | os.PathLike[str], input_ids: Any, *, special: bool = False) -> str:
    """Decodes token ids.

    Args:
        checkpoint: as in `tokens`.
        input_ids: integers (tokens,).
        special: whether special tokens, such as the mark that ends an answer, are shown.

    Returns:
        Their text.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError: the tokenizer cannot be used, or `input_ids` has more axes.

    Example:
        >>> text("./llama", [15339, 1917])  # doctest: +SKIP
    """
    ids = np.asarray(input_ids)
    if ids.ndim != 1:
        raise ValueError(f"input_ids has shape {ids.shape}, and must be (tokens,). Pass one row of a batch.")
    with _words():
        return _tokenizer(checkpoint).text(ids.tolist(), special)


def num_scored(tokens: Iterable[Tokens]) -> int:
    """How many of some tokens the loss counts: never the first of a document, which follows nothing.

    Args:
        tokens: what `tokens` returns.

    Returns:
        Their number.

    Example:
        >>> num_scored([Tokens(np.array([5, 6, 7]), np.array([5, -100, 7]))])
        1
    """
    return sum(int(np.count_nonzero(each.labels[1:] != IGNORE_INDEX)) for each in _answers(tokens))


def given_rows(given: Any, name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The rows of a call: files, a dataset's id, or an iterable of dicts.

    Returns the names of files and datasets, or else the name that is given to the rows; and the rows by it.
    """
    names = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    if texts := [each for each in names if isinstance(each, str) and _is_prose(each)]:
        raise ValueError(
            f"{name}: no file is named {short(texts[0])}. If it is a text to train on, pass dicts, such as "
            "[{'text': each} for each in texts]."
        )
    if isinstance(given, str | os.PathLike):
        return (os.path.expanduser(os.fspath(given)),), {}
    if hasattr(given, "columns") and (cure := next((each for each in _OF_TABLES if hasattr(given, each)), None)):
        raise TypeError(f"{name} is {type(given).__name__}, a table of columns. Pass {name}.{_OF_TABLES[cure]}.")
    if isinstance(given, Mapping) and "train" in given and not isinstance(given["train"], str):
        raise TypeError(f"{name} is {type(given).__name__}, with several splits. Pass one of them: {name}['train'].")
    if hasattr(given, "to_pylist"):
        raise TypeError(f"{name} is {type(given).__name__}, a table of columns. Pass {name}.to_pylist().")
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        cure = ""
        if isinstance(given, Mapping) and given and all(map(_is_column, given.values())):
            cure = f" Columns become rows by [dict(zip({name}, row)) for row in zip(*{name}.values())]."
        elif isinstance(given, Mapping):
            cure = f" Pass [{name}] for one row."
        elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
            cure = f" Pass ({name}[i] for i in range(len({name})))."
        raise TypeError(f"{name} is {type(given).__name__}, and must be files, or an iterable of dicts.{cure}")
    if isinstance(given, list | tuple) and any(isinstance(each, str | os.PathLike) for each in given):
        if wrong := [each for each in given if not isinstance(each, str | os.PathLike)]:
            raise TypeError(f"{name} holds files and {type(wrong[0]).__name__}. Pass files, or an iterable of dicts.")
        return tuple(os.path.expanduser(os.fspath(each)) for each in given), {}
    return (name,), {name: given}


def _is_column(value: Any) -> bool:
    """Whether a value has one for each of many rows, and is no conversation of one row."""
    is_many = isinstance(value, Sequence) and not isinstance(value, str) or hasattr(value, "tolist")
    return is_many and not any(isinstance(each, Mapping) and {"role", "from"} & {*each} for each in value)


def _is_prose(text: str) -> bool:
    """Whether what is given for a file's name seems to be a text to train on."""
    name = re.sub(r"=[\d.]+$", "", text)  # without a weight
    return len(name.split()) > 1 and not name.lower().endswith(files.KNOWN) and not files.found(name)


_OF_TABLES = {"to_dicts": "to_dicts()", "to_dict": "to_dict('records')"}  # how polars and pandas give rows


def _tokenizer(checkpoint: str | os.PathLike[str], kind: Any = None) -> Any:
    """The tokenizer of a checkpoint, of a class of its own for some kinds of documents."""
    read = importlib.import_module("liger_jax.data.training_rows").tokenizer
    encoder = lambda *given: read(*given) if kind is None else read(*given, kind)
    folder = source.find(os.path.expanduser(os.fspath(checkpoint)), weights=False)
    return encoder(folder, MOST if folder.is_tokenizer else folder.config.get("vocab_size", MOST))


@contextlib.contextmanager
def _words() -> Iterator[None]:
    """A context whose errors name arguments."""
    with python_words(_options.spellings(_options.options_of(RowOptions), {})), user_errors(), needed_packages():
        yield
