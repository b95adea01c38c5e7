"""Routers of mixtures of experts: which experts a token goes to, with which weights, and the losses that spread them.

A layer gives sums over its tokens (`RouterSums`). Sums of layers, of devices and of micro-batches add up, and the
losses are formed of the total.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from liger_jax.ops import checks
from liger_jax.ops.checks import ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token, and their weights.

    Attributes:
        weights: (..., k) in the dtype of the logits.
        experts: (..., k) int32, the largest weight first; −1 where a token's logits are not finite.
    """

    weights: jax.Array
    experts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
    """Sums over tokens, float32. Several layers are leading axes, or are added up.

    Attributes:
        chosen: (..., E), how many times a token chose each expert.
        probability: (..., E), sum of the softmax over all experts.
        squared_normalizer: (...), sum of the squared log-normaliser of the softmax.
        count: (...), the number of tokens.
    """

    chosen: jax.Array
    probability: jax.Array
    squared_normalizer: jax.Array
    count: jax.Array


def softmax_top_k(logits: Float[ArrayLike, "*batch E"], k: int, *, normalized: bool) -> Routing:
    """The k largest probabilities of a softmax over all experts: the router of Qwen3-MoE, OLMoE and Mixtral.

    Args:
        logits: (..., E), any float dtype. The softmax is float32.
        k: experts of a token, from 1 to E.
        normalized: whether the chosen weights are divided by their sum (`norm_topk_prob`; Mixtral always does).

    Returns:
        Weights and experts. A token with a NaN or an infinity among its logits has weights of NaN and experts −1; a
        logit of −inf is an expert that is never chosen before others.

    Example:
        >>> routing = softmax_top_k(jnp.log(jnp.array([0.5, 0.2, 0.3])), 2, normalized=False)
        >>> routing.experts.tolist(), routing.weights.round(3).tolist()
        ([0, 2], [0.5, 0.30000001192092896])
    """
    checks.check_flag("softmax_top_k", normalized=normalized)
    logits = _checked("softmax_top_k", logits, k)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    if normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return _routing(weights, experts, logits)


def top_k_softmax(logits: Float[ArrayLike, "*batch E"], k: int) -> Routing:
    """A softmax over the k largest logits: the router of gpt-oss, whose bias is included in the logits.

    Arguments and result are those of `softmax_top_k`.

    Example:
        >>> top_k_softmax(jnp.log(jnp.array([6.0, 1.0, 2.0])), 2).weights.tolist()
        [0.75, 0.25]
    """
    logits = _checked("top_k_softmax", logits, k)
    chosen, experts = jax.lax.top_k(logits.astype(jnp.float32), k)
    return _routing(jax.nn.softmax(chosen, axis=-1), experts, logits)


def _routing(weights: jax.Array, experts: jax.Array, logits: jax.Array) -> Routing:
    is_finite = jnp.isfinite(weights).all(axis=-1, keepdims=True)
    return Routing(weights=weights.astype(logits.dtype), experts=jnp.where(is_finite, experts, -1))


def router_sums(
    logits: Float[ArrayLike, "*batch E"],
    experts: Int[ArrayLike, "*batch k"],
    where: Bool[ArrayLike, "*batch"] | Num[ArrayLike, "*batch"] | None = None,
) -> RouterSums:
    """The sums over a layer's tokens from which the losses of its router are computed.

    Args:
        logits: (..., E), any float dtype.
        experts: (..., k) integers, as the router chose them. A token that counts and has chosen an expert beyond E
            makes `chosen` NaN.
        where: (...), which tokens count; None for all.

    Returns:
        Sums over all tokens: (E,), (E,), () and (). `chosen` and `count` have no gradient.

    Example:
        >>> router_sums(jnp.zeros((3, 2)), jnp.array([[0], [0], [1]])).chosen.tolist()
        [2.0, 1.0]
    """
    op = "router_sums"
    (logits,) = checks.floating(op, logits=logits)
    experts = checks.as_array(op, "experts", experts)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(f"{op}: experts has dtype {experts.dtype}, but must be integers; pass those of a Routing.")
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits has shape (), but must be (..., E), a number for each expert.")
    batch, num_experts = logits.shape[:-1], logits.shape[-1]
    checks.check_shape(op, "experts", experts, (*batch, *experts.shape[-1:]), "k experts for each row of logits")
    counts = jnp.ones(batch, jnp.float32) if where is None else checks.as_real(op, "where", where).astype(jnp.float32)
    checks.check_shape(op, "where", counts, batch, "one entry for each row of logits")
    counts, logits = counts.reshape(-1), logits.astype(jnp.float32).reshape(-1, num_experts)
    does_count = counts[:, None] != 0
    logits = jnp.where(does_count, logits, 0.0)  # an ignored token may hold anything
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    # By comparisons: the order of a scatter's additions is not fixed.
    is_chosen = experts.reshape(-1, experts.shape[-1], 1) == jnp.arange(num_experts, dtype=experts.dtype)[None, None]
    is_beyond = jnp.any(does_count & (experts.reshape(-1, experts.shape[-1]) >= num_experts))
    weighed = lambda x: jnp.sum(counts[:, None] * x, axis=0)
    return RouterSums(
        chosen=jnp.where(is_beyond, jnp.nan, weighed(is_chosen.sum(axis=1).astype(jnp.float32))),
        probability=weighed(jnp.exp(logits - normalizer[:, None])),
        squared_normalizer=jnp.sum(counts * normalizer**2),
        count=counts.sum(),
    )


def balancing_loss(sums: RouterSums, *, per_layer: bool = False) -> Float[Array, ""]:
    """The loss that spreads tokens over experts: E·Σ_e f_e·P_e.

    f_e is how often expert e was chosen per token, and P_e its mean probability. The loss is k if all experts are
    chosen equally often. As in transformers, sums over all layers are formed before the product.

    Args:
        sums: of one layer, or of several as leading axes; over all tokens of the batch, on all devices.
        per_layer: whether each layer has its own loss, and the mean is returned.

    Returns:
        A number, float32; 0 if no token counts.

    Example:
        >>> sums = router_sums(jnp.zeros((3, 2)), jnp.array([[0], [0], [1]]))
        >>> balancing_loss(sums).tolist()
        1.0

    References:
        Fedus et al., "Switch Transformers", 2021 (arXiv:2101.03961), equation 4.
    """
    sums = _checked_sums("balancing_loss", sums)
    checks.check_flag("balancing_loss", per_layer=per_layer)
    if not per_layer:
        sums = _over_layers(sums)
    count = _divisor(sums.count)[..., None]
    loss = sums.chosen.shape[-1] * jnp.sum((sums.chosen / count) * (sums.probability / count), axis=-1)
    return loss.mean()


def router_z_loss(sums: RouterSums) -> Float[Array, ""]:
    """The mean over tokens and layers of the router's squared log-normaliser.

    Args:
        sums: of one layer, or of several as leading axes.

    Returns:
        A number, float32; 0 if no token counts.

    Example:
        >>> router_z_loss(router_sums(jnp.zeros((3, 1)), jnp.zeros((3, 1), int))).tolist()
        0.0

    References:
        Zoph et al., "ST-MoE", 2022 (arXiv:2202.08906), equation 5.
    """
    sums = _over_layers(_checked_sums("router_z_loss", sums))
    return sums.squared_normalizer / _divisor(sums.count)


def expert_load(sums: RouterSums) -> Float[Array, "*layers E"]:
    """The fraction of all choices that went to each expert; 1/E if they are equal.

    Args:
        sums: of one layer, or of several as leading axes.

    Returns:
        (..., E), float32, for each layer; 0 if no token counts.

    Example:
        >>> expert_load(router_sums(jnp.zeros((4, 2)), jnp.array([[0], [0], [1], [0]]))).tolist()
        [0.75, 0.25]
    """
    sums = _checked_sums("expert_load", sums)
    return sums.chosen / _divisor(sums.chosen.sum(axis=-1, keepdims=True))


def _checked_sums(op: str, sums: Any) -> RouterSums:
    if not isinstance(sums, RouterSums):
        raise TypeError(
            f"{op}: sums is a {type(sums).__name__}, but must be RouterSums; pass router_sums(logits, experts), or the "
            "sum of those of several layers."
        )
    return sums


def _divisor(count: jax.Array) -> jax.Array:
    return jnp.where(count == 0, 1.0, count)


def _over_layers(sums: RouterSums) -> RouterSums:
    """The sums of all layers together."""
    layers = tuple(range(sums.count.ndim))
    return jax.tree.map(functools.partial(jnp.sum, axis=layers), sums)


def _checked(op: str, logits: ArrayLike, k: int) -> jax.Array:
    (logits,) = checks.floating(op, logits=logits)
    checks.check_int(op, k=k)
    if logits.ndim == 0 or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{op}: k={k} and logits have shape {logits.shape}, but a token goes to between 1 and E experts, the last "
            "axis of logits; pass a smaller k."
        )
    return logits
