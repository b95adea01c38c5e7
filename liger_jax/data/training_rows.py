"""A run's rows from its data: what `liger-jax finetune` trains on, and what `liger-jax data` shows."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data import reading, token_cache
from liger_jax.data.files import tell
from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.options import RowOptions
from liger_jax.data.pieces import NO_TEXT, NO_TOKEN, Piece, nothing_to_train_on
from liger_jax.data.sources import DataSource, data_sources, in_both
from liger_jax.data.sources import weight as weight_of
from liger_jax.data.step_rows import Laying, StepRows
from liger_jax.data.stream import Stream
from liger_jax.data.stream_rows import StreamRows
from liger_jax.data.token_cache import Tokens
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.training import digests, disk, rows
from liger_jax.training.rows import Mixture, hold_out, num_mixed
from liger_jax.training.waiting import telling
from liger_jax.user_errors import UserError, counted, user_errors

# The modules that tokens depend on, by their paths: if one of them changes, tokens are made anew.
MADE_BY = (
    "chat/jinja", "chat/left_out", "chat/limits", "chat/messages", "chat/prompts", "chat/spans", "chat/strict_json",
    "chat/template", "chat/template_sources", "chat/traced",
    "data/added_tokens", "data/answers", "data/conversations", "data/documents", "data/file_rows", "data/files",
    "data/formats", "data/kept_tokens", "data/long_text", "data/pieces", "data/preferences", "data/reading",
    "data/sources", "data/token_cache", "data/token_files", "data/tokenizer",
)  # fmt: skip
_ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """The data of a run, as rows."""

    rows: LaidRows | None  # the rows to train on; `None` if they are read from a stream
    held_out_rows: LaidRows | None  # the rows that are scored and not trained on; `None` if there are none
    # (rows, weight) of consecutive groups of rows, each of which an epoch has `weight` times; `None` if an epoch has
    # each row once.
    mixture: Mixture | None
    summary: str  # the numbers of documents, rows and tokens, in words
    stream: Stream | None = None  # the stream
    in_steps: StepRows | StreamRows | None = None  # the rows of each step; `None` before `laid_in_steps`

    @property
    def num_in_epoch(self) -> int:
        """How many rows an epoch has; 0 for a stream, which has none."""
        if self.mixture is not None:
            return num_mixed(self.mixture)
        return 0 if self.rows is None else self.rows.num_rows

    @property
    def laid(self) -> list[LaidRows]:
        """All rows that are not read from a stream."""
        return [each for each in (self.rows, self.held_out_rows) if each is not None]

    @property
    def _tokens(self) -> list[Tokens]:
        """The tokens of the rows to train on and of those held out, which may be the same."""
        return list({each.tokens.folder: each.tokens for each in self.laid}.values())

    def made_of(self) -> dict[str, str]:
        """Texts that identify the data of a run: its documents, and its tokens."""
        digest = digests.of_bytes("".join(each.digest for each in self._tokens).encode())[:12]
        number = sum(each.num_rows for each in self.laid)
        begins = {} if self.stream is None else self.stream.made_of()
        return begins | {
            "documents": " and ".join(each.meta["documents"] for each in self._tokens),
            "rows": f"{number} rows, as tokenizer and chat template make them: {digest}",
        }

    def laid_in_steps(self, batch: int, seed: int, epochs: float | None, steps: int, laying: Laying) -> "TrainingRows":
        """The same data with the rows of each step."""
        in_steps: StepRows | StreamRows
        if self.stream is not None:
            assert self.held_out_rows is not None
            in_steps = StreamRows(self.stream, self.held_out_rows, steps, laying)
        else:
            assert self.rows is not None
            chosen_of = rows.drawn(self.rows.num_rows, batch, seed, epochs, self.mixture)
            in_steps = StepRows(self.rows, self.held_out_rows, chosen_of, steps, laying)
        return dataclasses.replace(self, in_steps=in_steps)

    @property
    def num_stored(self) -> int:
        """The largest number of pieces in a row of `laid`."""
        return max(each.most_in_a_row for each in self.laid)

    @property
    def num_segments(self) -> int:
        """The largest number of pieces in a row of a step."""
        return self.num_stored if self.in_steps is None else self.in_steps.num_segments

    def held_out(self, most: int) -> list[Piece]:
        """The first pieces that are scored, and the first one of each group."""
        laid = self.held_out_rows
        return [] if laid is None else [laid.tokens.piece(int(i)) for i in laid.pieces[:: laid.tokens.together][:most]]

    def keep(self) -> None:
        """Keeps the tokens for the next start, and removes those of other runs in the same folder."""
        token_cache.keep(self._tokens)


def tokenizer(source: Source, vocab_size: int, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """Reads a checkpoint's tokenizer; its model's vocabulary has `vocab_size` entries."""
    with user_errors():
        stops = source.stops
    return kind(source, vocab_size, stops)


def sources_of(options: RowOptions) -> dict[str, list[DataSource]]:
    """The sources that the flags of a run name, which must be there before anything is read.

    Returns files and datasets by flag; those of `--data` are left out for a stream.
    """
    given = {} if options.stream else {"--data": options.data}
    given |= {"--eval-data": options.eval_data} if options.eval_data else {}
    sources = {
        flag: [DataSource(name, rows=options.rows[name]) for name in data if name in options.rows]
        or data_sources(data, flag)
        for flag, data in given.items()
    }
    for source in sources.get("--eval-data", []):
        if source.weight != 1:
            raise UserError(
                f"--eval-data={source.name} has a weight, but all held-out rows are weighted equally. Leave it out."
            )
    trained = sources.get("--data") or [DataSource(name) for name in options.data]  # of a stream
    if (both := in_both(trained, sources.get("--eval-data", []))) is not None:
        raise UserError(
            f"--eval-data: {both} is in --data too, so its score would be meaningless. Name it in one of them; "
            "without --eval-data, a fraction of --data is held out."
        )
    if (
        options.subset
        and not options.stream
        and all(source.paths or source.rows is not None for of_flag in sources.values() for source in of_flag)
    ):
        raise UserError(
            f"--subset={options.subset} is a dataset's configuration, and the data are files. Leave it out."
        )
    return sources


def prepared(
    options: RowOptions,
    batch: int,
    seed: int,
    encoder: Tokenizer,
    place: Path,
    sources: Mapping[str, list[DataSource]] | None = None,
) -> TrainingRows:
    """The rows of a run, whose tokens are made once: a later start finds them by the content of the data. `batch`: rows
    in a step of a stream. `seed`: of what is held out.
    """
    sources = sources_of(options) if sources is None else sources
    if options.stream:
        stream = Stream(options, batch, encoder, place)
        scored = tokens_of(options, encoder, place, sources["--eval-data"], "--eval-data")
        laid = LaidRows(scored, [np.arange(len(scored))], options.length, options.pack)
        summary = f"data: a stream of {options.data[0]}; {len(scored):,} pieces are scored"
        return TrainingRows(None, laid, None, summary, stream)
    train = tokens_of(options, encoder, place, sources["--data"])
    if not options.eval_data:
        return lay(options, seed, train)
    scored = tokens_of(options, encoder, place, sources["--eval-data"], "--eval-data")
    if train.meta["documents"] == scored.meta["documents"]:
        raise UserError("--eval-data has the content of --data, so its score would be meaningless. Pass other data.")
    return lay(options, seed, train, scored)


def tokens_of(
    options: RowOptions,
    encoder: Tokenizer,
    place: Path,
    sources: Sequence[DataSource],
    flag: str = "--data",
    refused: reading.Refused = None,
    is_kept: bool = True,
) -> Tokens:
    """The tokens of the sources that a flag names. Prints notes about them."""
    tell([path for source in sources for path in source.paths])
    loaded = {source.name: reading.rows_of(source, options.subset) for source in sources if not source.paths}
    key = _key(options, encoder, sources, loaded) if is_kept else flag.strip("-")
    if not is_kept or (tokens := token_cache.find(place, key)) is None:
        are_named: set[bool] = set()

        def read(source: DataSource) -> Iterator[reading.Document]:
            rows = loaded.get(source.name)
            for document in reading.documents_of(source, rows, options.column, options.format, refused):
                are_named.add(document.is_named)
                yield document
            if flag == "--data" and source is sources[-1]:  # rows that are scored may have other fields
                reading.check_named(options.column, are_named, refused)

        with telling("tokenising"):
            tokens = token_cache.write(place, key, sources, read, encoder, options.length, refused)
    if not tokens.meta["count"] and not refused:
        raise reading.no_text([source.name for source in sources], flag, sources[0].rows)
    if not len(tokens) and not refused:
        only_empty = {*tokens.meta["unused"]} - {NO_TEXT} == {NO_TOKEN}
        raise nothing_to_train_on(() if only_empty else _unused(tokens.meta))
    encoder.add_marks(tokens.marks, tokens.meta["chats"])
    for line in (*filter(None, [reading.unread(frozenset(tokens.meta["unread"]))]), *tokens.meta["notes"]):
        print(line)
    return tokens


def lay(options: RowOptions, seed: int, train: Tokens, scored: Tokens | None = None) -> TrainingRows:
    """Lays the pieces of documents into rows."""
    together = train.together
    number = len(train) // together
    if options.share_held_out and number < 2:
        raise UserError(
            f"The data has only one {train.kind}, so nothing can be held out. Pass more data, or --eval-share 0."
        )
    drawn = hold_out(range(number), options.share_held_out, seed)
    pieces_of = lambda some: (np.array(some, np.int64)[:, None] * together + np.arange(together)).ravel()
    chosen, held_out = map(pieces_of, drawn)
    weights, groups, mixture = [weight_of(text) for text in options.data], [chosen], None
    is_mixed = any(weight != 1 for weight in weights)
    if is_mixed:
        groups = np.split(chosen, np.searchsorted(chosen, np.cumsum(train.meta["pieces"])[:-1]))
    laid = LaidRows(train, groups, options.length, options.pack)
    if is_mixed:
        mixture = list(zip(laid.counts, weights, strict=True))
    if scored is not None:
        others: LaidRows | None = LaidRows(scored, [np.arange(len(scored))], options.length, options.pack)
    else:
        others = LaidRows(train, [held_out], options.length, options.pack) if len(held_out) else None
    return TrainingRows(laid, others, mixture, _summary(options, laid, others, mixture))


def _summary(options: RowOptions, laid: LaidRows, held_out: LaidRows | None, mixture: Mixture | None) -> str:
    tokens = int(laid.tokens.sizes()[laid.pieces].sum())
    padding = 1 - tokens / (laid.num_rows * options.length)
    meta = laid.tokens.meta
    pieces = lambda some: counted(len(some) // laid.tokens.together, laid.tokens.kind)
    read = f"{counted(meta['count'], 'document')} in {pieces(laid.tokens)}"
    rows = f"in {counted(laid.num_rows, 'row')} to train on, {padding:.1%} of them padding"
    trained = f"{pieces(laid.pieces)} with {counted(tokens, 'token')} {rows if laid.packed else 'to train on'}"
    scored = pieces([] if held_out is None else held_out.pieces)
    summary = f"data: {read}; {trained}; {scored} "
    summary += "scored" if options.eval_data else "held out"
    if mixture is not None:
        groups = zip(options.data, mixture, strict=True)
        each = "; ".join(f"{num_mixed([one]):,} of {name}, which has {one[0]:,}" for name, one in groups)
        summary += f"\nan epoch has {counted(num_mixed(mixture), 'row')}: {each}"
    others = _unused(held_out.tokens.meta) if options.eval_data and held_out is not None else []
    return "\n".join([summary, *_unused(meta), *others])


def _unused(meta: Mapping[str, Any]) -> list[str]:
    """Lines with the reasons and the places of documents without a row."""
    lines = []
    for what, unused in meta["unused"].items():
        have = "1 document has" if unused == 1 else f"{unused:,} documents have"
        first = ", ".join(meta["first_unused"][what])
        lines.append(f"{have} {what}, and no row: {first}{', …' if unused > 3 else ''}")
    return lines


def _key(options: RowOptions, encoder: Tokenizer, sources: Sequence[DataSource], loaded: Mapping[str, Any]) -> str:
    """The key of tokens: the content of the data, how it is read, and the tokenizer."""
    made: list[Any] = [importlib.metadata.version("tokenizers"), encoder.identity(), options.length]
    made += [type(encoder).__name__, options.column, options.subset, options.format]
    made += (digests.of_file(_ROOT / f"{name}.py") for name in MADE_BY)
    made += [str(datetime.date.today())] if encoder.tells_the_time else []
    with user_errors():
        size = sum(path.stat().st_size for source in sources for path in source.paths)
        with telling(f"looking at {disk.size(size)} of data") if size else contextlib.nullcontext():
            for source in sources:
                files = {str(path): digests.of_file(path) for path in source.paths}
                dataset = loaded.get(source.name)  # a dataset without a digest of its content is read anew each time
                content = files or getattr(dataset, "_fingerprint", None) or f"at {datetime.datetime.now()}"
                made.append([source.name, content])
    return digests.of_json(made)
