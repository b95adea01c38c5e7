"""MaxText's losses without logits: a function for the place of its vocabulary tiling, and what its DPO needs.

    from maxtext.trainers.pre_train import train
    train.vocab_tiling_nnx_loss = vocabulary_loss    # and num_vocab_tiling=2 in the config, so that it is called

MaxText's DPO and GRPO are tunix's trainers on a `TunixMaxTextAdapter`, which `liger_jax.integrations.tunix` takes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import fused_linear_cross_entropy


def vocabulary_loss(
    model: Any, hidden_states: jax.Array, data: Any, config: Any, is_train: bool
) -> tuple[jax.Array, jax.Array]:
    """The sum of cross entropies that MaxText's `vocab_tiling_nnx_loss` returns, with the same arguments.

    It applies the decoder's last norm, and reads the head.

    Args:
        model: MaxText's NNX `Transformer`.
        hidden_states: (B, T, D), before the decoder's last norm.
        data: `targets` (B, T), and `targets_segmentation` (B, T), which is 0 where nothing is scored.
        config: MaxText's config.
        is_train: whether dropout would be applied.

    Returns:
        The float32 sum of losses with their z-loss, and the sum of z-losses.

    Raises:
        ValueError: the config has dropout.
    """
    if is_train and config.enable_dropout and config.dropout_rate > 0:
        raise ValueError("vocabulary_loss: config.dropout_rate must be 0. It has no dropout before the head.")
    loss, metrics = fused_linear_cross_entropy(
        model.decoder.decoder_norm(hidden_states),
        labels=data["targets"],
        where=data["targets_segmentation"] != 0,
        z_loss=config.z_loss_multiplier,
        reduction="sum",
        return_metrics=True,
        **_head(model),
    )
    return loss, jnp.asarray(metrics.z_loss)


def hidden_and_head(
    adapter: Any,
    input_tokens: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """What goes into the head of MaxText's model, and the head: `hidden_and_head` of the tunix integration calls it.

    The adapter's own call drops the hidden states, so the decoder is called here. Under `jit` the logits that it makes
    are never read, and the compiler leaves them out.
    """
    model, config = adapter.base, adapter.base.config
    _check(config)
    if segment_ids is None and attention_mask is not None:
        segment_ids = attention_mask[:, -1, :].astype(jnp.int32)
    _, hidden, *_ = model.decoder(
        shared_embedding=model.token_embedder,
        decoder_input_tokens=input_tokens,
        decoder_positions=positions,
        decoder_segment_ids=segment_ids,
        deterministic=True,
        model_mode="train",
    )
    return model.decoder.decoder_norm(hidden), _head(model)


def _head(model: Any) -> dict[str, Any]:
    """The head of MaxText's `Transformer`, as the linear losses take it."""
    config, is_tied = model.config, model.config.logits_via_embedding
    owner, name = (model.token_embedder, "embedding") if is_tied else (model.decoder.logits_dense, "kernel")
    weight = getattr(owner, name)[...]
    if hasattr(owner, f"{name}_lora_a") or not isinstance(weight, jax.Array):
        raise ValueError(
            "the head of MaxText's model has LoRA or is quantised; it must be a plain array. Leave the head out of the "
            "adapters' module path."
        )
    if not is_tied:
        return dict(weight=weight, weight_layout="dv")
    # MaxText rounds the table, whatever its dtype. cap(h·e/√D) = cap′(h·e)/√D, where cap′ is √D times as large.
    weight = weight.astype(jnp.bfloat16)
    root = weight.shape[-1] ** 0.5 if config.normalize_embedding_logits else 1.0
    softcap = root * config.final_logits_soft_cap if config.final_logits_soft_cap else None
    return dict(weight=weight, weight_layout="vd", logit_softcap=softcap, logit_scale=1 / root)


def _check(config: Any) -> None:
    """Refuses models whose logits are more than a product with the normed hidden states."""
    rules = {
        "dropout_rate": (config.enable_dropout and config.dropout_rate > 0, "0"),
        "mtp_num_layers": (config.mtp_num_layers > 0, "0"),
        "mhc_expansion_rate": (config.mhc_expansion_rate > 1, "1"),
    }
    for name, (is_refused, rule) in rules.items():
        if is_refused:
            value = getattr(config, name)
            raise ValueError(f"config.{name}={value} must be {rule}, for log-probabilities without logits.")
