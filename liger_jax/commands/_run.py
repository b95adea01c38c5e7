"""A fine-tuning run from its settings to the folder that it leaves."""

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from liger_jax.commands import _data, _memory, _output, _rows, _training_rows
from liger_jax.commands._checkpoints import CHECKPOINTS, Checkpoints, need_orbax
from liger_jax.commands._errors import UserError, user_errors, writable_folder
from liger_jax.commands._log import Log
from liger_jax.commands._waiting import Compiling, beside, telling
from liger_jax.commands.finetune import Settings
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face import checkpoint, config_json
from liger_jax.models.lora import add_lora
from liger_jax.models.quantized import quantize
from liger_jax.planner.architectures import Architecture, architecture
from liger_jax.planner.devices import GIB
from liger_jax.training import adamw, cosine_schedule, make_step


def finetune(settings: Settings) -> int:
    """Fine-tunes a model.

    Args:
        settings: the run.

    Returns:
        The exit code: 0, or 128 and a signal's number if one stopped it.

    Raises:
        UserError: whatever the user can mend.
    """
    out = Path(settings.out)
    writable_folder(out)
    need_orbax()
    with user_errors():
        folder = checkpoint.find(settings.model)
        _output.check(settings, folder)
        stored = config_json.dtype_of(checkpoint.read_config(folder), folder / checkpoint.CONFIG)
        precision = _precision(settings, stored)
        found = architecture(folder)
        settings.check_length(found.name, found.config.longest_sequence)
        _memory.check(settings, found, **precision, stored=stored)
    documents = _data.read(settings.data, settings.column, settings.subset)
    tokenizer = _training_rows.tokenizer(folder, found)
    data = _training_rows.lay(settings, tokenizer.pieces(documents, settings.length), documents)
    train, held_out = data.rows, data.held_out_rows
    print(data.summary)
    epochs = settings.epochs_to_train
    steps = settings.steps if epochs is None else _rows.steps(_rows.count(train), settings.batch, epochs)
    rate = cosine_schedule(settings.peak_rate, steps)
    optimizer = adamw(rate, seed=settings.seed)
    rows_of = _rows.batches(train, settings.batch, settings.seed, epochs)
    batch_of = lambda step: next(_rows.parts(rows_of(step), settings.batch))
    kept = settings.of_the_run() | {"steps": steps, "documents": _data.fingerprint(documents)}
    kept |= {"rows": _rows.fingerprint(train, *([] if held_out is None else [held_out]))}
    earlier = _output.of_earlier_runs(settings, folder)
    checkpoints = Checkpoints(out / CHECKPOINTS, kept, fresh=settings.fresh, earlier=earlier)
    reading = beside(_read, settings, folder, precision)
    with user_errors(), telling("tracing"):
        programs = _programs(settings, found, precision, optimizer, batch_of(0))
    with user_errors():
        model = _with_adapters(settings, folder, reading)
    graph, params, frozen = nnx.split(model, _trained(settings), ...)
    state, keeps = (params, jax.jit(optimizer.init)(params)), model.kept
    del model, params  # a step overwrites the state in place: nothing else may hold it
    if checkpoints.latest_step is not None:  # two states need not fit: what is read takes this one's place
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    state, log = checkpoints.restore(state) or (state, {"steps": []})

    with telling("compiling"), _memory_errors("while the step was compiled."):
        step, summed = (program.result() for program in programs)
    size = settings.batch // settings.micro_batches
    score = scoring(summed, frozen)
    parts = [] if held_out is None else list(_rows.parts(held_out, size))
    evaluate = lambda params: score(params, parts) if parts else {}
    # After a step its own rows are scored; before the first one, those that it will have.
    check = lambda params, step: score(params, [next(_rows.parts(rows_of(max(0, step - 1)), size))])["eval_loss"]
    loop = _Loop(step, frozen, rate, checkpoints, log["steps"], check)
    with Log(settings.log, out, log["steps"]) as files:
        state, stopped_by = loop.run(state, batch_of, steps, settings.every, evaluate, files)
    done = len(log["steps"])
    if stopped_by:
        print(f"stopped after step {done} of {steps}, which is saved; the same command goes on from there")
        return 128 + stopped_by
    tuned = nnx.merge(graph, state[0], frozen)
    tuned.kept = keeps
    del state  # the moments' memory, in which the weights may be cast
    target = _output.write(tuned, settings, folder, tokenizer.stops)
    _output.clear(settings, checkpoints.earlier)
    checkpoints.forget_earlier()
    first, last = log["steps"][0]["loss"], log["steps"][-1]["loss"]
    what = "model" if target.name == "model" else "adapters"
    print(f"{done} steps; loss {first:.3f} → {last:.3f}; {what} in {target}")
    return 0


def loss_and_accuracy(
    model: nnx.Module, batch: Mapping[str, Any], normalizer: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The mean loss and the share of tokens that the model predicts, which costs nothing more.

    Args:
        model: a causal language model.
        batch: its arguments.
        normalizer: the denominator of both means; `None` for the batch's own number of scored tokens.

    Returns:
        Two float32 scalars, which add up over micro-batches.
    """
    out = model(**batch, loss_normalizer=normalizer, return_metrics=True)
    share = 1.0 if normalizer is None else out.metrics.num_tokens / normalizer
    return out.loss, jnp.asarray(share * out.metrics.accuracy)


class _Loop:
    """The steps of a run: what they print, save and stop for."""

    def __init__(
        self,
        step: Any,
        frozen: Any,
        rate: Any,
        checkpoints: Checkpoints,
        figures: list[dict[str, Any]],
        check: Callable[[Any, int], float],
    ):
        self._step, self._frozen, self._rate, self._checkpoints = step, frozen, rate, checkpoints
        self._figures, self._check = figures, check

    def run(self, state, batch_of, steps, every, evaluate, files) -> tuple[Any, int]:
        """Runs what is missing; returns the state, and the number of the signal that stopped it or 0."""
        figures, signals, since = self._figures, [], len(self._figures)
        stop = lambda number, frame: signals.append(number)  # a step's donated state must not be torn: stop between
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if not figures:
                with telling("scoring what is held out"):
                    scores = evaluate(state[0])
                _tell(print, 0, scores)
            with tqdm(total=steps, initial=since, unit="step", dynamic_ncols=True) as bar:
                while len(figures) < steps and not signals:
                    state, found = self._one(state, batch_of(len(figures)))
                    is_last = len(figures) + 1 == steps
                    if is_last or (len(figures) + 1) % every == 0:
                        found |= (scores := evaluate(state[0]))
                        _tell(bar.write, found["step"], scores)
                    figures.append(found)
                    files.write(found)
                    self._show(bar)
                    if len(figures) % every == 0 or is_last:
                        self._save(state)
            if signals:
                self._save(state)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return state, signals[0] if signals and len(figures) < steps else 0

    def _one(self, state, batch):
        start, number = time.perf_counter(), len(self._figures) + 1
        with _memory_errors(f"in step {number}. {self._kept()}"):
            state, (loss, accuracy) = self._step(state, batch, self._frozen)
            loss = float(loss)
        if not math.isfinite(loss):
            raise UserError(f"The loss is {loss} at step {number}, so training stops. {self._kept()} {_SMALLER}")
        seconds = time.perf_counter() - start
        return state, {
            "step": number,
            "loss": loss,
            "token_accuracy": float(accuracy),
            "learning_rate": float(self._rate(number - 1)),
            "tokens_per_second": _num_tokens(batch) / seconds,
            "memory_gib": _memory.in_use() / GIB,
        }

    def _show(self, bar):
        last, speeds = self._figures[-1], [each["tokens_per_second"] for each in self._figures[-20:]]
        text = f"loss {last['loss']:.3f}, token accuracy {last['token_accuracy']:.3f}"
        text += f", {statistics.median(speeds):,.0f} tokens/s, {last['memory_gib']:.1f} GiB"
        bar.set_postfix_str(text, refresh=False)
        bar.update()

    def _save(self, state):
        number = len(self._figures)
        loss = self._check(state[0], number)  # a step's own loss is that before its update
        if not math.isfinite(loss):
            raise UserError(f"The loss is {loss} after step {number}, so training stops. {self._kept()} {_SMALLER}")
        self._checkpoints.save(number, state, {"steps": self._figures})

    def _kept(self):
        step = self._checkpoints.latest_step
        return "There is no checkpoint yet." if step is None else f"The checkpoint of step {step} stays."


_SMALLER = "Try a smaller --learning-rate with --fresh, or with another --out."


def _precision(settings: Settings, stored: str) -> dict[str, str]:
    """Names of the dtypes of the computation and of the weights."""
    return dict(
        dtype=settings.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"),
        param_dtype=settings.param_dtype or ("float32" if settings.lora is None else stored),
    )


@contextlib.contextmanager
def _memory_errors(where: str) -> Iterator[None]:
    """A context for what the device may have too little memory for."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"The device ran out of memory {where} Try more --micro-batches, --remat full or a smaller --length."
        ) from error


def _read(settings: Settings, folder: Path, precision: dict[str, str]) -> Any:
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in precision.items()}
    return AutoModelForCausalLM.from_pretrained(folder, **options, remat=settings.remat, quantize=settings.quantize)


def _with_adapters(settings: Settings, folder: Path, reading: Future[Any]) -> Any:
    with telling(f"reading {_memory.gib(checkpoint.weight_bytes(folder))} of weights"):
        model = reading.result()
    if settings.lora is not None:
        with telling(f"adding adapters of rank {settings.lora}"):
            _add_adapters(model, settings.lora, settings)
    return model


def _add_adapters(model: Any, rank: int, settings: Settings) -> None:
    alpha = settings.lora_alpha or 2 * rank
    add_lora(model, rank, alpha=alpha, rngs=nnx.Rngs(settings.seed))


def _trained(settings: Settings) -> Any:
    """The variables that are trained, by their type."""
    return nnx.Param if settings.lora is None else nnx.LoRAParam


def _programs(
    settings: Settings, found: Architecture, precision: dict[str, str], optimizer: Any, batch: _rows.Rows
) -> tuple[Future[Any], Future[Any]]:
    """The step and the scoring, which are compiled while the weights are read: they depend on the shapes alone."""
    options = {name: jnp.dtype(dtype) for name, dtype in precision.items()}

    def make():
        model = found.family(found.config, **options, remat=settings.remat, rngs=nnx.Rngs(0))
        if settings.quantize is not None:
            quantize(model, settings.quantize)
        if settings.lora is not None:
            _add_adapters(model, settings.lora, settings)
        return model

    graph, params, frozen = nnx.split(nnx.eval_shape(make), _trained(settings), ...)
    step = make_step(graph, optimizer, loss_and_accuracy, has_aux=True, micro_batches=settings.micro_batches)
    state = (params, jax.eval_shape(optimizer.init, params))
    part, compiling = next(_rows.parts(batch, settings.batch // settings.micro_batches)), Compiling()
    return (
        compiling.start(jax.jit(step, donate_argnums=0), state, batch, frozen),
        compiling.start(sums(graph), params, frozen, part),
    )


def sums(graph: Any) -> Any:
    """What a part of rows adds to the scores.

    Args:
        graph: the model's structure.

    Returns:
        A jitted function of parameters, frozen variables and rows: the summed loss, the number of tokens that the model
        predicts, and the number of scored tokens.
    """

    @jax.jit
    def sums(params, frozen, batch):
        out = nnx.merge(graph, params, frozen)(**batch, loss_normalizer=1.0, return_metrics=True)
        return jnp.stack([out.loss, out.metrics.num_tokens * out.metrics.accuracy, out.metrics.num_tokens])

    return sums


def scoring(sums: Any, frozen: Any) -> Callable[[Any, list[_rows.Rows]], dict[str, float]]:
    """A function of parameters and rows in parts: loss, perplexity and accuracy, as means over all scored tokens.

    Args:
        sums: what `sums` returns, perhaps compiled.
        frozen: the variables that are not trained.

    Returns:
        The function.
    """

    def score(params, parts):
        totals: Any = np.sum([sums(params, frozen, part) for part in parts], axis=0, dtype=np.float64)
        loss, right, tokens = totals.tolist()
        mean = loss / tokens
        perplexity = math.exp(min(mean, 700.0))  # beyond it, more than a float holds
        return {"eval_loss": mean, "eval_perplexity": perplexity, "eval_token_accuracy": right / tokens}

    return score


def _tell(write: Callable[[str], Any], step: int, scores: dict[str, float]) -> None:
    if scores:
        loss, perplexity, accuracy = scores.values()
        write(f"step {step}: held out: loss {loss:.3f}, perplexity {perplexity:.2f}, token accuracy {accuracy:.3f}")


def _num_tokens(batch: _rows.Rows) -> int:
    """The tokens of a batch without its padding; an unpacked row's are those up to its last label."""
    if "segment_ids" in batch:
        return int(np.count_nonzero(batch["segment_ids"]))
    has_label = batch["labels"] >= 0
    ends = has_label.shape[1] - np.argmax(has_label[:, ::-1], axis=1)
    return int(np.sum(ends, where=np.any(has_label, axis=1)))
