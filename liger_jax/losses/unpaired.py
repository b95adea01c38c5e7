"""KTO: losses of single responses, each good or bad, against a reference policy, and the baseline of many batches."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from liger_jax._tree import tree_dataclass
from liger_jax.losses import _checks
from liger_jax.ops.checks import check_choice

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
    """Kahneman-Tversky optimisation, for single responses that are labelled as good or bad.

    With r = log_probs − reference_log_probs and z = max(0, mean(kl)), without gradient:
    "kto": desirable_weight · (1 − σ(β (r − z))) where desirable, else undesirable_weight · (1 − σ(β (z − r)));
    "apo_zero_unpaired": the same with (1 − σ(βr)) and σ(βr), without a baseline.

    Args:
        log_probs: the responses' log-probabilities, summed over their tokens, any float dtype.
        reference_log_probs: the same under the reference policy.
        desirable: bool, which responses are good.
        kl: log-ratios of policy to reference for responses that belong to other prompts, whose mean, clamped at 0, is
            the baseline; or the mean itself as a number: 0.0 for no baseline, the whole batch's for micro-batches, or
            that of `running_baseline`. For "kto" only, which requires it.
        beta: > 0, how strongly the policy is kept near the reference.
        desirable_weight: ≥ 0, the weight of good responses.
        undesirable_weight: ≥ 0, the weight of bad responses.
        loss_type: "kto" or "apo_zero_unpaired".

    Returns:
        A `KTOOutput`.

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
    if kl is None and loss_type == "kto":
        raise ValueError(f"{op}: loss_type='kto' needs kl; pass log-ratios of mismatched responses, or 0.0.")
    if kl is not None and loss_type != "kto":
        raise ValueError(f"{op}: kl belongs to loss_type='kto', but loss_type={loss_type!r}; leave it out.")
    log_probs, reference_log_probs = _checks.as_sequences(
        op, log_probs=log_probs, reference_log_probs=reference_log_probs
    )
    desirable = _checks.as_mask(op, "desirable", desirable, log_probs.shape, "one entry for each response")
    (kl,) = _checks.as_float32(op, kl=0.0 if kl is None else kl)
    baseline = jax.lax.stop_gradient(jnp.maximum(jnp.mean(kl), 0.0))
    log_ratios = log_probs - reference_log_probs
    advantage = beta * (log_ratios - baseline)  # 1 − σ(x) = σ(−x)
    good, bad = jax.nn.sigmoid(-advantage), jax.nn.sigmoid(advantage)
    losses = jnp.where(desirable, desirable_weight * good, undesirable_weight * bad)
    return KTOOutput(losses=losses, rewards=jax.lax.stop_gradient(beta * log_ratios), kl=baseline)


@tree_dataclass
class RunningBaseline:
    """The state of `running_baseline`, which a training loop keeps and saves.

    Attributes:
        mean: () float32, the weighted mean of all log-ratios so far.
        weight: () float32, the sum of their weights.
    """

    mean: jax.Array
    weight: jax.Array


def running_baseline(
    log_ratios: Float[Array, "*M"],
    state: RunningBaseline | None = None,
    *,
    decay: float = 0.9,
    where: Bool[Array, "*M"] | None = None,
) -> tuple[Float[Array, ""], RunningBaseline]:
    """A baseline over many batches: the mean of a single batch has few log-ratios, and varies from step to step.

    With n numbers in this batch: weight' = decay · weight + n, mean' = mean + n (mean of batch − mean) / weight'. So
    the first baseline is the mean of its batch, without a bias towards 0.

    Args:
        log_ratios: of policy to reference, for responses that belong to other prompts, any float dtype; those of a
            whole step.
        state: the state that the previous step returned; None for the first step.
        decay: in [0, 1], the factor of a batch's weight after each step. 0.0 for each batch's mean, 1.0 for that of all
            batches.
        where: bool, which numbers count; None counts all. The others have no effect.

    Returns:
        (baseline, state). The baseline is () float32, the `kl` of `kto_loss`, which clamps it at 0. There is no
        gradient. A batch without a counted number does not change the mean, which is 0 at first.

    Example:
        >>> baseline, state = running_baseline(jnp.array([1.0, 3.0]), decay=0.5)
        >>> baseline.item()
        2.0
        >>> baseline, state = running_baseline(jnp.array([5.0, 5.0]), state, decay=0.5)
        >>> baseline.item()
        4.0

    References:
        The batch's mean: Ethayarajh et al., arXiv:2402.01306; running over batches: Jung et al., Binary Classifier
        Optimization, arXiv:2404.04656.
    """
    op = "running_baseline"
    _checks.check_python_numbers(op, decay=decay)
    _checks.check_number(op, "decay", decay, 0 <= decay <= 1, "in [0, 1]; 0.0 keeps nothing of earlier batches")
    (log_ratios,) = jax.lax.stop_gradient(_checks.as_float32(op, log_ratios=log_ratios))
    where = _checks.as_where(op, where, log_ratios.shape)
    if state is not None and not isinstance(state, RunningBaseline):
        raise TypeError(f"{op}: state is a {type(state).__name__}, but must be what the last call returned, or None.")
    zero = jnp.zeros((), jnp.float32)
    mean, weight = (zero, zero) if state is None else jax.lax.stop_gradient((state.mean, state.weight))
    weight = decay * weight + jnp.sum(where).astype(jnp.float32)
    surplus = jnp.sum(jnp.where(where, log_ratios - mean, 0.0))
    mean = mean + surplus / jnp.where(weight > 0, weight, 1.0)
    return mean, RunningBaseline(mean=mean, weight=weight)
