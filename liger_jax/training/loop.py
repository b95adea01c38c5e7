"""The loop over the steps of a run: what is measured and printed, when checkpoints are saved, and when it stops."""

import contextlib
import dataclasses
import math
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from liger_jax._install import install_command
from liger_jax.training import processes, signals
from liger_jax.training.checkpoints import Checkpoints
from liger_jax.training.errors import NotFiniteAtStartError, NotFiniteError, TrainingError, memory_errors
from liger_jax.training.listening import listened_or_not
from liger_jax.training.optimizer import Schedule
from liger_jax.training.rows import num_tokens
from liger_jax.training.waiting import telling

_WORDS = {  # how some figures are printed; the others as "name 0.123"
    "perplexity": "perplexity {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "memory_gib": "{:.1f} GiB",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop over the steps of a training run.

    The figures of a step are `step`, `loss`, the other scalars that the step returns, `learning_rate` if `rate` is
    given, `tokens_per_second`, `memory_gib`, and after some steps the results of `evaluate`.

    A signal, from Ctrl-C, `kill` or closing the terminal, stops the loop after the current step. The loop prints that
    it stops, and saves the state; if one of several processes gets the signal, all of them stop. A second signal raises
    `KeyboardInterrupt`, and nothing is saved. If the code of a step or of `after` raises one by itself, it is a first
    signal. The state is also saved if an error occurs before the next step is
    called, for example while its batch is made. Only states with a finite loss are saved. If SIGHUP is ignored, as
    under `nohup`, it remains ignored. The loop continues if its standard output is closed.

    Attributes:
        step: `step(state, batch) -> (state, loss)`, or `(state, (loss, others))` with other scalars by name, as made by
            `make_step`. If the batch does not have the number of tokens, the step may return it as the scalar
            `num_tokens`.
        batch_of: a function of the step's number, from 0, that returns its batch, independently of earlier calls.
        steps: how many steps the whole run has.
        checkpoints: where the state is saved, with `eval_loss` as its score; `None` to save nothing.
        every: the number of steps between two saves, each with an evaluation; `None` to save and evaluate only after
            the last step, which is always done.
        seconds: the state is also saved when so many seconds have passed since the last save; `None` for no such limit.
        evaluate: a function of the parameters that returns scores, by names that begin with "eval_"; `None` for no
            scores. A new run is scored before its first step.
        patience: the loop ends after so many evaluations without a new minimum of `eval_loss`; `None` for never.
        show: called after each evaluation with the parameters and a function that prints a text.
        check: a function that returns the loss of the parameters after a number of steps, which must be finite for a
            save. The loss that a step returns is that before its update.
        rate: the learning rate of a step, from 0.
        write: called with each step's figures.
        after: called after each step with the parameters and its figures; the loop saves and ends if it returns True.
        shown: names of the figures that the progress bar shows.
        progress: whether there is a progress bar, which needs the package tqdm.

    Example:
        >>> import optax
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> from liger_jax.training import make_step
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> from flax import nnx
        >>> graph, params = nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
        >>> optimizer, figures = optax.sgd(0.1), []
        >>> step = jax.jit(make_step(graph, optimizer), donate_argnums=0)
        >>> batch_of = lambda step: jax.numpy.ones((4, 8), int)
        >>> loop = Loop(step=step, batch_of=batch_of, steps=3, write=figures.append, progress=False)
        >>> state, stopped_by = loop.run((params, optimizer.init(params)))
        >>> [each["step"] for each in figures], stopped_by
        ([1, 2, 3], 0)
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    batch_of: Callable[[int], Any]
    steps: int
    checkpoints: Checkpoints | None = None
    every: int | None = None
    seconds: int | float | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    patience: int | None = None
    show: Callable[[Any, Callable[[str], Any]], Any] | None = None
    check: Callable[[Any, int], float] | None = None
    rate: Schedule | None = None
    write: Callable[[dict[str, Any]], Any] | None = None
    after: Callable[[Any, Mapping[str, Any]], bool] | None = None
    shown: Sequence[str] = ("loss", "tokens_per_second")
    progress: bool = True

    def run(self, state: Any, log: dict[str, Any] | None = None) -> tuple[Any, int]:
        """Runs the remaining steps.

        Args:
            state: (parameters, optimizer's state), which is donated if `step` was jitted with `donate_argnums`.
            log: the log that is saved with the state. Its list `steps` has the figures of the steps so far, to which
                those of this call are appended, and `before` the scores before the first step. `None` for a new run.

        Returns:
            The state, and the number of the signal that stopped the run, or 0 if it ran to its end.

        Raises:
            NotFiniteError: a loss is not finite.
            NotFiniteAtStartError: the loss of the first step is not finite.
            OutOfMemoryError: the device has too little memory for a step.
            OutOfHostMemoryError: XLA's pool of pinned host memory has too little for a step.
            TrainingError: a checkpoint cannot be written.
        """
        log = {"steps": []} if log is None else log
        figures: list[dict[str, Any]] = log["steps"]
        with listened_or_not(), signals.listed() as received:
            if not figures and self.evaluate is not None:
                with telling("scoring what is held out"):
                    log["before"] = scores = dict(self.evaluate(state[0]))
                self._tell(print, 0, scores, state[0])
            saved_at, is_ended = time.monotonic(), False
            with self._bar(len(figures)) as bar:
                while not (is_ended or self.is_over(figures) or processes.agreed(received)):
                    row = None
                    with self._interrupted(received, state), self._saved_if_it_fails(state, log):
                        state, row = self._one(state, len(figures) + 1)
                    if row is None:
                        break
                    if is_due := self._is_due(row["step"], saved_at):
                        row |= (scores := {} if self.evaluate is None else self.evaluate(state[0]))
                        self._tell(bar.write, row["step"], scores, state[0])
                    figures.append(row)
                    if self.write is not None:
                        self.write(row)
                    bar.set_postfix_str(self._shown(figures), refresh=False)
                    bar.update()
                    if self.after is not None:
                        with self._interrupted(received, state), self._saved_if_it_fails(state, log):
                            is_ended = self.after(state[0], dict(row))
                    if is_due or is_ended:
                        self._save(state, log)
                        saved_at = time.monotonic()
            if processes.agreed(received):
                self._save(state, log)
        return state, 0 if is_ended or self.is_over(figures) else received[0]

    def is_over(self, figures: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a run with these figures has done all its steps, or has not improved for `patience` evaluations.

        Args:
            figures: the figures of the steps so far.

        Returns:
            True if no step remains.
        """
        losses = [each["eval_loss"] for each in figures if "eval_loss" in each]
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        is_stuck = self.patience is not None and losses and len(losses) - losses.index(min(losses)) > self.patience
        return len(figures) >= self.steps or bool(is_stuck)

    def _tell(self, write, step, scores, params):
        if scores:
            reported = (_in_words(name.removeprefix("eval_"), value) for name, value in scores.items())
            write(f"step {step}: held out: {', '.join(reported)}")
        if self.show is not None:
            self.show(params, write)

    def _one(self, state, number):
        batch = self.batch_of(number - 1)
        start = time.perf_counter()
        with memory_errors(f"in step {number}. {self._kept()}"):
            state, value = self.step(state, batch)
            loss, others = value if isinstance(value, tuple) else (value, {})
            loss = float(loss)
        if number == 1 and not math.isfinite(loss):
            raise NotFiniteAtStartError(f"The loss is {loss} at step 1, before the first update, so training stops.")
        self._check_finite(loss, f"at step {number}")
        seconds = time.perf_counter() - start
        row = {"step": number, "loss": loss, **{name: float(other) for name, other in others.items()}}
        tokens = row.pop("num_tokens", None) or num_tokens(batch)
        if self.rate is not None:
            row["learning_rate"] = float(self.rate(number - 1))
        return state, row | {"tokens_per_second": tokens / seconds, "memory_gib": memory_in_use() / 2**30}

    def _is_due(self, number, saved_at):
        """Whether the state after a step is saved."""
        by_steps = number == self.steps or self.every is not None and number % self.every == 0
        if self.seconds is None or by_steps:
            return by_steps
        return bool(processes.most(time.monotonic() - saved_at > self.seconds))

    def _save(self, state, log):
        number = len(log["steps"])
        if self.check is not None:
            self._check_finite(self.check(state[0], number), f"after step {number}")
        if self.checkpoints is not None:
            score = log["steps"][-1].get("eval_loss") if log["steps"] else None
            is_finite = score is not None and math.isfinite(score)
            self.checkpoints.save(number, state, log, score if is_finite else None)

    @contextlib.contextmanager
    def _saved_if_it_fails(self, state, log):
        """A context for a step. If it raises an error, the steps before it are saved first."""
        try:
            yield
        except (TrainingError, jax.errors.JaxRuntimeError):  # of the device, or a loss that is not finite
            raise
        except Exception:
            is_saved = self.checkpoints is None or self.checkpoints.latest_step == len(log["steps"])
            # Several processes save together, and the other ones have not failed.
            if log["steps"] and not is_saved and _is_whole(state) and jax.process_count() == 1:
                with contextlib.suppress(Exception):  # the step's error is the one to report
                    self._save(state, log)
            raise

    @contextlib.contextmanager
    def _interrupted(self, received, state):
        """A context for a step and what follows it, in which a `KeyboardInterrupt` of its code is a first Ctrl-C."""
        try:
            yield
        except KeyboardInterrupt:  # the other ones of several processes have none
            if received or not _is_whole(state) or jax.process_count() > 1:
                raise
            received.append(signal.SIGINT)

    def _check_finite(self, loss, when):
        if not math.isfinite(loss):
            raise NotFiniteError(f"The loss is {loss} {when}, so training stops. {self._kept()}")

    def _kept(self):
        step = None if self.checkpoints is None else self.checkpoints.latest_step
        return "There is no checkpoint yet." if step is None else f"The checkpoint of step {step} stays."

    def _shown(self, figures):
        last = dict(figures[-1])
        last["tokens_per_second"] = statistics.median(each["tokens_per_second"] for each in figures[-20:])
        return ", ".join(_in_words(name, last[name]) for name in self.shown if name in last)

    def _bar(self, done):
        if not self.progress:
            return _NoBar()
        try:
            with warnings.catch_warnings(action="ignore"):  # in a notebook without widgets it is a line of text
                from tqdm.auto import tqdm
        except ModuleNotFoundError as error:
            raise ImportError(
                f"A progress bar needs tqdm: {install_command('finetune')}. Or pass progress=False."
            ) from error
        return tqdm(total=self.steps, initial=done, unit="step", dynamic_ncols=True)


def _is_whole(state: Any) -> bool:
    """Whether no array of a state was overwritten by a step."""
    return not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


def memory_in_use() -> int:
    """The peak of the memory in use so far."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _NoBar(contextlib.nullcontext):
    """A progress bar that shows nothing."""

    def __enter__(self):
        return self

    def write(self, text):
        print(text)

    def set_postfix_str(self, text, refresh):
        pass

    def update(self):
        pass


def _in_words(name: str, value: float) -> str:
    if name in _WORDS:
        return _WORDS[name].format(value)
    return f"{name.replace('_', ' ')} {figure(value)}"


def figure(value: float) -> str:
    """A figure as text: with three decimals, or with three significant digits if it is small."""
    return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.3f}"
