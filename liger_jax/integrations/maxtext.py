"""MaxText's loss without logits: a function for the place of its vocabulary tiling.

from maxtext.trainers.pre_train import train
train.vocab_tiling_nnx_loss = vocabulary_loss    # and num_vocab_tiling=2 in the config, so that it is called
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import fused_linear_cross_entropy


def vocabulary_loss(
    model: Any, hidden_states: jax.Array, data: Any, config: Any, is_train: bool
) -> tuple[jax.Array, jax.Array]:
    """The sum of cross entropies that MaxText's `vocab_tiling_nnx_loss` returns, with the same arguments.

    It applies the decoder's last norm, and reads the head, `logits_dense`.

    Args:
        model: MaxText's NNX `Transformer`.
        hidden_states: (B, T, D), before the decoder's last norm.
        data: `targets` (B, T), and `targets_segmentation` (B, T), which is 0 where nothing is scored.
        config: MaxText's config.
        is_train: whether dropout would be applied.

    Returns:
        The float32 sum of losses with their z-loss, and the sum of z-losses.

    Raises:
        ValueError: the config has dropout, or its head is the embedding.
    """
    if is_train and config.enable_dropout and config.dropout_rate > 0:
        raise ValueError("vocabulary_loss: config.dropout_rate must be 0. It has no dropout before the head.")
    if config.logits_via_embedding:
        raise ValueError("vocabulary_loss: config.logits_via_embedding must be false. It takes a separate head.")
    loss, metrics = fused_linear_cross_entropy(
        model.decoder.decoder_norm(hidden_states),
        model.decoder.logits_dense.kernel[...],
        data["targets"],
        where=data["targets_segmentation"] != 0,
        z_loss=config.z_loss_multiplier,
        reduction="sum",
        return_metrics=True,
        weight_layout="dv",
    )
    return loss, jnp.asarray(metrics.z_loss)
