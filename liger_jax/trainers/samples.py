"""Samples: how the model continues held-out rows, which a run prints at each evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax.data.tokenizer import Piece, Tokenizer
from liger_jax.models import generate
from liger_jax.ops.labels import IGNORE_INDEX

NEW_TOKENS = 64
_MOST_OF_TEXT = 32  # the most tokens of a text that are given; of a conversation, all before the first answer is given
_SHOWN = 80  # characters of the prompt that are printed


class Samples:
    """Held-out rows, whose beginnings are the model's prompts."""

    def __init__(self, pieces: Sequence[Piece], tokenizer: Tokenizer, longest: int, unit: int = 1):
        self._has_shown = False
        self._unit, self._tokenizer, self._new = unit, tokenizer, min(NEW_TOKENS, max(1, longest // 2))
        self._prompts = [beginning(piece)[-(longest - self._new) :] for piece in pieces]

    def show(self, model: nnx.Module, write: Callable[[str], Any]) -> None:
        """Prints how a model continues each of them, by greedy decoding."""
        if not self._prompts:
            return
        if not self._has_shown:
            write("samples: what continues them is compiled …")
            self._has_shown = True
        width = max(map(len, self._prompts))
        filled = self._prompts + self._prompts[-1:] * (-len(self._prompts) % self._unit)
        rows = np.stack([np.pad(tokens, (width - len(tokens), 0)) for tokens in filled])
        mask = np.stack([np.arange(width) >= width - len(tokens) for tokens in filled])
        stops: Any = tuple(self._tokenizer.stops)
        options: Any = dict(attention_mask=jnp.asarray(mask), eos_token_id=stops)
        out = generate(model, jnp.asarray(rows), max_new_tokens=self._new, **options)
        for number, (prompt, new) in enumerate(zip(self._prompts, np.asarray(out)[:, width:], strict=False), 1):
            ends = np.flatnonzero(np.isin(new, stops))
            given = self._tokenizer.text(prompt.tolist(), special=False)
            answer = _decoded(self._tokenizer, new[: ends[0] if ends.size else None].tolist())
            write(f"sample {number}: {_in_line(given)[-_SHOWN:]} ▸ {answer}")


def beginning(piece: Piece) -> np.ndarray:
    """The tokens of a piece that a model is given as a prompt.

    Returns all tokens before the first answer; for a text, its first half or fewer.
    """
    document = piece.document
    if document is not None and (document.messages is not None or document.prompt is not None):
        return piece.tokens[: 1 + int(np.argmax(piece.labels[1:] != IGNORE_INDEX))]
    return piece.tokens[: min(_MOST_OF_TEXT, max(1, len(piece.tokens) // 2))]


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text that a model has generated, in one line without invisible characters."""
    if not tokens:
        return "(nothing: the first token ends the text)"
    text = _in_line(tokenizer.text(tokens, special=False))
    return text or f"(nothing visible: {tokenizer.text(tokens)!r})"


def _in_line(text: str) -> str:
    """The text without line breaks, and with the codes of characters that cannot be printed."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(text.split()))
