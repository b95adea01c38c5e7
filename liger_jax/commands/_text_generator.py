"""A model that generates text: a checkpoint, or adapters and the model that they belong to, with their tokenizer."""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax.commands._generation import MOST_NEW_TOKENS, Generation
from liger_jax.data.reading import Document
from liger_jax.data.tokenizer import FILE, Tokenizer
from liger_jax.models import AutoModelForCausalLM, stream
from liger_jax.models.hugging_face import checkpoint
from liger_jax.models.hugging_face.checkpoint import CONFIG
from liger_jax.models.hugging_face.config_json import loads
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.models.lora import load_adapters
from liger_jax.planner import defaults
from liger_jax.trainers.result import CHECKPOINTS, places
from liger_jax.training.waiting import telling
from liger_jax.user_errors import UserError, counted, of_option, quantizing, user_errors

_ADAPTER_CONFIG = checkpoint.ADAPTERS.config
_LEAST_SLOTS = 64  # tokens of the shortest padded prompt; each further program takes prompts of up to twice as many
_UNFINISHED = "\ufffd"  # decoded in place of a character whose tokens are incomplete


class TextGenerator:
    """A model with its tokenizer."""

    def __init__(self, options: Generation):
        self._options, self._texts = options, 0
        self.figures = ""  # of the newest text, once it has ended
        self._compiled: set[tuple[int, int]] = set()  # tokens of padded prompts, and of what is generated
        self._printed: set[str] = set()  # notices of earlier turns, which are not repeated
        with user_errors():
            result = _result(options.model)
            adapters = result if isinstance(result, Source) and _has(result, _ADAPTER_CONFIG) else None
            if options.base is not None and adapters is None:
                raise UserError(f"--base is for adapters, and {options.model} has no {_ADAPTER_CONFIG}.")
            with of_option("--model"):
                source = find(result if adapters is None else _base(adapters, options.base))
            dtype = jnp.dtype(options.dtype or defaults.dtype())
            stops = list(source.stops)
            what = str(source.folder if adapters is None else f"{source.folder} with the adapters of {adapters.folder}")
            with contextlib.redirect_stdout(sys.stderr), telling(f"reading {what}"):
                # With stacked layers the step of each token would copy some of the weights that it reads.
                given: Any = dict(dtype=dtype, quantize=options.quantize, scan_layers=False)
                with quantizing("--quantize", options.quantize, options.model):
                    self._model = AutoModelForCausalLM.from_pretrained(source, **given)
                if adapters is not None:
                    load_adapters(self._model, adapters.folder)
                    stops += _stops(adapters)
            files = adapters if adapters is not None and adapters.tokenizer[FILE] is not None else source
        self.tokenizer = Tokenizer(files, self._model.config.vocab_size, stops)

    def check_template(self) -> None:
        """Refuses a model without a chat template."""
        if not self.tokenizer.has_template:
            raise UserError(
                f"The tokenizer of {self._options.model} has no chat template, so a conversation cannot be "
                "rendered. liger-jax generate continues texts."
            )

    def generate(self, document: Document) -> Iterator[str]:
        """Continues a text or a conversation."""
        self.figures = ""
        prompt = self.tokenizer.prompt(document)
        notices = self.tokenizer.notices()
        for about in notices.keys() - self._printed:
            print(notices[about], file=sys.stderr)
        self._printed |= notices.keys()
        longest, asked = self._model.config.longest_sequence, self._options.max_new_tokens
        new = min(MOST_NEW_TOKENS, longest - len(prompt)) if asked is None else asked
        if new < 1 or len(prompt) + new > longest:
            more = f", and --max-new-tokens={asked} adds to them" if asked else ""
            raise UserError(
                f"{document.where} has {counted(len(prompt), 'token')}{more}: the model takes {longest:,} in all."
            )
        words = _Words(lambda tokens: self.tokenizer.text(tokens, special=False), prompt)
        start = first = time.perf_counter()
        count, has_ended = 0, False
        for token in self._tokens(prompt, new, longest):
            if token < 0:
                raise UserError("The model's logits are NaN. Its weights may be damaged, or try --dtype float32.")
            count += 1
            if count == 1:
                first = time.perf_counter()
            if has_ended := token in self.tokenizer.stops:
                break
            yield words.of(token)
        yield words.rest()
        self.figures = _in_words(count, None if has_ended else new, first - start, time.perf_counter() - first)

    def _tokens(self, prompt: np.ndarray, new: int, longest: int) -> Iterator[int]:
        """The new tokens. Prompts are padded to a few lengths, so that few programs are compiled."""
        slots = max(len(prompt), min(longest - new, max(_LEAST_SLOTS, 1 << (len(prompt) - 1).bit_length())))
        padding = slots - len(prompt)
        options = dict(max_new_tokens=new, attention_mask=jnp.arange(slots)[None] >= padding)
        if self._options.temperature > 0:
            key = jax.random.fold_in(jax.random.key(self._options.seed), self._texts)
            options |= dict(
                temperature=self._options.temperature, top_p=self._options.top_p, top_k=self._options.top_k, key=key
            )
        self._texts += 1
        stops = [stop for stop in self.tokenizer.stops if stop < self._model.config.vocab_size]
        with user_errors():
            tokens = stream(self._model, jnp.pad(prompt, (padding, 0))[None], eos_token_id=stops, **options)
        tokens = (int(token[0]) for token in tokens)
        if (slots, new) not in self._compiled:  # the first token waits for the programs of all
            self._compiled.add((slots, new))
            with contextlib.redirect_stdout(sys.stderr), telling("compiling, for prompts of this length"):
                tokens = itertools.chain([next(tokens)], tokens)
        return tokens


def _in_words(count: int, cut_at: int | None, until_first: float, seconds: float) -> str:
    rate = f", then {(count - 1) / seconds:,.1f} tokens/s" if count > 1 else ""
    cut = "" if cut_at is None else f"; --max-new-tokens={cut_at} cuts it off"
    return f"[{counted(count, 'token')}: the first after {until_first:.2f} s{rate}{cut}]"


class _Words:
    """Decodes tokens one by one. A token's text depends on those before it, and a character may have several tokens."""

    def __init__(self, text: Callable[[list[int]], str], prompt: np.ndarray):
        self._text = text
        self._tokens = prompt[-8:].tolist()
        self._begin, self._shown = 0, len(self._tokens)  # the first token to decode, and the number that were printed

    def of(self, token: int) -> str:
        """The text that a token adds, which is empty within a character."""
        self._tokens.append(token)
        return "" if self._new().endswith(_UNFINISHED) else self._tell()

    def rest(self) -> str:
        """The text of an unfinished character."""
        return self._tell()

    def _new(self) -> str:
        before = self._text(self._tokens[self._begin : self._shown])
        return self._text(self._tokens[self._begin :])[len(before) :]

    def _tell(self) -> str:
        text = self._new()
        self._begin, self._shown = self._shown, len(self._tokens)
        return text


def _has(source: Source, name: str) -> bool:
    return (source.folder / name).is_file()


def _result(name: str) -> Source | str:
    """The folder with a model or adapters: the given one, or a run's result within it. Else an id."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    for place in (folder, *places(folder)):
        if (place / _ADAPTER_CONFIG).is_file() or (place / CONFIG).is_file():
            return Source(place)
    if (folder / CHECKPOINTS).is_dir():
        raise UserError(f"{name} holds a run that is not finished. Repeat its command to resume it.")
    return name


def _base(adapters: Source, asked: str | None) -> str:
    """The model that adapters belong to."""
    path = adapters.folder / _ADAPTER_CONFIG
    base = asked or loads(path.read_bytes(), path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path} does not name the base model of the adapters. Name it with --base.")
    try:
        return find(base).folder.as_posix()
    except (OSError, ImportError) as error:
        raise UserError(f"The adapters' base model, {base!r}: {error} Say where it is with --base.") from error


def _stops(adapters: Source) -> list[int]:
    """The tokens that end a text by the adapters' own generation_config.json."""
    stops = json.loads(adapters.generation or "{}").get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
