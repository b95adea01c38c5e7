"""The options that decide how rows are made, for runs of every method."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from liger_jax import _options
from liger_jax._options import option, share, within
from liger_jax.data.formats import FORMATS
from liger_jax.models.core.stretched import ROPE_SCALINGS
from liger_jax.training.rows import LENGTH
from liger_jax.user_errors import UserError

_TEXT = "text, or rows of text or messages: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """The data of rows, and how documents are laid into them."""

    group_of_options: ClassVar = "data"

    data: str | Sequence[str] = option(help=_TEXT, metavar="DATA", first=True)
    eval_data: Sequence[str] = option(
        (), "data for evaluation only, instead of holding out a share of --data", metavar="DATA"
    )
    subset: str | None = option(None, "the dataset's configuration")
    column: str | None = option(
        None, "the field that is trained on: a text, or a list of messages (default: by the fields' names)"
    )
    format: str | None = option(None, "the format, if rows have the fields of several formats", offered=list(FORMATS))
    stream: bool = option(False, "stream a dataset from the hub during the run")
    pack: bool = option(
        False, "fill rows of --length tokens with documents of all the data", group="speed and memory", first=True
    )
    length: int = option(
        LENGTH,
        "the most tokens of a document, and with --pack those of a row (default: {default})",
        check=within(2),
        group="speed and memory",
        first=True,
    )
    rope_scaling: str | None = option(
        None, "how the rotary embedding reaches rows beyond the model's positions (default: they are refused)",
        choices=list(ROPE_SCALINGS), group="speed and memory"
    )  # fmt: skip
    # `None` for 0.02, or for 0 with `eval_data`.
    eval_share: float | None = option(
        None, "fraction of the data that is held out for evaluation (default: 0.02)", check=share("0 holds nothing out")
    )
    rows: Mapping[str, Any] = _options.in_memory()  # iterables of rows, by their names in `data` and `eval_data`

    def __post_init__(self):
        for name in ("data", "eval_data"):
            object.__setattr__(self, name, _options.texts(getattr(self, name)))
        _options.check(self)
        if self.eval_data and self.eval_share:
            raise UserError(
                f"--eval-share={self.eval_share} and --eval-data both say what is scored. Pass one of them."
            )
        if self.stream and len(self.data) > 1:
            raise UserError("--stream reads one dataset of the hub. Pass --data one id.")

    @property
    def share_held_out(self) -> float:
        """The fraction of the data that is held out."""
        return (0.0 if self.eval_data else 0.02) if self.eval_share is None else self.eval_share

    @property
    def are_scored(self) -> bool:
        """Whether some rows are scored and not trained on."""
        return bool(self.share_held_out or self.eval_data)
