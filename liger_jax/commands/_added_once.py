"""What a tokenizer adds to each text, such as the BOS, is there once: also where the text has it already."""

from collections.abc import Callable, Sequence
from typing import Any


class AddedOnce:
    """The texts of a run that begin or end with what the tokenizer adds."""

    def __init__(self, text: Callable[[Sequence[int]], str]):
        self._text, self._texts = text, dict[tuple[str, str], int]()

    def of(self, encoded: Any, to_go_on: bool = False) -> slice:
        """Which tokens of an encoded text count."""
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
        """What is to be said of such texts since it was said last: sentences by what they are about."""
        noted, self._texts = self._texts, {}
        sentences = {}
        for (verb, tokens), number in noted.items():
            texts = f"1 text {verb}s" if number == 1 else f"{number:,} texts {verb}"
            sentences[f"{verb} {tokens}"] = (
                f"{texts} with {tokens!r}, which the tokenizer adds as well: it is there once"
            )
        return sentences
