"""Short trainings of a small LLaMA, to be compared step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from liger_jax.models import LlamaConfig, LlamaForCausalLM

# Large first weights and plain descent: every op's gradient moves the next loss. Adam would hide a wrong scale.
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.15,
)


def training_losses(kernels, dtype, steps, *, change_gradients=lambda gradients: gradients):
    """The losses of `steps` steps on one batch, each before its update; always the same model and tokens."""
    graph, params = nnx.split(LlamaForCausalLM(CONFIG, kernels=kernels, dtype=dtype, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)), jnp.int32)
    optimizer = optax.sgd(0.02, momentum=0.9)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(graph, params)(tokens, labels=tokens).loss)(params)
        updates, opt_state = optimizer.update(change_gradients(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state, losses = (params, optimizer.init(params)), []
    with jax.default_matmul_precision("highest"):
        for _ in range(steps):
            state, loss = step(state)
            losses.append(float(loss))
    return np.array(losses)


def largest_deviation(losses, expected):
    """The largest relative deviation at any step."""
    return np.max(np.abs(losses - expected) / np.abs(expected))


def rms_deviation(losses, expected):
    """The root mean square of the deviations, over steps."""
    return np.sqrt(np.mean((losses - expected) ** 2))
