"""Documents to train on: a text, a completion of a prompt, or a conversation."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Document:
    """A text or a conversation."""

    where: str  # where it was found, in words
    text: str = ""  # the text; empty for a conversation
    messages: list[dict[str, Any]] | None = None  # the conversation's, or `None` for a text
    tools: Any = None  # functions that the assistant may call, for the chat template
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # more variables of the chat template
    unread: frozenset[str] = frozenset()  # fields that seem to choose what is trained on, but are not read
    is_named: bool = False  # whether its row has the field that `--column` names
    prompt: str | None = None  # what stands before the text and is not trained on; `None` where there is no prompt
    path: Path | None = None  # the file of a text that is too long to be held in memory, which then is not in `text`
    # The other answer, after the same prompt, where this is the chosen one of a pair.
    rejected: "Document | None" = None
    desirable: bool | None = None  # whether it is a good answer, where it has a label that says so
    is_doubted: bool = False  # by the scores in its row, the rejected answer is as good as the chosen one, or better

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it that could be trained on."""
        is_answer = self.rejected is not None or self.desirable is not None  # its place is printed if it is left out
        return self.messages is None and self.path is None and not is_answer and not self.text.strip()

    @property
    def is_blank(self) -> bool:
        """Whether its text, or an answer of its pair, has nothing but white space."""
        blank = self.messages is None and self.path is None and not self.text.strip()
        return blank or self.rejected is not None and self.rejected.is_blank

    @property
    def content(self) -> list[Any]:
        """All contents that tokens are made of, except a text in a file."""
        parts: list[Any] = [self.text, self.messages, self.tools, self.values]
        parts += [] if self.prompt is None else [self.prompt]
        parts += [] if self.desirable is None else [self.desirable]
        return parts + ([] if self.rejected is None else [self.rejected.content])


_ENCODER = json.JSONEncoder(default=str)  # `json.dumps` makes one at each call


class Fingerprint:
    """A digest of documents, which are added one after the other.

    >>> fingerprint = Fingerprint()
    >>> fingerprint.add(Document("a.txt", "one"))
    >>> str(fingerprint)
    '1 documents e62fc8379ac8'
    """

    def __init__(self):
        self.count = 0
        self._digest = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Adds a document."""
        content = _ENCODER.encode(document.content)
        self._digest.update((b", " if self.count else b"[") + content.encode())
        self.count += 1

    def add_text(self, text: str) -> None:
        """Adds a chunk of a text that is not in memory as a whole."""
        self._digest.update(text.encode())

    def __str__(self) -> str:
        digest = self._digest.copy()
        digest.update(b"]" if self.count else b"[]")
        return f"{self.count} documents {digest.hexdigest()[:12]}"
