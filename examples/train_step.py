"""One training step with optax, written both ways: `nnx.jit` on modules, and plain `jax.jit` on split state.

Both donate what they update, so that parameters and optimizer state are overwritten in place. Both give the same
numbers. The training examples use the second, `liger_jax.training.make_step`, whose state is one pytree to compile for,
to save and to shard.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.training import language_model_loss


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


def loss_and_accuracy(
    model: nnx.Module, tokens: jax.Array, normalizer: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`language_model_loss` and the share of tokens that the model predicts, which costs nothing more.

    Args:
        model: a causal language model.
        tokens: (B, T) token ids.
        normalizer: as there.

    Returns:
        Two float32 scalars, which add up over micro-batches.
    """
    out = model(tokens, labels=tokens, loss_normalizer=normalizer, return_metrics=True)
    share = 1.0 if normalizer is None else out.metrics.num_tokens / normalizer
    return out.loss, jnp.asarray(share * out.metrics.accuracy)
