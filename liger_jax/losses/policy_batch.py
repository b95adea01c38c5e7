"""What a batch of samples needs before its policy loss: advantages from rewards, and the tokens' weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import LOSS_TYPES
from liger_jax.losses._sequences import Sequences, sequences_of
from liger_jax.ops.checks import ArrayLike, as_array, check_choice, check_flag, check_shape

ADVANTAGE_METHODS = ("grpo", "dr_grpo", "rloo")
_LARGEST_REWARD = 1e15  # whose square, summed over a batch, is far below float32's end
_STD_OFFSET = 1e-4  # TRL's; keeps a group of equal rewards at 0


def policy_weights(
    mask: Bool[Array, "B T"],
    loss_type: str = "dapo",
    max_length: int | None = None,
    *,
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    num_segments: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """The weights of tokens, and the denominator, with which token losses are summed to a policy loss.

    loss = Σ weights · token_losses / denominator. With n_i the number of counted tokens of sequence i: "grpo", "sapo"
    and "gmpo" have weights 1/n_i and the denominator B; "dapo", "bnpo", "cispo" and "vespo" weights 1 and Σ n_i;
    "dr_grpo" weights 1 and B · max_length; "luspo" weights 1 and B.

    B is the number of rows, or of segments if rows are packed, including those without a counted token.

    If micro-batches or devices share a step, each has its own weights, and all use the denominator of the whole step,
    which is the sum of theirs. `segment_ids` and `num_segments` are those of `sequence_log_probs`.

    Args:
        mask: bool, which tokens count.
        loss_type: one of those named.
        max_length: > 0, the largest number of tokens in a completion; for "dr_grpo" only, which requires it.

    Returns:
        weights (B, T) float32, 0 where a token does not count, and denominator () float32. Under jit, the denominator
        is 0 if it counts tokens and there are none, and both are NaN if a row has more segments than `num_segments`.

    Raises:
        ValueError: outside of jit, the mask counts no token.

    Example:
        >>> mask = jnp.array([[True, True, False], [True, False, False]])
        >>> weights, denominator = policy_weights(mask, "grpo")
        >>> weights.tolist(), denominator.item()
        ([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], 2.0)
    """
    mask = as_array("policy_weights", "mask", mask)
    if mask.ndim != 2:
        raise ValueError(f"policy_weights: mask has shape {mask.shape}, but must be (sequences, tokens).")
    op = "policy_weights"
    mask = _checks.as_mask(op, "mask", mask, mask.shape)
    sequences = sequences_of(op, segment_ids, num_segments, mask.shape)
    return checked_policy_weights(op, sequences.tokens(mask), loss_type, max_length, sequences)


def checked_policy_weights(
    op: str, mask: jax.Array, loss_type: str, max_length: int | None, sequences: Sequences
) -> tuple[jax.Array, jax.Array]:
    """`policy_weights` under the name of the op that calls it; the mask is without empty places."""
    check_choice(op, "loss_type", loss_type, LOSS_TYPES)
    _checks.check_is_read(op, "max_length", max_length is not None, loss_type, ("dr_grpo",))
    if loss_type == "dr_grpo":
        if isinstance(max_length, bool) or not isinstance(max_length, int):
            raise TypeError(
                f"{op}: loss_type='dr_grpo' needs max_length, an int, but it is {max_length!r}; pass the longest "
                "completion that is sampled."
            )
        _checks.check_number(op, "max_length", max_length, max_length > 0, "> 0")
    num_tokens = jnp.sum(mask)
    _checks.check_counts(op, "mask", num_tokens, "leave such a batch out")
    weights = mask.astype(jnp.float32)
    num_sequences = jnp.asarray(float(mask.shape[0]), jnp.float32)
    num_tokens = num_tokens.astype(jnp.float32)  # 0 is reported as it is: a device's share of a sum over devices
    if sequences.ids is not None:
        fits = sequences.fits()
        weights = weights * fits
        num_sequences = jnp.sum(sequences.exist()).astype(jnp.float32) * jnp.min(fits)
        num_tokens = num_tokens * jnp.min(fits)
    if loss_type in ("grpo", "sapo", "gmpo"):
        counts = sequences.spread(sequences.sum(mask.astype(jnp.int32)))
        return weights / jnp.maximum(counts, 1).astype(jnp.float32), num_sequences
    if loss_type == "dr_grpo":
        return weights, num_sequences * float(max_length or 0)
    if loss_type == "luspo":
        return weights, num_sequences
    return weights, num_tokens


def group_advantages(
    rewards: Float[Array, "*P G"], method: str = "grpo", *, where: Bool[Array, "*P G"] | None = None
) -> Float[Array, "*P G"]:
    """Advantages of the G samples of each prompt, from their rewards.

    "grpo": (reward − mean) / (std + 1e-4), where std divides by n − 1; "dr_grpo": reward − mean;
    "rloo": reward − the mean of the group's others.

    Args:
        rewards: any float dtype; the last axis has the G ≥ 2 samples of one prompt.
        method: "grpo", "dr_grpo" or "rloo".
        where: bool, which samples could be scored; None counts all.

    Returns:
        float32, without gradient. It is 0 for a sample that does not count, and for the only counted sample of a group.

    Raises:
        ValueError: a group has fewer than two samples.

    Example:
        >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0]])
        >>> group_advantages(rewards).tolist()
        [[0.866, -0.866, -0.866, 0.866]]
        >>> group_advantages(rewards, "rloo").tolist()
        [[0.667, -0.667, -0.667, 0.667]]

    References:
        grpo: Shao et al., arXiv:2402.03300; dr_grpo: Liu et al., arXiv:2503.20783; rloo: Ahmadian et al.,
        arXiv:2402.14740.
    """
    op = "group_advantages"
    check_choice(op, "method", method, ADVANTAGE_METHODS)
    (rewards,) = jax.lax.stop_gradient(_checks.as_float32(op, rewards=rewards))
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(
            f"{op}: rewards has shape {rewards.shape}, but the last axis must hold a group of at least two samples of "
            "one prompt; reshape them to (prompts, samples)."
        )
    where = _checks.as_where(op, where, rewards.shape)

    def total(x):
        return jnp.sum(jnp.where(where, x, 0.0), axis=-1, keepdims=True)

    # Divided by a power of two, which is exact, where their squares or sums would be more than float32 holds.
    largest = jnp.max(jnp.where(where, jnp.abs(rewards), 0.0), axis=-1, keepdims=True)
    unit = jnp.where(largest > _LARGEST_REWARD, 2.0**96, 1.0)
    rewards = rewards / unit
    # From one of them on, because a sum is rounded: equal rewards differ by exactly 0 from it, and not from their mean.
    first = jnp.take_along_axis(rewards, jnp.argmax(where, axis=-1, keepdims=True), axis=-1)
    rewards = jnp.where(where, rewards - first, 0.0)
    count = total(jnp.ones_like(rewards))
    mean = total(rewards) / jnp.maximum(count, 1.0)
    centred = jnp.where(where, rewards - mean, 0.0)
    if method == "rloo":  # reward − the others' mean = n / (n − 1) · (reward − mean)
        return unit * (centred * (count / jnp.maximum(count - 1.0, 1.0)))
    if method == "dr_grpo":
        return unit * centred
    return centred / (jnp.sqrt(total(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)) + _STD_OFFSET / unit)


def reinforce_advantages(
    rewards: Float[Array, "*P"], *, group_baseline: bool = False, where: Bool[Array, "*P"] | None = None
) -> Float[Array, "*P"]:
    """REINFORCE++'s advantages: rewards that are normalised over the whole batch instead of within a group.

    (a − mean(a)) / (std(a) + 1e-4), over all samples of all prompts, where std divides by n − 1. a is the reward, or
    with `group_baseline` the reward minus the mean of its group: REINFORCE++-baseline. The paper's KL penalty to a
    reference is `beta` of `policy_loss`.

    Compute it from the whole step's rewards: inside `jax.shard_map`, it would be normalised over a device's shard.

    Args:
        rewards: any float dtype; with `group_baseline` the last axis has the samples of one prompt.
        group_baseline: whether the mean of its group is first subtracted from each reward.
        where: bool, which samples could be scored; None counts all.

    Returns:
        float32, without gradient; 0 for a sample that does not count.

    Raises:
        ValueError: there are fewer than two samples.

    Example:
        >>> reinforce_advantages(jnp.array([[1.0, 0.0], [0.0, 0.0]])).tolist()
        [[1.5, -0.5], [-0.5, -0.5]]
        >>> reinforce_advantages(jnp.array([[1.0, 0.0], [0.0, 0.0]]), group_baseline=True).tolist()
        [[1.224, -1.224], [0.0, 0.0]]

    References:
        Hu et al., REINFORCE++, arXiv:2501.03262.
    """
    op = "reinforce_advantages"
    check_flag(op, group_baseline=group_baseline)
    (rewards,) = jax.lax.stop_gradient(_checks.as_float32(op, rewards=rewards))
    if rewards.size < 2 or (group_baseline and rewards.shape[-1] < 2):
        raise ValueError(
            f"{op}: rewards has shape {rewards.shape}, but must hold a batch of at least two samples, and "
            "of each prompt two with group_baseline=True."
        )
    where = _checks.as_where(op, where, rewards.shape)
    if group_baseline:
        rewards = group_advantages(rewards, "dr_grpo", where=where)
    batch = group_advantages(rewards.reshape(-1), "grpo", where=where.reshape(-1))
    return batch.reshape(rewards.shape)


def reverse_kl_advantages(
    sampled_log_probs: Float[Array, "*B T"], teacher_log_probs: Float[Array, "*B T"]
) -> Float[Array, "*B T"]:
    """Advantages for on-policy distillation: teacher_log_probs − sampled_log_probs at each sampled token.

    The student samples, and the teacher scores the tokens. With these `advantages` (B, T), the gradient of
    `policy_loss` is an unbiased estimate of that of the reverse KL(student ‖ teacher) at each sampled token. Ratios,
    clipping and importance sampling apply as with rewards. No logits of the teacher are needed.

    Args:
        sampled_log_probs: of the sampled tokens, under the student that sampled them, any float dtype.
        teacher_log_probs: of the same tokens, under the teacher.

    Returns:
        float32, without gradient; the negative of its mean over tokens estimates the reverse KL. If the teacher's
        log-probability of a token is NaN or infinite, so is its advantage, and the loss: leave the token out of the
        mask.

    Example:
        >>> student, teacher = jnp.log(jnp.array([[0.5, 0.25]])), jnp.log(jnp.array([[0.25, 0.25]]))
        >>> reverse_kl_advantages(student, teacher).tolist()
        [[-0.693, 0.0]]

    References:
        Agarwal et al., arXiv:2306.13649; Gu et al., MiniLLM, arXiv:2306.08543; Lu et al., "On-Policy Distillation",
        2025.
    """
    op = "reverse_kl_advantages"
    student, teacher = _checks.as_float32(op, sampled_log_probs=sampled_log_probs, teacher_log_probs=teacher_log_probs)
    check_shape(op, "teacher_log_probs", teacher, student.shape, "one number for each token of sampled_log_probs")
    return jax.lax.stop_gradient(teacher - student)


def mask_truncated(
    mask: Bool[Array, "B T"],
    truncated: Bool[Array, "B"] | Bool[Array, "B S"],
    *,
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    num_segments: int | None = None,
) -> Bool[Array, "B T"]:
    """Overlong filtering: the mask without the tokens of completions that were cut off at the longest length.

    Such a completion has no end that a reward could judge. It still counts as a sequence in the denominators of "grpo",
    "sapo", "gmpo", "luspo" and "dr_grpo". `segment_ids` and `num_segments` are those of `sequence_log_probs`. Under
    jit, a row with more segments keeps its tokens, and `policy_loss` with the same `num_segments` is then NaN.

    Args:
        mask: bool, which tokens count.
        truncated: bool, which sequences were cut off: (B,), or (B, num_segments) for packed rows.

    Returns:
        The mask, bool.

    Example:
        >>> mask_truncated(jnp.ones((2, 2), bool), jnp.array([True, False])).tolist()
        [[False, False], [True, True]]

    References:
        Yu et al., DAPO, arXiv:2503.14476; `mask_truncated_completions` in TRL.
    """
    op = "mask_truncated"
    mask = as_array(op, "mask", mask)
    if mask.ndim != 2:
        raise ValueError(f"{op}: mask has shape {mask.shape}, but must be (rows, tokens).")
    mask = _checks.as_mask(op, "mask", mask, mask.shape)
    sequences = sequences_of(op, segment_ids, num_segments, mask.shape)
    shape = mask.shape[:1] if sequences.ids is None else (mask.shape[0], sequences.count)
    truncated = _checks.as_mask(op, "truncated", truncated, shape, "one entry for each sequence")
    return mask & ~sequences.spread(truncated.reshape(shape[0], -1))
