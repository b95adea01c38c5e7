"""A training run as a call: what the commands do, with models, rows and functions that a program has."""

import contextlib
import dataclasses
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.trainers import arguments
from liger_jax.trainers.arguments import LoRA
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.method import Method
from liger_jax.trainers.options import Settings
from liger_jax.trainers.outcome import After, Outcome
from liger_jax.trainers.start import started
from liger_jax.user_errors import Spelling, in_python

Callback = Callable[[int, Mapping[str, float], Any], bool | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run has come to.

    Attributes:
        model: the trained model, with its adapters or with these in its weights, as it was written.
        metrics: the figures of the steps by the names of log.csv, each a float64 array with one number for each step;
            NaN for a step without that figure, such as one that no evaluation follows.
        step: the step that `model` is of.
        best_step: the step with the least held-out loss, of those whose checkpoints were kept; `None` if nothing was
            scored.
        folder: where the model or its adapters were written, for `from_pretrained` and transformers; `None` without
            `out`, and for a run that was interrupted.
        interrupted: whether Ctrl-C, or a notebook's stop button, has ended the run early.
    """

    model: Any
    metrics: dict[str, np.ndarray]
    step: int
    best_step: int | None
    folder: Path | None
    interrupted: bool


def finetune(
    model: Any,
    rows: Any,
    *,
    adapters: LoRA | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    tokenizer: Any = None,
    **fields: Any,
) -> Result:
    """Trains a model to predict each token of texts, completions or conversations, as `liger-jax finetune` does.

    The checks, the sentences and the numbers are those of the command. Ctrl-C ends the run after its step, with a
    result that has the model of that step; a second one raises `KeyboardInterrupt`.

    Args:
        model: a checkpoint's folder or id; a folder of adapters, which are trained on; or a model of `liger_jax.models`
            in memory. That one is copied and stays as it is.
        rows: files, globs, folders or datasets' ids, as the command takes them; or an iterable of dicts, such as a
            list, a `datasets.Dataset` or a generator. A row has `text`, `messages`, `prompt` and `completion`, or the
            fields of another format that the command knows.
        adapters: what is trained in the place of the weights, such as `LoRA(16)`; `None` for the weights.
        out: the run's folder, for checkpoints, logs and the result. A later call with the same arguments resumes a run
            that was stopped. `None` for a temporary folder, which is removed: such a run cannot be resumed.
        callbacks: functions of (step, metrics, model) that are called after each step: with its number from 1, its
            figures by name, and the model. One that returns `True` ends the run there. The model's arrays are the
            run's own, which the next step overwrites: take a copy by `jax.tree.map(jnp.copy, nnx.state(model))`.
        tokenizer: the folder or id of the checkpoint whose tokenizer a model in memory has.
        **fields: the options of `liger-jax finetune` by their names with underscores, such as `epochs=2`,
            `learning_rate=1e-4`, `pack=True` and `eval_data`, which takes what `rows` takes.

    Returns:
        The trained model and the run's figures.

    Raises:
        TypeError: an argument is no option, or has another type.
        ValueError: the run cannot be as it is asked for, or cannot go on; the sentence names the argument and the cure.

    Example:
        >>> result = finetune("./llama", rows, adapters=LoRA(16), epochs=2, out="runs/a")  # doctest: +SKIP
        >>> result.metrics["loss"]  # doctest: +SKIP
    """
    return _run(FinetuneOptions, "task.TEXT", model, rows, adapters, out, callbacks, tokenizer, fields)


def _run(
    method: type[Method],
    task: str,
    model: Any,
    rows: Any,
    adapters: LoRA | None,
    out: str | os.PathLike[str] | None,
    callbacks: Sequence[Callback],
    tokenizer: Any,
    fields: Mapping[str, Any],
) -> Result:
    values, given = dict(fields), {}
    data = {"rows": rows, "eval_data": values.pop("eval_data", None)}
    values = arguments.values_of(method, adapters, values)
    for name, each in data.items():
        if each is not None:
            values["data" if name == "rows" else name], own = arguments.rows_of(each, name)
            given |= own
    after = _after(callbacks, sys.stdout)
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="liger-jax-", ignore_cleanup_errors=True))
        else:
            folder = os.path.expanduser(os.fspath(out))
        stack.enter_context(arguments.in_words_of_python(method))
        stack.enter_context(contextlib.redirect_stdout(_Spoken(sys.stdout, arguments.spellings(method))))
        values["model"] = arguments.stored(model, tokenizer, Path(folder))
        settings = Settings.of(method, out=folder, **values)
        settings = settings.changed(rows=given) if given else settings
        outcome = started(settings, task, length_is_given="length" in values, after=after)
        result = _result(outcome, keeps=out is not None)
    if outcome.code and (number := outcome.code - 128) != signal.SIGINT:
        signal.raise_signal(number)  # what was to end the process, now that the run is saved
    return result


class _Spoken(io.TextIOBase):
    """A stream to which a run says the names of arguments, and not of flags."""

    def __init__(self, stream: Any, spelled: Mapping[str, Spelling]):
        self._stream, self._spelled = stream, spelled

    def write(self, text: str) -> int:
        self._stream.write(in_python(text, self._spelled))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _after(callbacks: Sequence[Callback], stdout: Any) -> After | None:
    """What calls callbacks after a step; what they print is as they print it."""
    if wrong := [each for each in callbacks if not callable(each)]:
        raise TypeError(f"callbacks holds {wrong[0]!r}, and must hold functions of (step, metrics, model).")
    if not callbacks:
        return None

    def after(figures: Mapping[str, Any], model: Any) -> bool:
        ends = False
        for callback in callbacks:
            with contextlib.redirect_stdout(stdout):
                answer = callback(int(figures["step"]), dict(figures), model)
            if answer is not None and not isinstance(answer, bool | np.bool_):
                raise TypeError(
                    f"A callback returned {answer!r}, and must return True to end the run, or False or None to go on."
                )
            ends = ends or bool(answer)
        return ends

    return after


def _result(outcome: Outcome, keeps: bool) -> Result:
    names = dict.fromkeys(name for row in outcome.steps for name in row)
    metrics = {name: np.array([row.get(name, np.nan) for row in outcome.steps], float) for name in names}
    folder = outcome.target if keeps else None
    return Result(outcome.model(), metrics, outcome.step, outcome.best, folder, interrupted=bool(outcome.code))
