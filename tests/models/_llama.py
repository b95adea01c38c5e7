"""A model small enough for every test, and its inputs."""

import jax.numpy as jnp
from flax import nnx

from liger_jax.models import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,  # logits far from uniform
)


def make_model(config=CONFIG, *, seed=0, **options):
    return LlamaForCausalLM(config, rngs=nnx.Rngs(seed), **options)


def random_tokens(rng, batch=2, length=12, vocab_size=CONFIG.vocab_size):
    return jnp.asarray(rng.integers(0, vocab_size, (batch, length)), jnp.int32)


@nnx.jit
def loss_and_gradients(model, tokens, arguments):
    """The loss for labels = tokens, or for the labels among the call's array `arguments`, and its gradients."""
    return nnx.value_and_grad(lambda model: model(tokens, **{"labels": tokens, **arguments}).loss)(model)
