"""Training steps of whole models with each kernel on alone, all on and all off: what a kernel costs where XLA fuses.

    python -m benchmarks.model_step [--models qwen2-0.5b] [--batch 8] [--seq 2048] [--implementation triton]

A step is loss, gradients and AdamW on random tokens, all in bfloat16, layers scanned, its state updated in place. AdamW
is optax's as it is, with moments in bfloat16 and sums rounded to nearest: 6 bytes a parameter less than training with
`stochastic_rounding` takes, as the steps of PyTorch that ours are compared with. Times are medians over rounds in which
every program has its turn. Memory is what the compiled step needs. A second table counts what one layer keeps for its
backward.
"""

import argparse
import collections

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks._measure import heading, in_rounds, save, table
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
KERNELS = ("rope", "rms_norm", "glu", "fused_linear_cross_entropy")


def options(names: tuple[str, ...], implementation: str | None) -> KernelOptions:
    """Only these kernels on; the fused loss keeps the platform's choice."""
    only_loss = "fused_linear_cross_entropy" in names and len(names) == 1
    return KernelOptions(
        **{name: name in names for name in KERNELS}, implementation=None if only_loss else implementation
    )


def family_of(config: LlamaConfig) -> type[CausalLM]:
    return next(family for family in FAMILIES if family.config_type is type(config))


def make_model(config: LlamaConfig, kernels: KernelOptions, **others) -> CausalLM:
    """A random model in bfloat16."""
    return family_of(config)(
        config, kernels=kernels, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **others
    )


def training_step(config: LlamaConfig, kernels: KernelOptions, tokens: jax.Array, compiler_options=None, **others):
    """A run of one step, and the bytes that the compiled step needs; other arguments are the model's."""
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    graphdef, params = nnx.split(jax.eval_shape(lambda: make_model(config, kernels, **others)))

    @jax.jit
    def start():
        params = nnx.split(make_model(config, kernels, **others))[1]
        return params, optimizer.init(params)

    step = jax.jit(make_step(graphdef, optimizer), donate_argnums=0, compiler_options=compiler_options)
    # Compiled before the state is there, so that the compiler's trials of kernels take no memory beside it.
    compiled = step.lower((params, jax.eval_shape(optimizer.init, params)), tokens).compile()
    memory = compiled.memory_analysis()
    state = start()

    def run():
        nonlocal state
        state, loss = compiled(state, tokens)
        return loss

    return run, memory.argument_size_in_bytes + memory.temp_size_in_bytes


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=["llama-3.2-1b", "qwen2-0.5b"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--implementation", help="of rope, rms_norm and glu; the platform's default if none")
    arguments = parser.parse_args()
    choices = {"all off": (), **{f"{name} alone": (name,) for name in KERNELS}, "all on": KERNELS}
    steps, kept = [], []
    for name in arguments.models:
        config = SIZES[name]
        tokens = jax.random.randint(jax.random.key(1), (arguments.batch, arguments.seq), 0, config.vocab_size)
        kernels = {who: options(names, arguments.implementation) for who, names in choices.items()}
        programs = {who: training_step(config, k, tokens) for who, k in kernels.items()}
        times = in_rounds({who: run for who, (run, _) in programs.items()})
        for who, (_, needed) in programs.items():
            speed = tokens.size / times[who] * 1e3
            versus = times["all off"] / times[who]
            steps.append([name, who, f"{times[who]:.1f}", f"{speed:,.0f}", f"{versus:.3f}", f"{needed / 2**30:.2f}"])
        for who, k in kernels.items():
            shapes, size = kept_by_a_layer(config, k, arguments.batch, arguments.seq)
            listed = ", ".join(f"{count} × {shape}" for shape, count in sorted(shapes.items()))
            kept.append([name, who, f"{size / 2**20:.0f}", listed])
    command = f"python -m benchmarks.model_step --batch {arguments.batch} --seq {arguments.seq}"
    command += f" --models {' '.join(arguments.models)}"
    command += f" --implementation {arguments.implementation}" if arguments.implementation else ""
    text = heading(command) + "\n"
    text += table(["model", "kernels", "ms a step", "tokens/s", "× all off", "GiB"], steps) + "\n"
    text += table(["model", "kernels", "MiB kept by a layer", "what"], kept)
    save("model_step" + (f"_{arguments.implementation}" if arguments.implementation else ""), text)


if __name__ == "__main__":
    main()
