"""What a batch of samples needs before its policy loss: advantages from rewards, and the tokens' weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import LOSS_TYPES
from liger_jax.ops._checks import check_choice

ADVANTAGE_METHODS = ("grpo", "dr_grpo", "rloo")
_STD_OFFSET = 1e-4  # TRL's; keeps a group of equal rewards at 0


def policy_weights(
    mask: Bool[Array, "B T"], loss_type: str = "dapo", max_length: int | None = None
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """The tokens' weights and the denominator that make a policy loss of the tokens' losses.

    loss = Σ weights · token_losses / denominator. With n_i the number of counted tokens of sequence i:
    "grpo" and "sapo" weigh 1/n_i and divide by B; "dapo", "bnpo" and "cispo" weigh 1 and divide by Σ n_i; "dr_grpo"
    weighs 1 and divides by B · max_length; "luspo" weighs 1 and divides by B.

    Where micro-batches or devices share a step, each has its own weights, and all divide by the whole step's
    denominator, which is the sum of theirs.

    Args:
        mask: bool, which tokens count.
        loss_type: one of those named.
        max_length: > 0, the longest completion that is sampled; for "dr_grpo" only, which needs it.

    Returns:
        weights (B, T) float32, 0 where a token does not count, and denominator () float32, which is never 0.

    Raises:
        TypeError: the mask is not bool, or `max_length` is no int.
        ValueError: the type is unknown, `max_length` is missing, not positive or not read, or the mask counts no token
            outside of jit.

    Example:
        >>> mask = jnp.array([[True, True, False], [True, False, False]])
        >>> weights, denominator = policy_weights(mask, "grpo")
        >>> weights.tolist(), denominator.item()
        ([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], 2.0)

    References:
        As `policy_loss`.
    """
    mask = jnp.asarray(mask)
    if mask.ndim != 2:
        raise ValueError(f"policy_weights: mask has shape {mask.shape}, but must be (sequences, tokens).")
    return checked_policy_weights("policy_weights", mask, loss_type, max_length)


def checked_policy_weights(
    op: str, mask: jax.Array, loss_type: str, max_length: int | None
) -> tuple[jax.Array, jax.Array]:
    """`policy_weights` under the name of the op that calls it."""
    check_choice(op, "loss_type", loss_type, LOSS_TYPES)
    mask = _checks.as_mask(op, "mask", mask, mask.shape)
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
    if loss_type in ("grpo", "sapo"):
        return weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0), num_sequences
    if loss_type == "dr_grpo":
        return weights, num_sequences * float(max_length)
    if loss_type == "luspo":
        return weights, num_sequences
    return weights, jnp.maximum(num_tokens, 1).astype(jnp.float32)


def group_advantages(
    rewards: Float[Array, "*P G"], method: str = "grpo", *, where: Bool[Array, "*P G"] | None = None
) -> Float[Array, "*P G"]:
    """Advantages of the G samples of each prompt, from their rewards.

    "grpo": (reward − mean) / (std + 1e-4), where std divides by n − 1; "dr_grpo": reward − mean;
    "rloo": reward − the mean of the group's others.

    Args:
        rewards: any float dtype; the last axis is the group of one prompt, G ≥ 2.
        method: "grpo", "dr_grpo" or "rloo".
        where: bool, which samples could be scored; None counts all.

    Returns:
        float32, without gradient. A sample that does not count has 0, and so has one that is alone in its group.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape is wrong, a group has fewer than two samples, or the method is unknown.

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
    where = jnp.ones(rewards.shape, bool) if where is None else _checks.as_mask(op, "where", where, rewards.shape)

    def total(x):
        return jnp.sum(jnp.where(where, x, 0.0), axis=-1, keepdims=True)

    # From one of them on, because a sum is rounded: equal rewards differ by exactly 0 from it, and not from their mean.
    first = jnp.take_along_axis(rewards, jnp.argmax(where, axis=-1, keepdims=True), axis=-1)
    rewards = jnp.where(where, rewards - first, 0.0)
    count = total(jnp.ones_like(rewards))
    mean = total(rewards) / jnp.maximum(count, 1.0)
    centred = jnp.where(where, rewards - mean, 0.0)
    if method == "rloo":  # reward − the others' mean = n / (n − 1) · (reward − mean)
        return centred * (count / jnp.maximum(count - 1.0, 1.0))
    if method == "dr_grpo":
        return centred
    return centred / (jnp.sqrt(total(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)) + _STD_OFFSET)
