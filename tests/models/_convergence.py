"""Short trainings of small models, to be compared step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from liger_jax.models import (
    Exaone4ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    GemmaForCausalLM,
    Glm4ForCausalLM,
    GraniteForCausalLM,
    HunYuanDenseV1ForCausalLM,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)
from liger_jax.ops import YarnRope

# Large first weights and plain descent: every op's gradient moves the next loss. Adam would hide a wrong scale.
SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.15,
)
GEMMA = dict(head_dim=12, sliding_window=5, query_pre_attn_scalar=9)
FAMILIES = {
    "llama": (LlamaForCausalLM, SIZES),
    "qwen2": (Qwen2ForCausalLM, SIZES),
    "qwen3": (Qwen3ForCausalLM, SIZES | dict(head_dim=16)),
    "mistral": (MistralForCausalLM, SIZES | dict(sliding_window=5)),
    "olmo2": (Olmo2ForCausalLM, SIZES),
    "olmo3": (Olmo3ForCausalLM, SIZES | dict(num_hidden_layers=4, sliding_window=5)),
    "exaone4": (Exaone4ForCausalLM, SIZES | dict(num_hidden_layers=4, sliding_window=5)),
    "hunyuan": (HunYuanDenseV1ForCausalLM, SIZES),
    "glm4": (Glm4ForCausalLM, SIZES | dict(head_dim=16)),
    "ministral3": (Ministral3ForCausalLM, SIZES | dict(head_dim=16, rope_scaling=YarnRope(4.0, 8))),
    "granite": (GraniteForCausalLM, SIZES | dict(residual_multiplier=0.5, attention_multiplier=0.3)),
    "smollm3": (SmolLM3ForCausalLM, SIZES | dict(no_rope_layer_interval=2)),
    "phi3": (Phi3ForCausalLM, SIZES | dict(partial_rotary_factor=0.75, sliding_window=5)),
    "gemma": (GemmaForCausalLM, SIZES | dict(head_dim=12)),
    "gemma2": (Gemma2ForCausalLM, SIZES | GEMMA | dict(num_hidden_layers=3)),
    "gemma4": (
        Gemma4ForCausalLM,
        SIZES
        | dict(num_hidden_layers=3, num_kv_shared_layers=1, layer_types=("full_attention",) * 3, head_dim=8)
        | dict(global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97),
    ),
    "gemma3": (Gemma3ForCausalLM, SIZES | GEMMA | dict(sliding_window_pattern=2)),
}


def training_losses(kernels, dtype, steps, *, family="llama", seeds=(0,), change_gradients=lambda gradients: gradients):
    """(seeds, steps): the loss before each step on one batch; a seed always gives the same model and tokens."""
    model_type, fields = FAMILIES[family]
    config = model_type.config_type(**fields)
    make_model = lambda key: model_type(config, kernels=kernels, dtype=dtype, rngs=nnx.Rngs(key))
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(0)))
    init = jax.jit(lambda key: nnx.state(make_model(key)))
    optimizer = optax.sgd(0.02, momentum=0.9)

    # As written: inside its fusions XLA would otherwise leave out roundings to bfloat16, which no kernel can.
    @functools.partial(jax.jit, donate_argnums=0, compiler_options={"xla_allow_excess_precision": False})
    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(graph, params)(tokens, labels=tokens).loss)(params)
        updates, opt_state = optimizer.update(change_gradients(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    losses = np.empty((len(seeds), steps))
    with jax.default_matmul_precision("highest"):
        for row, seed in zip(losses, seeds, strict=True):
            tokens = jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (2, 16)), jnp.int32)
            params = init(jax.random.key(seed))
            state = (params, optimizer.init(params))
            for i in range(steps):
                state, row[i] = step(state, tokens)
    return losses


def largest_deviation(losses, expected):
    """The largest relative deviation at any step."""
    return np.max(np.abs(losses - expected) / np.abs(expected))


def typical_deviation(losses, expected):
    """The geometric mean over seeds of the root mean square over steps.

    One seed says little: a training amplifies its first roundings, so that of two equally exact runs one may
    deviate several times as much as the other. Of 27 seeds' mean another 27 have 1.5 times as much once in 1,300
    trials; of 9 seeds' median, once in 13.
    """
    return np.exp(np.mean(np.log(np.sqrt(np.mean((losses - expected) ** 2, axis=1)))))
