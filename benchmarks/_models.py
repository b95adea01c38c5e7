"""The models that whole steps are measured on, and their compiled steps."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from liger_jax.models import (
    CausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    KernelOptions,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from liger_jax.ops import Llama3Rope
from liger_jax.training import make_step

SIZES = {
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=True,
        rope_scaling=Llama3Rope(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "qwen2-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, rope_theta=1000000.0, tie_word_embeddings=True,
    ),
    "gemma-2-2b": Gemma2Config(),
    "olmoe-1b-7b": OlmoeConfig(intermediate_size=1024),
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ),
}  # fmt: skip
FAMILIES: tuple[type[CausalLM], ...] = (LlamaForCausalLM, Qwen2ForCausalLM, Gemma2ForCausalLM, OlmoeForCausalLM)
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01


def family_of(config: LlamaConfig) -> type[CausalLM]:
    return next(family for family in FAMILIES if family.config_type is type(config))


def make_model(config: LlamaConfig, kernels: KernelOptions, **others) -> CausalLM:
    """A random model in bfloat16."""
    return family_of(config)(
        config, kernels=kernels, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **others
    )


def compiled_step(
    make: Callable[[], CausalLM],
    optimizer: optax.GradientTransformation,
    batch: Any,
    loss: Callable[..., jax.Array] | None = None,
    compiler_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Callable[[], Any], Any]:
    """The function that makes the state, and the compiled step on (state, batch); other options are `make_step`'s.

    The step is compiled before the state is there, so that the compiler's trials of kernels take no memory beside it.
    """
    graphdef, params = nnx.split(jax.eval_shape(make))
    state = params, jax.eval_shape(optimizer.init, params)
    step = make_step(graphdef, optimizer, *([] if loss is None else [loss]), **options)

    @jax.jit
    def start():
        params = nnx.split(make())[1]
        return params, optimizer.init(params)

    return start, jax.jit(step, donate_argnums=0, compiler_options=compiler_options).lower(state, batch).compile()


def runs(start: Callable[[], Any], step: Any, batch: Any) -> Callable[[], Any]:
    """One step after another, on a state of its own; each returns its loss."""
    state, batch = start(), jax.device_put(batch)

    def run():
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return run


def needed_bytes(step: Any) -> int:
    """What a compiled step needs, by the compiler."""
    memory = step.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def kept_by_a_layer(config: LlamaConfig, kernels: KernelOptions, batch: int, seq: int):
    """The activations that a layer keeps for its backward: a count for each dtype and shape, and their bytes."""
    layers = config.num_hidden_layers
    model = jax.eval_shape(lambda: make_model(config, kernels))
    graphdef, params = nnx.split(model.model)
    x = jax.ShapeDtypeStruct((batch, seq, config.hidden_size), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1, seq, config.head_dim), jnp.float32)

    def pullback(x, params, cos, sin):
        inputs = {kind: (cos, sin, None, config.window_of(kind)) for kind in config.layer_types or ()}
        return jax.vjp(lambda x, params: nnx.merge(graphdef, params).run_layers(x, inputs).hidden, x, params)[1]

    # jax.vjp returns a tree with the residuals as leaves; the scan stacks the residuals of its layers.
    backward = jax.tree.leaves(jax.eval_shape(pullback, x, params, table, table))
    activations = [r for r in backward if r.ndim > 2 and r.shape[1] == batch]
    counts = collections.Counter()
    for r in activations:
        counts[f"{r.dtype} {r.shape[1:]}"] += r.shape[0]
    sizes = [r.size * r.dtype.itemsize for r in activations]
    return {shape: count // layers for shape, count in counts.items()}, sum(sizes) / layers
