"""A training step: loss, gradients and update, for one batch or for its micro-batches one after the other."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.interpreters import partial_eval

from liger_jax.losses import shifted_labels
from liger_jax.ops.labels import IGNORE_INDEX, as_labels
from liger_jax.training.rounding import promotions

Batch = jax.Array | Mapping[str, jax.Array]
_POSITIONS = (jax.tree_util.DictKey("positions"),)


def model_arguments(batch: Batch) -> Mapping[str, jax.Array]:
    """The arguments of a model's call; token ids alone are also used as labels.

    Args:
        batch: (B, T) token ids; or the model's arguments, including `input_ids` and `labels`.

    Returns:
        The arguments by name.

    Example:
        >>> sorted(model_arguments(jnp.ones((2, 8), jnp.int32)))
        ['input_ids', 'labels']
    """
    return batch if isinstance(batch, Mapping) else dict(input_ids=batch, labels=batch)


def language_model_loss(model: nnx.Module, batch: Batch, normalizer: jax.Array | None = None) -> jax.Array:
    """The mean loss of predicting each token from those before it, without logits in memory.

    Args:
        model: a causal language model.
        batch: as for `model_arguments`.
        normalizer: the mean's denominator; `None` for that of the batch.

    Returns:
        A float32 scalar.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> language_model_loss(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), jnp.ones((2, 8), jnp.int32)).dtype
        dtype('float32')
    """
    arguments = {**model_arguments(batch), "loss_normalizer": normalizer}
    _check_call(model, arguments)
    return model(**arguments).loss


def _check_call(model: nnx.Module, arguments: Mapping[str, Any]) -> None:
    """Refuses a model that does not take what the default loss calls it with."""
    try:
        inspect.signature(model).bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"make_step: without loss_fn, the model is called with {', '.join(arguments)}, as those of liger_jax.models"
            f" take them, and {type(model).__name__} does not: {error}. Pass loss_fn, such as lambda model, batch, "
            "normalizer: causal_lm_loss(model.hidden_states(batch), model.head, batch)."
        ) from error


def scored_tokens(batch: Batch) -> jax.Array:
    """The denominator of a batch's mean loss: the sum of the weights of all scored positions.

    Args:
        batch: as for `model_arguments`.

    Returns:
        A float32 scalar; 1 if nothing is scored, so that the loss is 0.

    Example:
        >>> scored_tokens(jnp.ones((2, 8), jnp.int32)).item()  # the last token of a sequence predicts nothing
        14.0
    """
    named = model_arguments(batch)
    targets, weights = named.get("shift_labels"), named.get("loss_weights")
    if targets is None:
        if "labels" not in named:
            raise ValueError(
                f"scored_tokens: the batch has {', '.join(named)}, and no labels to count; for another loss pass "
                "make_step(normalizer=) a function of the batch that returns its denominator."
            )
        targets = shifted_labels(named["labels"], named.get("segment_ids"))
    targets = as_labels(targets)
    if named.get("segment_ids") is not None:
        targets = jnp.where(named["segment_ids"] != 0, targets, IGNORE_INDEX)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    scored = targets != IGNORE_INDEX
    return jnp.where(jnp.any(scored & (weights != 0)), jnp.sum(weights, where=scored), 1.0)


def make_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable = language_model_loss,
    *,
    normalizer: Callable[[Batch], Any] = scored_tokens,
    has_aux: bool = False,
    grad_norm: bool = False,
    micro_batches: int = 1,
    state_on_host: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """The training step of a model, split by `graph, params = nnx.split(model)`, for `jax.jit(…, donate_argnums=0)`.

    With micro-batches, only the activations of one micro-batch are in memory at a time. Gradients are summed in
    float32. The sum is the gradient of the whole batch, because each micro-batch's loss is divided by the denominator
    of the whole batch. So the loss must be a sum over tokens or sequences, divided by what `normalizer` computes from
    the whole batch. DPO's "aot" and "aot_unpaired", which sort a batch's pairs, and KTO with a baseline computed from
    the batch are not of this form: give a loss function with such a loss the attribute `needs_whole_batch = True`, with
    which micro-batches are refused.

    Args:
        graph: the model's structure.
        optimizer: any optax transformation; for parameters in bfloat16 with `stochastic_rounding` around it.
        loss_fn: called with the model, the batch and the result of `normalizer`, which is `None` if there are no
            micro-batches and the normalizer is the default. The results of `loss_fn` are summed over micro-batches.
        normalizer: computes the denominator, an array or a tree of arrays, from the whole batch. The default is the
            number of scored tokens. `policy_weights` computes that of a policy loss, and `lambda batch:
            len(batch["chosen"])` counts the pairs of a preference loss.
        has_aux: `loss_fn` returns a pair (loss, others), and the step returns (state, (loss, others)).
        grad_norm: the step returns (state, (loss, others)) where `others["grad_norm"]` is the float32 global norm of
            the gradients before the optimizer, which may clip them. With `has_aux`, `others` must be a dict, to which
            it is added. An optimizer that clips computes the same number, so that it costs nothing there.
        micro_batches: the number of micro-batches in a batch. Sequence i belongs to micro-batch i mod `micro_batches`,
            so that each device of a mesh has sequences of every micro-batch. Scalars, and `positions` of shape (1, T),
            are passed to every micro-batch.
        state_on_host: whether the optimizer's arrays are stored in the host's memory, and copied to the device for the
            update.

    Returns:
        `step(state, batch, *frozen) -> (state, loss)` with `state = (params, optimizer.init(params))`. `frozen` are
        other variables of the model, which are not differentiated and not updated:
        `graph, params, frozen = nnx.split(model, trained, ...)`.

    Raises:
        ValueError: `micro_batches` is less than 1, or more than 1 and `loss_fn` needs the whole batch; and, from the
            step, the batch is not divisible by it, arrays differ in their number of sequences, or `loss_fn` does not
            read the denominator. For a loss without one `normalizer` returns `None`.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> graph, params = nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
        >>> optimizer = optax.sgd(0.1)
        >>> step = jax.jit(make_step(graph, optimizer, micro_batches=2), donate_argnums=0)
        >>> state, loss = step((params, optimizer.init(params)), jnp.ones((4, 8), jnp.int32))
        >>> loss.shape
        ()
    """
    if micro_batches < 1:
        raise ValueError(f"make_step: micro_batches={micro_batches} must be at least 1; 1 does not divide the batch.")
    if micro_batches > 1 and getattr(loss_fn, "needs_whole_batch", False):
        raise ValueError(
            f"make_step: micro_batches={micro_batches}, but loss_fn.needs_whole_batch is set: its value is not a sum "
            "over sequences. Pass micro_batches=1, or a loss that is one, such as that of KTO with a given baseline."
        )

    def step(state, batch, *frozen):
        params, opt_state = state

        def value_and_grad(params, batch, normalizer):
            loss = lambda params: loss_fn(nnx.merge(graph, params, *frozen), batch, normalizer)
            return jax.value_and_grad(loss, has_aux=has_aux)(params)

        if micro_batches == 1:
            # The default's denominator is that of the loss, which need not be computed twice.
            denominator = None if normalizer is scored_tokens else normalizer(batch)
            value, grads = value_and_grad(params, batch, denominator)
        else:
            value, grads = _accumulated(value_and_grad, params, batch, normalizer, micro_batches)
        if grad_norm:
            loss, others = value if has_aux else (value, {})
            value = loss, {**others, "grad_norm": _norm(grads)}
        if state_on_host:
            opt_state = _moved(opt_state, jax.memory.Space.Device)
        with promotions():
            updates, opt_state = _updates(optimizer, grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        if state_on_host:
            opt_state = _moved(opt_state, jax.memory.Space.Host)
        return (params, opt_state), value

    return step


def _norm(grads):
    """The global norm, in the operations of optax's clipping and of stochastic rounding, which XLA then merges."""
    with promotions():
        return optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))


def _updates(optimizer, grads, opt_state, params):
    """The optimizer's updates. If Explicit axes are ambiguous, as in Muon's products, they are Auto for this call."""
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    try:
        return optimizer.update(grads, opt_state, params)
    except Exception as error:  # JAX has no public name for it
        if not axes or type(error).__name__ != "ShardingTypeError":
            raise
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, opt_state))
    update: Any = jax.sharding.auto_axes(optimizer.update, axes=axes, out_sharding=specs)
    return update(grads, opt_state, params)


def _accumulated(value_and_grad, params, batch, normalizer, micro_batches):
    """The sum of what `value_and_grad` returns for each micro-batch, gradients in their parameters' dtypes."""
    batches, denominator = _micro_batched(batch, micro_batches), normalizer(batch)
    # Its trace is kept, so that the model is traced once for the types of the sums and for the loop.
    value_and_grad = jax.jit(value_and_grad, inline=True)

    def add(sums, micro_batch):
        results = value_and_grad(params, micro_batch, denominator)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, results), None

    first = params, jax.tree.map(lambda x: x[0], batches), denominator
    program, (value, _) = jax.make_jaxpr(value_and_grad, return_shape=True)(*first)
    num_aux = len(jax.tree.leaves(value)) - 1
    _check_denominator(program.jaxpr, len(jax.tree.leaves(denominator)), num_aux, micro_batches)
    with promotions():
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), (value, params))
    (value, grads), _ = jax.lax.scan(add, zeros, batches)
    return value, jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)


def _check_denominator(program: Any, num_numbers: int, num_aux: int, micro_batches: int) -> None:
    """Refuses a loss that does not read the denominator, the last arguments of its program; its metrics may."""
    if not num_numbers:
        return
    of_loss = [not 1 <= i <= num_aux for i in range(len(program.outvars))]
    _, read = partial_eval.dce_jaxpr(program, of_loss)  # also within functions that are jitted
    if not any(read[-num_numbers:]):
        raise ValueError(
            f"make_step: micro_batches={micro_batches} adds up the results of loss_fn, which does not read its third "
            "argument, the whole batch's denominator: of means the sum is too large. Divide a micro-batch's sum by it, "
            "as normalizer= makes it; or, for a loss that is a sum alone, pass normalizer=lambda batch: None."
        )


def _micro_batched(batch: Batch, micro_batches: int) -> Any:
    """The batch with a leading axis of micro-batches: sequence i is in micro-batch i mod `micro_batches`."""
    num_sequences = _num_sequences(batch)
    if num_sequences % micro_batches:
        raise ValueError(
            f"micro_batches={micro_batches} does not divide a batch of {num_sequences} sequences. Choose another "
            "batch, or another number."
        )

    def cut(path, x):
        if not jnp.ndim(x) or path == _POSITIONS and x.shape[0] == 1:  # the same for all sequences
            return jnp.broadcast_to(x, (micro_batches, *jnp.shape(x)))
        if x.shape[0] != num_sequences:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"make_step: {name} has shape {x.shape}, but must begin with {num_sequences}, the number of sequences "
                "in the batch. Only scalars, and positions of one row, are shared by all sequences."
            )
        return x.reshape(num_sequences // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree_util.tree_map_with_path(cut, batch)


def _num_sequences(batch: Batch) -> int:
    """The number of sequences: that of `input_ids`, or of the first array that is not a scalar in a batch of pairs."""
    named = model_arguments(batch)
    arrays = [named["input_ids"]] if "input_ids" in named else jax.tree.leaves(batch)
    shapes = [jnp.shape(x) for x in arrays if jnp.ndim(x)]
    if not shapes:
        raise ValueError("make_step: the batch has only scalars, which micro_batches cannot divide. Pass sequences.")
    return shapes[0][0]


def _moved(state: Any, space: Any) -> Any:
    """Moves a state's arrays to a memory; scalars stay where they are."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)
