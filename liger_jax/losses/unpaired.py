"""KTO: losses of single responses, each good or bad, against a reference policy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from liger_jax._tree import tree_dataclass
from liger_jax.losses import _checks
from liger_jax.ops._checks import check_choice, check_shape

KTO_TYPES = ("kto", "apo_zero_unpaired")


@tree_dataclass
class KTOOutput:
    """The results of `kto_loss`; train on `losses.mean()`.

    Attributes:
        losses: (P,) float32, weighted by `desirable_weight` and `undesirable_weight`.
        rewards: (P,) float32, β times the log-ratio of policy to reference; without gradient.
        kl: () float32, the baseline that the losses were computed with; without gradient.
    """

    losses: jax.Array
    rewards: jax.Array
    kl: jax.Array


def kto_loss(
    log_probs: Float[Array, "P"],
    reference_log_probs: Float[Array, "P"],
    desirable: Bool[Array, "P"],
    *,
    kl: float | Float[Array, "*M"] | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
) -> KTOOutput:
    """Kahneman-Tversky optimisation: responses that are good or bad, each by itself.

    With r = log_probs − reference_log_probs and z = max(0, mean(kl)), without gradient:
    "kto": desirable_weight · (1 − σ(β (r − z))) where desirable, else undesirable_weight · (1 − σ(β (z − r)));
    "apo_zero_unpaired": the same with (1 − σ(βr)) and σ(βr), without a baseline.

    Args:
        log_probs: the responses' log-probabilities, summed over their tokens, any float dtype.
        reference_log_probs: the same under the reference policy.
        desirable: bool, which responses are good.
        kl: the baseline's log-ratios of policy to reference, for responses that answer other prompts; their mean is
            clamped at 0. A number is such a mean: 0.0 is no baseline, and micro-batches share their whole batch's. For
            "kto" only, which needs it.
        beta: > 0, how strongly the reference binds.
        desirable_weight: ≥ 0, the weight of good responses.
        undesirable_weight: ≥ 0, the weight of bad responses.
        loss_type: "kto" or "apo_zero_unpaired".

    Returns:
        A `KTOOutput`.

    Raises:
        TypeError: a dtype is wrong, or an option is no Python number.
        ValueError: shapes differ, a number breaks its law, the type is unknown, or `kl` is missing or not read.

    Example:
        >>> log_probs, reference = jnp.array([-10.0, -12.0]), jnp.array([-14.0, -12.0])
        >>> output = kto_loss(log_probs, reference, jnp.array([True, False]), kl=jnp.array([0.5, 1.5]), beta=0.5)
        >>> output.losses.tolist(), output.rewards.tolist(), output.kl.item()
        ([0.182, 0.378], [2.0, 0.0], 1.0)

    References:
        Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, arXiv:2402.01306;
        apo_zero_unpaired: arXiv:2408.06266.
    """
    op = "kto_loss"
    check_choice(op, "loss_type", loss_type, KTO_TYPES)
    _checks.check_positive(op, beta=beta)
    _checks.check_python_numbers(op, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    for name, weight in dict(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight).items():
        _checks.check_number(op, name, weight, weight >= 0, ">= 0; 0 leaves such responses out")
    if (kl is None) == (loss_type == "kto"):
        cure = "pass log-ratios of mismatched responses, or 0.0" if kl is None else "leave it out"
        raise ValueError(f"{op}: kl belongs to loss_type='kto' and to no other, but loss_type={loss_type!r}; {cure}.")
    log_probs, reference_log_probs = _checks.as_sequences(
        op, log_probs=log_probs, reference_log_probs=reference_log_probs
    )
    desirable = jnp.asarray(desirable)
    if desirable.dtype != jnp.bool_:
        raise TypeError(f"{op}: desirable has dtype {desirable.dtype}, but must be bool; pass desirable != 0.")
    check_shape(op, "desirable", desirable, log_probs.shape, "one entry for each response")
    (kl,) = _checks.as_float32(op, kl=0.0 if kl is None else kl)
    baseline = jax.lax.stop_gradient(jnp.maximum(jnp.mean(kl), 0.0))
    log_ratios = log_probs - reference_log_probs
    advantage = beta * (log_ratios - baseline)  # 1 − σ(x) = σ(−x)
    good, bad = jax.nn.sigmoid(-advantage), jax.nn.sigmoid(advantage)
    losses = jnp.where(desirable, desirable_weight * good, undesirable_weight * bad)
    return KTOOutput(losses=losses, rewards=jax.lax.stop_gradient(beta * log_ratios), kl=baseline)
