"""A training run as a call: what the commands do, with models, rows and functions that a program has."""

import contextlib
import dataclasses
import importlib
import inspect
import os
import signal
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from liger_jax import _simulated
from liger_jax.data.public import given_rows
from liger_jax.trainers import arguments
from liger_jax.trainers.arguments import LoRA
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.method import Method
from liger_jax.trainers.options import Settings
from liger_jax.trainers.outcome import After, Outcome
from liger_jax.trainers.start import started
from liger_jax.training.compiled_programs import compiled_programs_kept
from liger_jax.training.meshes import NO_MESH
from liger_jax.user_errors import counted, needed_packages, python_words, users_words

Callback = Callable[[int, Mapping[str, float], Any], bool | None]
_RUNNING = threading.RLock()  # a callback may start a run of its own


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a training run.

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
        mesh: the devices of a run on several, over which `model` splits its weights and its batches: call it within
            `jax.set_mesh(result.mesh)`. `None` for one device.
    """

    model: Any = dataclasses.field(repr=False)
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    step: int
    best_step: int | None
    folder: Path | None
    interrupted: bool
    mesh: jax.sharding.Mesh | None = None


def finetune(
    model: Any,
    rows: Any,
    *,
    adapters: LoRA | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Result:
    """Trains a model to predict each token of texts, completions or conversations, as `liger-jax finetune` does.

    The checks, the sentences and the numbers are those of the command. Ctrl-C ends the run after its step, with a
    result that has the model of that step; a second one raises `KeyboardInterrupt`.

    Args:
        model: a checkpoint's folder or id; a folder of adapters, which are trained on; a model of `liger_jax.models` in
            memory; or an NNX module with a method `hidden_states(input_ids)` and a `head` (vocabulary, width). What is
            in memory is copied and stays as it is.
        rows: files, globs, folders or datasets' ids, as the command takes them; or an iterable of dicts, such as a
            list, a `datasets.Dataset` or a generator. A row has `text`, `messages`, `prompt` and `completion`, or the
            fields of another format that the command knows.
        adapters: what is trained instead of the weights, such as `LoRA(16)`; `None` trains the weights.
        out: the run's folder, for checkpoints, logs and the result. A later call with the same arguments resumes a run
            that was stopped. `None` for a temporary folder, which is removed: such a run cannot be resumed.
        callbacks: a function of (step, metrics, model), or several, called after each step: with its number from 1, its
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
    return _run(FinetuneOptions, "text.TASK", model, rows, adapters, out, callbacks, tokenizer, fields)


def dpo(
    model: Any,
    rows: Any,
    *,
    adapters: LoRA | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Result:
    """Trains a model on pairs of answers, of which one is preferred, as `liger-jax dpo` does.

    Args:
        model: as in `finetune`. It is the reference, too: with its adapters off where these are new, else as it begins.
        rows: as in `finetune`, with `chosen` and `rejected`, and perhaps `prompt`: texts or lists of messages. With
            `loss="kto"` a row has `completion` and `label`.
        adapters: as in `finetune`.
        out: as in `finetune`.
        callbacks: as in `finetune`.
        tokenizer: as in `finetune`.
        **fields: the options of `liger-jax dpo` by their names with underscores, such as `loss="ipo"`, `beta=0.2`,
            `epochs=2`, and `eval_data`.

    Returns:
        The trained model and the run's figures.

    Raises:
        TypeError: as in `finetune`.
        ValueError: as in `finetune`.

    Example:
        >>> result = dpo("./llama", pairs, loss="sigmoid", beta=0.1, adapters=LoRA(16))  # doctest: +SKIP
        >>> result.metrics["rewards/margins"][-1]  # doctest: +SKIP
    """
    return _run(PairOptions, "pairs.of_run", model, rows, adapters, out, callbacks, tokenizer, fields)


def grpo(
    model: Any,
    rows: Any,
    *,
    rewards: Any = None,
    reward_weights: Sequence[float] | None = None,
    adapters: LoRA | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Result:
    """Trains a model by rewarding its completions, as `liger-jax grpo` does.

    Args:
        model: as in `finetune`.
        rows: as in `finetune`, each with a `prompt`, a text or messages; rewards are given its other fields.
        rewards: functions that score completions, with TRL's signature: one takes `completions`, `prompts` and the
            rows' fields by name, each a list over the whole batch, and returns a number for each completion, or `None`
            where it does not apply. Or names such as "module:function".
        reward_weights: a factor for the numbers of each function; `None` for 1.
        adapters: as in `finetune`.
        out: as in `finetune`. A run is resumed with functions of the same names.
        callbacks: as in `finetune`.
        tokenizer: as in `finetune`.
        **fields: the options of `liger-jax grpo` by their names with underscores, such as `group=8`, `batch=64` and
            `completion_length=256`.

    Returns:
        The trained model and the run's figures.

    Raises:
        TypeError: as in `finetune`.
        ValueError: as in `finetune`; or a reward has failed, or answers with what is no number.

    Example:
        >>> short = lambda completions, **_: [-len(text) for text in completions]
        >>> result = grpo("./llama", prompts, rewards=[short], group=8)  # doctest: +SKIP
        >>> result.metrics["reward"]  # doctest: +SKIP
    """
    arguments.values_of(GrpoOptions, adapters, fields)  # names an argument that is TRL's, such as reward_funcs
    texts, functions = arguments.rewards_of(rewards, reward_weights)
    given = dict(reward=texts), dict(functions=functions)
    return _run(GrpoOptions, "policy.TASK", model, rows, adapters, out, callbacks, tokenizer, fields, *given)


def distill(
    model: Any,
    rows: Any,
    *,
    teacher: Any,
    adapters: LoRA | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Result:
    """Trains a model to match the probabilities of a larger one, as `liger-jax distill` does.

    Args:
        model: the student, as in `finetune`.
        rows: as in `finetune`.
        teacher: a checkpoint's folder or id, or a model of `liger_jax.models` in memory, which stays as it is. Its
            tokenizer is the student's.
        adapters: as in `finetune`.
        out: as in `finetune`.
        callbacks: as in `finetune`.
        tokenizer: as in `finetune`; without it, a teacher in memory takes that of a student's checkpoint.
        **fields: the options of `liger-jax distill` by their names with underscores, such as
            `divergence="reverse_kl"`, `top_k=64` and `hard_weight=0.2`.

    Returns:
        The trained model and the run's figures.

    Raises:
        TypeError: as in `finetune`.
        ValueError: as in `finetune`.

    Example:
        >>> result = distill("./small", rows, teacher="./large", top_k=64)  # doctest: +SKIP
        >>> result.metrics["eval_divergence"]  # doctest: +SKIP
    """
    given = dict(teacher=teacher)
    return _run(DistillOptions, "distillation.of_run", model, rows, adapters, out, callbacks, tokenizer, fields, given)


def _run(
    method: type[Method],
    task: str,
    model: Any,
    rows: Any,
    adapters: LoRA | None,
    out: str | os.PathLike[str] | None,
    callbacks: Callback | Iterable[Callback] | None,
    tokenizer: Any,
    fields: Mapping[str, Any],
    own: Mapping[str, Any] = types.MappingProxyType({}),
    in_memory: Mapping[str, Any] = types.MappingProxyType({}),
) -> Result:
    """Runs a method. `own`: the method's arguments that are options. `in_memory`: objects of the program."""
    _simulated.threads_given()  # a notebook may ask for several devices after its imports
    is_named = isinstance(model, str | os.PathLike)
    if not isinstance(tokenizer, str | os.PathLike | None):
        raise TypeError(
            f"tokenizer is {type(tokenizer).__name__}, and must be a checkpoint's folder or id. One of transformers is "
            "written into a folder by its save_pretrained."
        )
    if tokenizer is not None and is_named and isinstance(own.get("teacher", ""), str | os.PathLike):
        raise TypeError("tokenizer is for a model in memory, and a checkpoint has its own. Leave it out.")
    for name, each in {"model": model, "teacher": own.get("teacher", "")}.items():
        if isinstance(each, nnx.Module) and tokenizer is None and (name == "model" or not is_named):
            raise TypeError(f"{name} is in memory, and has no tokenizer: pass tokenizer, a checkpoint's folder or id.")
    if rows is None:
        raise TypeError("rows is None, and must be files, or an iterable of dicts.")
    if not isinstance(out, str | os.PathLike | None):
        raise TypeError(f"out={out!r} must be a folder's path, or None for none.")
    fields, given = dict(fields), {}
    data = {"rows": rows, "eval_data": fields.pop("eval_data", None)}
    values = arguments.values_of(method, adapters, fields) | dict(own)
    for name, each in data.items():
        if each is not None:
            values["data" if name == "rows" else name], of_name = given_rows(each, name)
            given |= of_name
    after = _after(callbacks, keeps=out is not None)
    with contextlib.ExitStack() as stack:
        if not _RUNNING.acquire(blocking=False):
            raise ValueError(
                "A run goes on in another thread, and what runs print and the devices' memory are the whole process's. "
                "Start this one after it, or in another process."
            )
        stack.callback(_RUNNING.release)
        stack.enter_context(compiled_programs_kept())
        if out is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="liger-jax-", ignore_cleanup_errors=True))
        else:
            folder = os.path.expanduser(os.fspath(out))
        stack.enter_context(python_words(arguments.spellings(method)))
        stack.enter_context(arguments.copies_removed(Path(folder)))
        if not (is_own := arguments.is_own(model) and method is FinetuneOptions) or "mesh" in values:
            stack.enter_context(jax.set_mesh(NO_MESH))  # a program's own, or that of a run whose callback this is
        named = {name: "…" for name in ("model", "teacher") if name == "model" or name in values}
        Settings.of(method, out=folder, **values | named)  # refuses values before a model is written
        if is_own:
            values["model"] = f"a {type(model).__name__} in memory"
        else:
            values["model"] = arguments.stored(model, tokenizer, Path(folder))
        if "teacher" in values:
            itself = values["model"] if tokenizer is None else tokenizer
            values["teacher"] = arguments.stored(values["teacher"], itself, Path(folder), "teacher")
        settings = Settings.of(method, out=folder, **values)
        settings = settings.changed(rows=given, is_kept=out is not None, **in_memory)
        if is_own:
            with needed_packages():
                own_model = importlib.import_module("liger_jax.trainers.own_model")
            outcome = own_model.train(settings, model, tokenizer, after)
        else:
            outcome = started(settings, task, length_is_given="length" in values, after=after)
        result = _result(outcome, keeps=out is not None)
    if outcome.code and (number := outcome.code - 128) != signal.SIGINT:
        signal.raise_signal(number)  # the run is saved, so the signal may end the process as it was to
    return result


def _after(callbacks: Callback | Iterable[Callback] | None, keeps: bool) -> After | None:
    """A function that calls the callbacks after each step. `keeps`: whether the run has a folder."""
    if callbacks is None or callable(callbacks):
        callbacks = [] if callbacks is None else [callbacks]
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks={callbacks!r} must be a function of (step, metrics, model), or several.")
    callbacks = tuple(callbacks)
    for each in callbacks:
        if not callable(each):
            raise TypeError(f"callbacks holds {each!r}, and must hold functions of (step, metrics, model).")
        with contextlib.suppress(ValueError):  # the function has no signature to look at
            try:
                inspect.signature(each).bind(1, {}, None)
            except TypeError as error:
                raise TypeError(
                    f"A callback is called with (step, metrics, model), and {each!r} is not: {error}."
                ) from None
    if not callbacks:
        return None

    def after(figures: Mapping[str, Any], model: Any) -> bool:
        step = int(figures["step"])
        try:
            return any([_answer(callback, step, dict(figures), model) for callback in callbacks])
        except Exception as error:
            kept = f"Step {step} is saved in out, and the same call resumes from there."
            lost = f"The run has no out, so that nothing of its {counted(step, 'step')} is kept."
            error.add_note(kept if keeps else lost)
            raise

    return after


def _answer(callback: Callback, step: int, figures: Mapping[str, Any], model: Any) -> bool:
    """Whether a callback ends the run."""
    with users_words():
        answer = callback(step, figures, model)
    is_scalar = getattr(answer, "shape", None) == () and getattr(answer, "dtype", None) == np.bool_  # NumPy's, or JAX's
    if answer is not None and not isinstance(answer, bool) and not is_scalar:
        raise TypeError(
            f"A callback returned {answer!r}, and must return True to end the run, or False or None to go on."
        )
    return bool(answer)


def _result(outcome: Outcome, keeps: bool) -> Result:
    names = dict.fromkeys(name for row in outcome.steps for name in row)
    metrics = {name: np.array([row.get(name, np.nan) for row in outcome.steps], float) for name in names}
    folder = outcome.target if keeps else None
    return Result(outcome.model(), metrics, outcome.step, outcome.best, folder, bool(outcome.code), outcome.mesh)
