"""Roles of messages that nobody knows: a chat template prints them as they are, and a model has never seen them."""

import difflib

from liger_jax.commands._document import Document
from liger_jax.commands._row_formats import ROLES

_KNOWN = ("system", "user", "assistant", "tool")


class UnknownRoles:
    """The roles that neither chat templates in general know nor the one that prints them, and where they stand."""

    def __init__(self):
        self._places: dict[str, dict[str, None]] = {}  # of rows, by role, in the order of the data

    def look(self, document: Document, template: str) -> None:
        """Looks for such roles.

        `template`: the text of the chat template that prints it. A role that stands there in quotes is known.
        """
        for role in {message["role"] for message in document.messages or ()}.difference(_KNOWN):
            if f"'{role}'" not in template and f'"{role}"' not in template:
                self._places.setdefault(role, {})[document.where] = None

    def notices(self) -> dict[str, str]:
        """What is to be said of them, and forgets them."""
        noted, self._places = self._places, {}
        return {f"role {role}": _sentence(role, list(places)) for role, places in noted.items()}


def _sentence(role: str, places: list[str]) -> str:
    rows = f"{len(places):,} row{'' if len(places) == 1 else 's'} (first: {places[0]})"
    known = f"{', '.join(_KNOWN[:-1])} and {_KNOWN[-1]}"
    meant = ROLES.get(role.lower()) or next(iter(difflib.get_close_matches(role.lower(), _KNOWN, 1)), None)
    notice = f"role {role[:30]!r} in {rows} is printed as it is: chat templates know {known}"
    return notice + (f"; did you mean {meant}?" if meant else "")
