"""What corrects for a sampler whose log-probabilities are not those of the policy that trains."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import log_ratio
from liger_jax.losses._sequences import sequences_of
from liger_jax.ops.checks import ArrayLike, check_choice, check_shape

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_sampling_ratio(
    old_log_probs: Float[Array, "B T"],
    sampling_log_probs: Float[Array, "B T"],
    *,
    mask: Bool[Array, "B T"],
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "B _"]:
    """The truncated or masked `importance_ratio` of policy to sampler for `policy_loss`; names and defaults are TRL's.

    The ratio is exp(old_log_probs − sampling_log_probs) of a token, or of a sequence's sum over its counted tokens:

    | mode | ratio of | outside of [clip_min, clip_max] it is |
    |---|---|---|
    | "token_truncate" | a token | the nearer bound |
    | "token_mask" | a token | 0 |
    | "sequence_truncate" | a sequence | the nearer bound |
    | "sequence_mask" | a sequence | 0 |

    Tokens without a sampler's score have the ratio 1: those whose log-probability is NaN or infinite, or more than 80
    below the policy's. Exponents of sums are clipped at 80. `segment_ids` and `num_segments` are those of
    `sequence_log_probs`.

    Args:
        old_log_probs: log-probabilities of the sampled tokens under the policy before this step's updates, any float
            dtype.
        sampling_log_probs: log-probabilities of the same tokens, as computed by the sampler.
        mask: bool, which tokens count.
        mode: a mode of the table.
        clip_max: > 0, the largest ratio; None for no limit.
        clip_min: ≥ 0 and below clip_max, the smallest ratio; None for no limit.

    Returns:
        float32, without gradient: (B, T), 1 where a token does not count; for modes of sequences (B, 1), or (B,
        num_segments) for packed rows. Under jit, a row with more segments is NaN.

    Example:
        >>> old, sampling = jnp.log(jnp.array([[0.4, 0.5]])), jnp.log(jnp.array([[0.1, 0.5]]))
        >>> mask = jnp.ones((1, 2), bool)
        >>> importance_sampling_ratio(old, sampling, mask=mask, mode="token_truncate").tolist()
        [[3.0, 1.0]]
        >>> importance_sampling_ratio(old, sampling, mask=mask).tolist()
        [[0.0]]

    References:
        Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated); Liu et
        al., "When Speed Kills Stability", 2025 (masked, and of sequences).
    """
    op = "importance_sampling_ratio"
    check_choice(op, "mode", mode, MODES)
    if clip_max is not None:
        _checks.check_positive(op, clip_max=clip_max)
    if clip_min is not None:
        _checks.check_python_numbers(op, clip_min=clip_min)
        holds = 0 <= clip_min < (float("inf") if clip_max is None else clip_max)
        _checks.check_number(op, "clip_min", clip_min, holds, f">= 0 and below clip_max={clip_max}")
    old, sampling = jax.lax.stop_gradient(
        _checks.as_float32(op, old_log_probs=old_log_probs, sampling_log_probs=sampling_log_probs)
    )
    if old.ndim != 2:
        raise ValueError(f"{op}: old_log_probs has shape {old.shape}, but must be (rows, tokens).")
    check_shape(op, "sampling_log_probs", sampling, old.shape, "one number for each token of old_log_probs")
    sequences = sequences_of(op, segment_ids, num_segments, old.shape)
    mask = sequences.tokens(_checks.as_mask(op, "mask", mask, old.shape))
    logs = jnp.where(mask, log_ratio(jnp.where(mask, old, 0.0), jnp.where(mask, sampling, 0.0)), 0.0)
    if mode.startswith("sequence"):
        logs = sequences.sum(logs)
    elif sequences.ids is not None:
        logs = logs * sequences.fits()
    ratio = jnp.exp(_checks.clamp_exponent(logs))
    low, high = 0.0 if clip_min is None else clip_min, jnp.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return jnp.clip(ratio, low, high)
    return jnp.where((ratio < low) | (ratio > high), 0.0, ratio)
