"""A LLaMA that a CPU trains in seconds, for the programs that show one method each."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from tqdm import tqdm

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import language_model_loss, make_step


def llama(vocab_size: int, hidden_size: int = 64, num_hidden_layers: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """A random model.

    Args:
        vocab_size: entries of the vocabulary.
        hidden_size: a multiple of 32.
        num_hidden_layers: number of layers.
        seed: seed of the parameters.

    Returns:
        Its graph and its parameters.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 16,
        max_position_embeddings=128,
    )
    return nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(seed)))


def pretrain(graph: Any, params: Any, batch: Callable[[int], jax.Array], steps: int, description: str) -> Any:
    """Teaches a model sequences, with a progress bar.

    Args:
        graph: the model's structure.
        params: its parameters, which are left as they are.
        batch: gives the token ids (B, T) of a step, from 0.
        steps: training steps.
        description: the text before the bar.

    Returns:
        The parameters after training.
    """
    optimizer = optax.adam(3e-3)
    step, state = jax.jit(make_step(graph, optimizer, language_model_loss)), (params, optimizer.init(params))
    with tqdm(range(steps), desc=description, unit="step", dynamic_ncols=True) as bar:
        for number in bar:
            state, loss = step(state, batch(number))
            bar.set_postfix_str(f"loss {float(loss):.3f}", refresh=False)
    return state[0]
