"""The policy loss token by token, for losses that make gradients together with the logits."""

import jax
from jaxtyping import Array, Float

from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import IMPORTANCE_LEVELS, SEQUENCE_TYPES, Objective, log_ratio
from liger_jax.ops.checks import check_choice, check_shape


def policy_token_loss(
    log_probs: Float[Array, "*N"],
    old_log_probs: Float[Array, "*N"],
    advantages: Float[Array, "*N"],
    reference_log_probs: Float[Array, "*N"] | None = None,
    importance_ratio: Float[Array, "*N"] | None = None,
    *,
    loss_type: str = "dapo",
    importance_level: str = "token",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool | None = None,
    sapo_temperatures: tuple[float, float] | None = None,
) -> Float[Array, "*N"]:
    """The policy loss of each token, elementwise, for those types of `policy_loss` that are separable by token.

    A loss is separable if a token's loss depends only on this token. Its gradients can then be computed together with
    the logits, one chunk at a time. `policy_weights` returns the weights and the denominator of the sum: `sum(weights *
    policy_token_loss(...)) / denominator`. An entropy bonus −c · entropy is separable, too.

    | loss | separable |
    |---|---|
    | "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" with token ratios | yes |
    | the same with `importance_level="sequence"` (GSPO) | no: the ratio of a token depends on its whole sequence |
    | "vespo", "gmpo" | no: the weight of a token depends on its whole sequence |

    For packed rows, `spread_segments` gives each token its segment's advantage. Options that are not listed here are
    those of `policy_loss`. Only `log_probs` has a gradient.

    Args:
        log_probs: the tokens' log-probabilities under the policy, any float dtype and shape.
        old_log_probs: those under the policy that sampled the tokens. They, and all other arrays, have the same shape.
            The ratio is 1 where they are not finite or more than 80 below, as in `policy_loss`.
        advantages: the advantage at each token.
        reference_log_probs: those under the reference; with `beta` > 0 only.
        importance_ratio: factors of the losses, such as the ratio of `old_log_probs` to the sampler's. A factor that is
            not finite counts as 1; 0 leaves a token out.
        loss_type: a type of `policy_loss`; "grpo", "bnpo", "dr_grpo" and "luspo" are "dapo" at a single token.
        importance_level: "token"; "sequence" is refused.

    Returns:
        float32, the shape of `log_probs`.

    Raises:
        ValueError: the loss is not separable.

    Example:
        >>> import jax.numpy as jnp
        >>> policy_token_loss(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.5]), jnp.array([1.0, -1.0])).tolist()
        [-1.2, 0.8]
    """
    op = "policy_token_loss"
    check_choice(op, "importance_level", importance_level, IMPORTANCE_LEVELS)
    if importance_level == "sequence":
        raise ValueError(
            f"{op}: importance_level='sequence' is not separable by token, because a token's ratio depends on its "
            "whole sequence; use policy_loss on the tokens' log-probabilities."
        )
    if loss_type in SEQUENCE_TYPES:
        raise ValueError(
            f"{op}: loss_type={loss_type!r} is not separable by token, because a token's weight depends on its whole "
            "sequence; use policy_loss on the tokens' log-probabilities."
        )
    objective = Objective(op, loss_type, epsilon_low, epsilon_high, delta, beta, unbiased_kl, sapo_temperatures)
    if (reference_log_probs is None) != (beta == 0):
        cure = "pass beta > 0" if beta == 0 else "pass it, or beta=0.0"
        raise ValueError(f"{op}: reference_log_probs belongs to beta > 0, but beta={beta}; {cure}.")
    arrays = dict(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        reference_log_probs=reference_log_probs,
        importance_ratio=importance_ratio,
    )
    log_probs, old_log_probs, advantages, reference, importance = _checks.as_float32(
        op, "reference_log_probs", "importance_ratio", **arrays
    )
    for name, x in zip(arrays, (log_probs, old_log_probs, advantages, reference, importance), strict=True):
        check_shape(op, name, x, log_probs.shape, "one number for each token of log_probs")
    constants = old_log_probs, advantages, reference, importance
    old_log_probs, advantages, reference, importance = jax.lax.stop_gradient(constants)
    return objective.losses(log_ratio(log_probs, old_log_probs), log_probs, advantages, reference, importance)
