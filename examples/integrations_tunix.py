"""Tunix's trainer with this library's loss on one of tunix's models, and with one of this library's models.

    python -m examples.integrations_tunix

It needs `pip install google-tunix`. The loss is tunix's own to 1e-5, and makes no logits. `TunixModel` gives a model of
this library the call that tunix's trainers make.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.integrations.tunix import TunixModel, sft_loss
from liger_jax.models import LlamaConfig, LlamaForCausalLM

VOCAB, STEPS = 256, 12


def tunix_model():
    """A small Qwen2 of tunix's."""
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]

    config = qwen2.ModelConfig(
        num_layers=1, vocab_size=VOCAB, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    return qwen2.Qwen2(config, rngs=nnx.Rngs(0))


def our_model():
    """A small LLaMA of this library's, called as tunix calls its own."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    return TunixModel(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))


def train(model, loss_fn=None):
    """Trains by tunix's `PeftTrainer` on tokens that count upwards.

    Args:
        model: one of tunix's models, or a `TunixModel`.
        loss_fn: None for tunix's own.

    Returns:
        The trainer's loss after each step.
    """
    from tunix.sft import peft_trainer, utils  # pyright: ignore[reportMissingImports]

    def batch(key):
        tokens = (jax.random.randint(key, (4, 1), 0, VOCAB) + jnp.arange(16)) % VOCAB
        mask = jnp.ones(tokens.shape, bool)
        positions = utils.build_positions_from_mask(mask)
        inputs = dict(input_tokens=tokens, input_mask=mask, positions=positions)
        return inputs | dict(attention_mask=utils.make_causal_attn_mask(mask))

    trainer = peft_trainer.PeftTrainer(model, optax.adam(3e-3), peft_trainer.TrainingConfig(eval_every_n_steps=100))
    if loss_fn is not None:
        trainer.with_loss_fn(loss_fn)
    trainer.train([batch(key) for key in jax.random.split(jax.random.key(0), STEPS)])
    return trainer.metrics_logger.get_metric_history("", "loss", "train").tolist()


def main():
    """Trains tunix's model with both losses, and this library's model with this library's loss.

    Returns:
        The losses, by a name for each run.
    """
    found = {
        "tunix's model and loss": train(tunix_model()),
        "tunix's model, our loss": train(tunix_model(), sft_loss),
        "our model and loss": train(our_model(), sft_loss),
    }
    for name, losses in found.items():
        print(f"{name}: {losses[0]:.4f} → {losses[-1]:.4f}")
    return found


if __name__ == "__main__":
    main()
