"""Fine-tuning of a user's own model: an NNX module with hidden states and a head."""

import dataclasses
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import partial_eval

from liger_jax.data import token_cache, training_rows
from liger_jax.losses import shifted_labels
from liger_jax.models import Layout
from liger_jax.models.hugging_face import source
from liger_jax.ops import fused_linear_cross_entropy
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.trainers import log, outlook, own_mesh, result, step_sizes, unchanged
from liger_jax.trainers.errors import training_errors, writable_folder
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.finish import learned
from liger_jax.trainers.options import Settings
from liger_jax.trainers.outcome import After, Outcome
from liger_jax.trainers.text import TASK
from liger_jax.training import Checkpoints, Loop, digests, lock, make_step, meshes, scoring
from liger_jax.user_errors import UserError, need, of_option

# Options that apply only to checkpoints in Hugging Face's form or to the families of `liger_jax.models`.
_OF_OURS = (
    "lora", "quantize", "remat", "rope_scaling", "dtype", "param_dtype", "verify", "merge", "save_dtype", "result_of",
    "push", "samples",
)  # fmt: skip


class Whole(nnx.Module):
    """A user's model, called as training calls one of ours."""

    config = None

    def __init__(self, own: nnx.Module, layout: Layout | None = None):
        self.own, self.layout = own, layout  # how rows and parameters lie on a mesh; `None` for the arrays' own devices

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        labels: jax.Array,
        loss_normalizer: Any = None,
        token_scaling: bool = False,
        return_metrics: bool = True,
        **others: jax.Array,
    ) -> Any:
        """The loss and its metrics; of `others`, the model gets those that it takes."""
        own: Any = nnx.clone(self.own)  # Flax lets what is made in a transformation change there, such as counters
        taken = {name: x for name, x in (_alone(input_ids) | others).items() if name in _parameters(own)}
        targets = shifted_labels(labels, others.get("segment_ids"))
        options: dict[str, Any] = dict(reduction="sum", return_metrics=True, token_scaling=token_scaling)

        def summed(hidden, targets, head):
            loss, metrics = fused_linear_cross_entropy(hidden, head, targets, **options)
            return loss, metrics.predicted_tokens

        if self.layout is None:
            loss, predicted = summed(own.hidden_states(input_ids, **taken), targets, _head(own))
        else:
            hidden = own_mesh.hidden_states(own, input_ids, taken, self.layout)
            loss, predicted = self.layout.run_sum(summed, (hidden, targets), head=_head(own))
        is_scored = targets != IGNORE_INDEX
        num_tokens = jnp.sum(is_scored).astype(jnp.float32)
        accuracy = jnp.sum(is_scored & (predicted == targets)) / jnp.maximum(num_tokens, 1.0)
        loss = loss / (jnp.maximum(num_tokens, 1.0) if loss_normalizer is None else loss_normalizer)
        return types.SimpleNamespace(loss=loss, metrics=types.SimpleNamespace(num_tokens=num_tokens, accuracy=accuracy))


@training_errors()
def train(settings: Settings[FinetuneOptions], model: Any, tokenizer: Any, after: After | None) -> Outcome:
    """Trains a copy of a model in memory, where its arrays are, or on the mesh of the settings."""
    need("orbax.checkpoint", "tqdm")
    _check(settings, model)
    devices = own_mesh.chosen(settings.placement.mesh, settings.recipe.rows_at_once)
    out = Path(settings.folder.out)
    writable_folder(out)
    with lock.held(out), token_cache.leftovers_removed(out):
        if "csv" in settings.folder.log:
            log.check_table(out / log.TABLE)
        parts = _Parts.of(model, devices.layout)  # on the model's own devices, as what follows may not be
        with devices.context():
            return _train(settings, parts, tokenizer, after, devices)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A user's model in parts."""

    graph: Any
    params: Any  # what is trained
    frozen: Any
    head: Any  # the type of the head
    names: Mapping[str, inspect.Parameter]  # the parameters of its hidden states
    digest: str  # of the arrays

    @classmethod
    def of(cls, model: Any, layout: Layout | None) -> "_Parts":
        """Splits a model."""
        kind = nnx.LoRAParam if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)) else nnx.Param
        _check_trained(nnx.state(model, kind))
        graph, params, frozen = nnx.split(Whole(model, layout), kind, ...)
        digest = digests.of_json(digests.of_leaves((params, frozen)))
        return cls(graph, params, frozen, jax.typeof(_head(model)), _parameters(model), digest)


def _train(
    settings: Settings[FinetuneOptions], parts: _Parts, tokenizer: Any, after: After | None,
    devices: own_mesh.OwnDevices,
) -> Outcome:  # fmt: skip
    recipe, out, graph = settings.recipe, Path(settings.folder.out), parts.graph
    with of_option("--tokenizer"):
        checkpoint = source.find(tokenizer, weights=False)
    encoder = training_rows.tokenizer(checkpoint, parts.head.shape[0])
    data = training_rows.prepared(settings.rows, recipe.batch, recipe.seed, encoder, out / token_cache.FOLDER)
    print(data.summary)
    if devices.line:
        print(devices.line)
    print(f"trained: {sum(x.size for x in jax.tree.leaves(parts.params)):,} parameters")
    steps = recipe.num_steps(data.num_in_epoch)
    takes_segments = {"segment_ids", "positions"} <= parts.names.keys()
    laying = step_sizes.laying_of(
        settings,
        parts.head.shape[1],
        whole=True,
        longest=settings.rows.length,  # what the model takes is not known
        takes_segments=takes_segments,
        in_segments=takes_segments,
        shards=meshes.shards_of_batch(devices.sizes),
    )
    data = data.laid_in_steps(*recipe.order, steps, laying)
    in_steps = data.in_steps
    assert in_steps is not None
    for line in (
        *step_sizes.lines(settings, data, steps, laying, takes_segments),
        *outlook.lines(settings, steps, stops=bool(encoder.stops)),
    ):
        print(line)
    rate = recipe.rate(settings.peak_rate, steps)
    optimizer = recipe.optimizer_of(rate)
    made_of = data.made_of() | {"weights": parts.digest, "steps": steps}
    made_of |= step_sizes.identity(data, laying)
    checkpoints = Checkpoints(
        out / result.CHECKPOINTS, settings.of_the_run() | made_of, fresh=settings.folder.fresh,
        keep=settings.folder.keep, growing=("steps", "epochs"),
    )  # fmt: skip
    checkpoints.check()
    data.keep()
    options: dict[str, Any] = dict(normalizer=TASK.normalizer(settings, data), has_aux=True, grad_norm=True)
    step_of = lambda size: make_step(
        graph, optimizer, TASK.loss(settings, data), micro_batches=size.micro_batches, **options
    )
    state, frozen = devices.started(parts.params, optimizer), devices.placed(parts.frozen)
    programs = {size: devices.jitted(step_of(size), state, optimizer) for size in in_steps.sizes}
    sums = TASK.sums(graph, settings, data)
    state, entries = checkpoints.restore(state) or (state, {"steps": []})
    figures = entries["steps"]
    placed_sums = lambda params, frozen, batch: sums(params, frozen, devices.place(batch))
    score, held_out = scoring(placed_sums, frozen, TASK.scores), in_steps.scored()
    its_rows = lambda step: [in_steps.some_of(max(0, step - 1))]
    whole = lambda params: nnx.merge(graph, *jax.tree.map(lambda x: x, (params, frozen))).own  # with own variables
    with log.Log(settings.folder.log, out, TASK.columns, figures, settings.to_write()) as files:
        loop = Loop(
            step=lambda state, batch: programs[in_steps.size_of(len(figures))](state, batch, frozen),
            batch_of=lambda step: devices.place(in_steps.rows_of(step)),
            steps=steps,
            checkpoints=checkpoints,
            every=settings.folder.every,
            evaluate=(lambda params: score(params, held_out)) if held_out else None,
            patience=recipe.patience,
            check=lambda params, step: score(params, its_rows(step))["eval_loss"],
            rate=rate,
            write=files.write,
            after=None if after is None else lambda params, figures: after(figures, whole(params)),
            shown=TASK.shown,
        )
        state, stopped_by = loop.run(state, entries)
    done, best = len(figures), None if checkpoints.best is None else checkpoints.best[0]
    if not stopped_by and done < steps and loop.is_over(figures) and best is not None:
        state, done = checkpoints.read(best, state)[0], best
        print(f"stopped after step {len(figures)} of {steps}: step {best} had the least held-out loss, and is taken")
    elif figures:
        print(learned(TASK, entries, done))
    trained = whole(state[0])
    for line in unchanged.of_arrays(parts.params, state[0]) if figures and not stopped_by else ():
        print(line)
    code = stopped_by and 128 + stopped_by
    return Outcome(code, figures, done, best, model=lambda: trained, mesh=devices.mesh)


def _check(settings: Settings[FinetuneOptions], model: Any) -> None:
    """Refuses options that only the families of `liger_jax.models` have."""
    values, usual = settings.flat(), Settings.of(FinetuneOptions, model="m", data=settings.rows.data).flat()
    for name in _OF_OURS:
        if values[name] != usual[name]:
            flag, cure = f"--{name.replace('_', '-')}", _CURES.get(name, "leave it out. The model is trained as it is.")
            raise UserError(f"{flag} is for the models of liger_jax.models: {cure}")
    if settings.rows.pack and "segment_ids" not in _parameters(model):
        raise UserError(
            "--pack puts several documents into a row, and the model's hidden_states takes no segment_ids, by which "
            "none would attend to another. Add the parameter, or leave --pack out."
        )
    parameters = [*_parameters(model).values()]
    if needed := [each.name for each in parameters[1:] if each.default is each.empty and not _is_given(each)]:
        raise UserError(
            f"The model's hidden_states needs {' and '.join(needed)}, and is called with input_ids, segment_ids and "
            "positions alone. Give the others defaults."
        )
    head = _head(model)
    if getattr(head, "ndim", 0) != 2:
        what = f"has the shape {head.shape}" if hasattr(head, "shape") else f"is {type(head).__name__}"
        raise UserError(
            f"The model's head {what}, and must be an array of (vocabulary, width), such as an embedding, or the "
            "kernel of nnx.Linear transposed. A property may return it."
        )
    for length in _LENGTHS + (settings.rows.length,):
        if _check_read(model, length):
            _check_states(model, head, length)
            _check_causal(model, head.shape[0], length)
            break


def _check_trained(params: Any) -> None:
    """Refuses parameters that no optimizer trains or no checkpoint holds."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if leaf.dtype == jnp.float16 or not jnp.issubdtype(leaf.dtype, jnp.floating) or not leaf.size:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise UserError(
                f"The model's {name} is {leaf.dtype} of shape {leaf.shape}, and a trained parameter must be bfloat16 "
                "or wider, and not be empty. Cast it, or hold it in an nnx.Variable."
            )


def _check_read(model: Any, length: int = 8) -> bool:
    """Refuses adapters and biases that neither hidden states nor head read; returns whether the model takes the row."""
    graph, *own, rest = nnx.split(model, nnx.LoRAParam, nnx.Param, ...)
    ids = jnp.zeros((1, length), jnp.int32)
    given = {name: x for name, x in _alone(ids).items() if name in _parameters(model)}

    def call(own: Any, rest: Any) -> Any:
        merged = nnx.merge(graph, *own, rest)
        return merged.hidden_states(ids, **given), _head(merged)

    try:
        program = jax.make_jaxpr(call)(own, rest).jaxpr
    except Exception:  # the model's own, which its first step raises; or it takes no rows of this length
        return False
    _, read = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))  # also within functions that are jitted
    adapters, params = (
        [jax.tree_util.keystr(path[:-1], simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(each)]
        for each in own
    )
    is_read = dict(zip(adapters + params, read, strict=False))
    names = [*dict.fromkeys(name.rpartition(".")[0] for name in adapters if not is_read[name])]
    if names:
        raise UserError(
            f"Neither hidden_states nor head reads the adapters of {' and '.join(names)}, so that they would not be "
            "trained. Leave the layer out of add_lora's targets; or let head return its weight with the adapter."
        )
    for name in params:
        layer, _, kind = name.rpartition(".")
        if kind == "bias" and not is_read[name] and is_read.get(f"{layer}.kernel"):
            raise UserError(
                f"Neither hidden_states nor head reads {name}, so that the loss would be of logits without it. Make "
                "the layer without it, by use_bias=False; or let hidden_states end with a column of ones, and head "
                "with the bias as its last column."
            )
    return True


def _check_causal(model: Any, vocabulary: int, length: int = 8) -> None:
    """Refuses hidden states that depend on later tokens, on another row, or on another document of the row."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state = jax.tree.map(_filled, params), rest
    places, half = np.arange(length), length // 2
    ids = (vocabulary // 2 + np.arange(2 * length, dtype=np.int32).reshape(2, length)) % vocabulary  # none that pads
    other = (ids + 1) % vocabulary
    one = _alone(jnp.asarray(ids))
    two = dict(segment_ids=1 + one["positions"] // half, positions=one["positions"] % half)

    @jax.jit
    def call(state: Any, ids: Any, given: Any) -> Any:
        given = {name: x for name, x in given.items() if name in _parameters(model)}
        return nnx.merge(graph, *state).hidden_states(ids, **given)[0]

    def depends(given: Any, *changes: Any) -> bool:
        before = np.asarray(call(state, ids, given), np.float32)
        for changed in changes:
            others = np.where([changed, places >= 0], other, ids)  # all of the second row
            after = np.asarray(call(state, others, given), np.float32)
            kept, moved = before[~changed], np.abs(before - after)[~changed]
            if np.max(moved) > 1e-3 * np.max(np.abs(kept)):  # NaN is seen by the first step
                return True
        return False

    try:
        on_later = depends(one, *(places >= first for first in (1, half, length - 1)))
        on_others = "segment_ids" in _parameters(model) and depends(two, places < half)
    except Exception:  # as in `_check_states`
        return
    if on_later:
        raise UserError(
            "The model's hidden_states of a token depend on tokens after it, or on other rows, so that it would see "
            "what it is to predict. Mask its attention causally, and let no row depend on others."
        )
    if on_others:
        raise UserError(
            "The model's hidden_states of a token depend on another document of its row. Mask where segment_ids "
            "differ; or leave the parameter segment_ids out, and each document has its own row."
        )


def _filled(x: Any) -> Any:
    """The parameter; one of zeros, as at the end of a branch, has numbers, so that what the branch sees is seen."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.any(x != 0):
        return x
    return 0.1 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def _is_given(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of hidden states needs nothing, or what a run has."""
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in _GIVEN


def _check_states(model: Any, head: Any, length: int = 8) -> None:
    """Refuses hidden states that the head does not fit, and those that depend on what no step would keep."""
    ids = jnp.zeros((1, length), jnp.int32)
    given = {name: x for name, x in _alone(ids).items() if name in _parameters(model)}
    graph, *state = nnx.split(model, *(kinds := (nnx.Param, nnx.Intermediate, nnx.RngState, ...)))
    changed: list[Any] = []  # what a call leaves otherwise, by where it is

    def call(*before: Any, evaluates: bool = False) -> Any:
        old = jax.tree.leaves_with_path(before[2:])  # Flax may change what it is given
        own = nnx.merge(graph, *before)
        if evaluates:
            own.eval()
        hidden, (_, *after) = own.hidden_states(ids, **given), nnx.split(own, *kinds)
        now = dict(jax.tree.leaves_with_path(after[2:]))
        changed[:] = [path for path, x in old if now.get(path) is not x]
        return hidden, after

    try:
        hidden, _ = jax.eval_shape(call, *state)
    except Exception:  # as in `_check_read`
        return
    shape = getattr(hidden, "shape", None)
    if shape != (1, length, head.shape[1]):
        raise UserError(
            f"The model's hidden_states returns {shape or type(hidden).__name__} for input_ids of (1, {length}), and "
            f"its head is {head.shape}. They must be (batch, length, width), after the last norm and before the head, "
            "and (vocabulary, width)."
        )
    if not changed:
        return
    once, after = jax.jit(call)(*state)
    twice, _ = jax.jit(call)(*after)
    now = dict(jax.tree.leaves_with_path(after[3]))
    same = [np.array_equal(x, now[path], equal_nan=True) for path, x in jax.tree.leaves_with_path(state[3])]
    if np.array_equal(once, twice, equal_nan=True) and all(same):
        return
    jax.eval_shape(lambda *state: call(*state, evaluates=True), *state)
    names = dict.fromkeys(jax.tree_util.keystr(path[1:-1], simple=True, separator=".") for path in changed)
    what = "its own state, such as dropout's random numbers or the averages of nnx.BatchNorm. Call model.eval() before"
    if names:
        what = f"its {' and '.join(names)}, also after model.eval(). Change that outside of hidden_states"
    raise UserError(f"A run keeps no state from step to step, and the model's hidden_states changes {what}.")


def _alone(input_ids: jax.Array) -> dict[str, jax.Array]:
    """What a row of one document has beside its tokens."""
    places = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
    return dict(segment_ids=jnp.ones_like(input_ids), positions=jnp.broadcast_to(places, input_ids.shape))


_LENGTHS = (8, 128)  # of the rows that a model is checked on, the first one that it takes
_GIVEN = ("segment_ids", "positions")
_CURES = {
    "lora": "call models.lora.add_lora on your own, and its adapters alone are trained.",
    "push": "hand its save to the hub by huggingface_hub.",
    "result_of": "read the checkpoint by training.Checkpoints.",
}


def _head(model: Any) -> Any:
    """The head's array."""
    return model.head[...] if isinstance(model.head, nnx.Variable) else model.head


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's hidden states, by name."""
    return inspect.signature(model.hidden_states).parameters
