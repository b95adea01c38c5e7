"""One training step with optax, written both ways: `nnx.jit` on modules, and plain `jax.jit` on split state.

Both donate what they update, so that parameters and optimizer state are overwritten in place. Both give the same
numbers. The training example uses the second, whose state is one pytree to compile for, to save and to shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx


def language_model_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """The mean loss of predicting each token from those before it; no logits are held.

    Args:
        model: a causal language model.
        tokens: (B, T) token ids.

    Returns:
        A float32 scalar.
    """
    return model(tokens, labels=tokens).loss


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def nnx_train_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Updates model and optimizer in place.

    Args:
        model: a causal language model.
        optimizer: `nnx.Optimizer(model, optax.adamw(…), wrt=nnx.Param)`.
        tokens: (B, T) token ids.

    Returns:
        The loss before the update.
    """
    loss, grads = nnx.value_and_grad(language_model_loss)(model, tokens)
    optimizer.update(model, grads)
    return loss


def loss_and_accuracy(model: nnx.Module, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`language_model_loss` and the share of tokens that the model predicts, which costs nothing more.

    Args:
        model: a causal language model.
        tokens: (B, T) token ids.

    Returns:
        Two float32 scalars.
    """
    out = model(tokens, labels=tokens, return_metrics=True)
    return out.loss, out.metrics.accuracy


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable = language_model_loss,
    *,
    has_aux: bool = False,
) -> Callable[[Any, jax.Array], tuple[Any, Any]]:
    """Makes the step for a model that is split into `graph, params = nnx.split(model)`.

    Args:
        graph: the model's structure.
        optimizer: any optax transformation.
        loss_fn: a loss of model and tokens.
        has_aux: it returns a pair, and so does the step: the loss and something else.

    Returns:
        A jitted `step(state, tokens) -> (state, loss)` with `state = (params, optimizer.init(params))`, donated.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, tokens):
        params, opt_state = state
        of_params = lambda params: loss_fn(nnx.merge(graph, params), tokens)
        loss, grads = jax.value_and_grad(of_params, has_aux=has_aux)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step
