"""Cases of the losses over logits, and over hidden states and a head."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import ops
from tests.fuzz.case import Arrays, Case, Draw, options_text

IGNORED = -100
LEAST = -1e30
MOST_PRODUCTS = 6e8  # N·D·V, which float64 makes in seconds


@dataclasses.dataclass(frozen=True)
class Head:
    """Shapes and dtypes of hidden states and a head."""

    tokens: tuple[int, ...]
    d: int
    v: int
    dtype: Any
    weight_dtype: Any
    layout: str
    bias: str | None  # "normal", "large", or "forbidden" where it is −inf for some entries
    prefix: str = ""

    @classmethod
    def drawn(cls, draw: Draw, tokens=None, v: int | None = None, prefix: str = "") -> "Head":
        tokens = draw.leading(40, 700) if tokens is None else tokens
        d, v = draw.size(40, 500), v or draw.size(90, 3000)
        while draw.large and math.prod(tokens) * d * v > MOST_PRODUCTS:
            d = max(d // 2, 1)
        dtype = draw.dtype()
        bias = draw.pick(None, None, "normal", "large", "forbidden")
        return cls(tokens, d, v, dtype, draw.like(dtype), draw.pick("vd", "dv"), bias, prefix)

    @property
    def options(self) -> dict[str, str]:
        return {} if self.layout == "vd" else {f"{self.prefix}weight_layout": "dv"}

    def arrays(self, draw: Draw, allowed=()) -> Arrays:
        """Hidden states, weight and perhaps a bias, which forbids none of the entries `allowed`."""
        weight = (self.v, self.d) if self.layout == "vd" else (self.d, self.v)
        arrays = {
            "hidden": draw.normal((*self.tokens, self.d), self.dtype, draw.magnitude()),
            "weight": draw.normal(weight, self.weight_dtype, draw.pick(1.0, 1.0, 0.05)),
        }
        if self.bias:
            bias = draw.rng.standard_normal(self.v) * (10.0 if self.bias == "large" else 1.0)
            if self.bias == "forbidden":
                start = draw.rng.integers(0, self.v)
                forbidden = (np.arange(self.v) >= start) & ~np.isin(np.arange(self.v), np.asarray(allowed))
                bias = np.where(forbidden if not forbidden.all() else False, -np.inf, bias)
            arrays["bias"] = jnp.asarray(bias, self.weight_dtype)
        return {f"{self.prefix}{name}": x for name, x in arrays.items()}

    def logits(self, hidden, weight, bias=None):
        """Before scale and softcap."""
        u = hidden @ (weight.T if self.layout == "vd" else weight)
        return u if bias is None else u + bias


# --- which tokens count -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The axes of the tokens, and which arguments say that a token counts."""

    shape: tuple[int, ...]
    v: int
    has_where: bool
    has_weights: bool

    @classmethod
    def drawn(cls, draw: Draw, shape: tuple[int, ...], v: int, weights: bool = False) -> "Tokens":
        return cls(shape, v, has_where=draw.chance(0.3), has_weights=weights and draw.chance(0.4))

    def arguments(self, draw: Draw) -> tuple[Arrays, Arrays]:
        """Token weights, which have gradients; and labels, where, and `dead`, which marks tokens that do not count."""
        labels = draw.rng.integers(0, self.v, self.shape)
        dead = draw.rng.uniform(size=self.shape) < draw.pick(0.0, 0.2, 0.2, 1.0)
        constants, arrays = {"labels": jnp.asarray(np.where(dead, IGNORED, labels), jnp.int32)}, {}
        if self.has_where:
            where = draw.rng.uniform(size=self.shape) < 0.7
            constants["where"], dead = jnp.asarray(where), dead | ~where
        if self.has_weights:
            # Weights that cancel make a denominator of 0 now and then, where the loss is NaN.
            weights = draw.rng.choice(draw.pick((0.5, 1.0, 2.0), (0.0, 1.0, 0.25), (1.0, -1.0, 3.0)), self.shape)
            arrays["token_weights"], dead = jnp.asarray(weights, jnp.float32), dead | (weights == 0)
        return arrays, constants | {"dead": jnp.asarray(dead)}


def poisoned(draw: Draw, x, dead):
    """Dead rows hold what only padding may hold."""
    values = draw.pick((np.nan,), (np.inf, -np.inf), (np.nan, np.inf), (0.0,))
    return jnp.where(jnp.asarray(dead)[..., None], jnp.asarray(draw.rng.choice(values, x.shape), x.dtype), x)


def living(x, dead):
    """Zeros in the rows that do not count."""
    return jnp.where(dead[..., None], 0, x)


def denominator(total, dead):
    """1 if no token counts, for a loss of 0; NaN if tokens count and weigh nothing."""
    return jnp.where(jnp.all(dead), 1.0, jnp.where(total == 0, jnp.nan, total))


def reduced(reduction: str, dead, weights, class_weight, ce, squares=0.0):
    """The losses of tokens as `reduction` says, with PyTorch's mean."""
    weights = jnp.where(dead, 0.0, weights)
    losses, squares = jnp.where(dead, 0.0, weights * ce), jnp.where(dead, 0.0, weights * squares)
    if reduction == "none":
        return losses + squares
    if reduction == "sum":
        return jnp.sum(losses) + jnp.sum(squares)
    return jnp.sum(losses) / denominator(jnp.sum(weights * class_weight), dead) + jnp.sum(squares) / denominator(
        jnp.sum(weights), dead
    )


@jax.custom_vjp
def log_normalizer(z):
    """log Σ exp z over the last axis. Its gradient is that of every loss that keeps this number and not the softmax.

    In float32 it is known to |z| roundings, and so are probabilities exp(z − it).
    """
    return jax.scipy.special.logsumexp(z, axis=-1, keepdims=True)


def _log_normalizer_forward(z):
    lse = log_normalizer(z)
    return lse, (z, lse)


log_normalizer.defvjp(_log_normalizer_forward, lambda kept, g: (g * jnp.exp(kept[0] - kept[1]),))


def log_softmax(z):
    return z - log_normalizer(z)


def at(labels, x, dead):
    """x (..., V) at the labels (...)."""
    return jnp.take_along_axis(x, jnp.where(dead, 0, labels)[..., None], axis=-1)[..., 0]


def scaled(u, logit_scale: float = 1.0, logit_softcap: float | None = None, temperature: float = 1.0, **_):
    u = jnp.maximum(u, LEAST)  # a forbidden class has 0·log 0 = 0 of everything
    u = u if logit_softcap is None else logit_softcap * jnp.tanh(u / logit_softcap)
    return u * (logit_scale / temperature)


# --- cross-entropy ----------------------------------------------------------------------------------------------------


def logit_options(draw: Draw, forbidden: bool = False) -> dict[str, Any]:
    scales = (0.5, 30.0) if forbidden else (0.5, 30.0, 0.0)  # 0·inf is NaN
    return draw.optional(logit_scale=scales, logit_softcap=(2.0, 30.0)) if draw.chance(0.6) else {}


def _loss_options(draw: Draw, forbidden: bool) -> dict[str, Any]:
    options = draw.optional(z_loss=(1e-2,), reduction=("mean", "sum", "none"), token_scaling=(True,))
    options |= logit_options(draw, forbidden)
    # A forbidden class has a loss of infinity, and smoothing asks for it.
    return options | ({} if forbidden else draw.optional(label_smoothing=(0.1, 1.0)))


def cross_entropy_truth(
    logits, labels, dead, token_weights=None, class_weights=None, where=None,
    *, label_smoothing=0.0, z_loss=0.0, reduction="mean", token_scaling=False, **logit_options,
):  # fmt: skip
    z = scaled(living(logits, dead), **logit_options)
    weights = jnp.ones(dead.shape) if token_weights is None else token_weights
    classes = jnp.ones(z.shape[-1]) if class_weights is None else class_weights
    log_p, class_weight = log_softmax(z), classes[jnp.where(dead, 0, labels)]
    ce = -(1 - label_smoothing) * class_weight * at(labels, log_p, dead)
    if label_smoothing:
        ce -= label_smoothing * jnp.mean(classes * log_p, axis=-1)
    squares = z_loss * log_normalizer(z)[..., 0] ** 2
    if token_scaling:
        p = jax.lax.stop_gradient(jnp.exp(at(labels, log_p, dead)))
        ce, squares = p * ce, p * squares
    return reduced(reduction, dead, weights, class_weight, ce, squares)


def without(op, *names):
    """The op as a function that leaves arrays of its truth alone."""
    return lambda **arrays: op(**{name: x for name, x in arrays.items() if name not in names})


def cross_entropy(draw: Draw) -> Case:
    tokens, v, dtype = draw.leading(40, 700), draw.size(90, 9000), draw.dtype()
    forbidden, classes = draw.chance(0.2), draw.chance(0.3)
    options, counting = _loss_options(draw, forbidden), Tokens.drawn(draw, tokens, v, weights=True)

    def inputs(draw):
        arrays, constants = counting.arguments(draw)
        logits = draw.normal((*tokens, v), dtype, draw.magnitude())
        if forbidden:
            columns = np.isin(np.arange(v), np.asarray(constants["labels"])) | (draw.rng.uniform(size=v) < 0.5)
            logits = jnp.where(columns, logits, -jnp.inf).astype(dtype)
        if classes:
            constants["class_weights"] = draw.uniform((v,), jnp.float32)
        return arrays | {"logits": poisoned(draw, logits, constants["dead"])}, constants

    return Case(
        "cross_entropy",
        without(functools.partial(ops.cross_entropy, **options), "dead"),
        functools.partial(cross_entropy_truth, **options),
        inputs,
        options_text(options),
        silent={"logits": "dead"},
    )


def drawn_limits(draw: Draw, modes: bool = True) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Options that change how and not what, and those among them that may be too much to ask for."""
    options = (
        draw.optional(chunk_size=(draw.size(64),), memory_budget_bytes=(0, 10**5, 10**8)) if draw.chance(0.5) else {}
    )
    if modes:
        options |= draw.optional(mode=("auto", "fast", "lean"))
    # A vector of losses has no mode "fast".
    return options, ("memory_budget_bytes",) * ("memory_budget_bytes" in options) + ("mode",) * (
        "fast" in options.values()
    )


def fused_linear_cross_entropy(draw: Draw) -> Case:
    head = Head.drawn(draw)
    classes, counting = draw.chance(0.3), Tokens.drawn(draw, head.tokens, head.v, weights=True)
    options = _loss_options(draw, head.bias == "forbidden")
    limits, may_refuse = drawn_limits(draw)

    def inputs(draw):
        arrays, constants = counting.arguments(draw)
        arrays |= head.arrays(draw, constants["labels"])
        arrays["hidden"] = poisoned(draw, arrays["hidden"], constants["dead"])
        if classes:
            constants["class_weights"] = draw.uniform((head.v,), jnp.float32)
        return arrays, constants

    def truth(hidden, weight, dead, bias=None, **arrays):
        logits = head.logits(living(hidden, dead), weight, bias)
        return cross_entropy_truth(logits, dead=dead, **arrays, **options)

    return Case(
        "fused_linear_cross_entropy",
        without(functools.partial(ops.fused_linear_cross_entropy, **options, **limits, **head.options), "dead"),
        truth,
        inputs,
        options_text({**options, **limits, **head.options}),
        has_products=True,
        may_refuse=may_refuse,
        silent={"hidden": "dead"},
    )


# --- log-probabilities ------------------------------------------------------------------------------------------------


def found_by_head(head: Head, hidden, weight, labels, dead, bias, **options):
    """log p of the labels, entropies and log-normalisers: 0 where tokens do not count."""
    z = scaled(head.logits(living(hidden, dead), weight, bias), **options)
    log_p = log_softmax(z)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    found = at(labels, log_p, dead), entropy, jax.lax.stop_gradient(log_normalizer(z)[..., 0])
    return tuple(jnp.where(dead, 0.0, x) for x in found)


def token_options(draw: Draw, head: Head) -> dict[str, Any]:
    return logit_options(draw, head.bias == "forbidden") | draw.optional(temperature=(0.5, 2.0))


def fused_linear_log_probs(draw: Draw) -> Case:
    head, with_entropy = Head.drawn(draw), draw.chance(0.5)
    options, counting = token_options(draw, head), Tokens.drawn(draw, head.tokens, head.v)
    limits, may_refuse = drawn_limits(draw, modes=False)
    limits |= draw.optional(metrics=(False,))
    # In 16 bits the gradient of a selected token is a difference of two rounded terms, its own and the normaliser's.
    # The second is not in a difference of two tokens.
    is_half = head.dtype != jnp.float32 or head.weight_dtype != jnp.float32
    selected = draw.pick(0, 0, 2, 3) if is_half else draw.pick(0, 0, 1, 3)
    seen = lambda log_probs: log_probs[..., 1:] - log_probs[..., :1] if is_half else log_probs

    def inputs(draw):
        _, constants = counting.arguments(draw)
        allowed = constants["labels"]
        if selected:
            ids = jnp.asarray(draw.rng.integers(0, head.v, selected), jnp.int32)
            constants["selected_token_ids"], allowed = ids, jnp.concatenate([allowed.reshape(-1), ids])
        arrays = head.arrays(draw, allowed)
        return arrays | {"hidden": poisoned(draw, arrays["hidden"], constants["dead"])}, constants

    def ours(dead, **arrays):
        found = ops.fused_linear_log_probs(**arrays, **options, **limits, **head.options, entropy=with_entropy)
        of_selected = [seen(found.selected_log_probs)] if selected else []
        return (found.log_probs, *([found.entropy] if with_entropy else []), *of_selected, found.log_normalizer)

    def truth(hidden, weight, labels, dead, bias=None, where=None, selected_token_ids=()):
        log_probs, entropy, lse = found_by_head(head, hidden, weight, labels, dead, bias, **options)
        of = lambda token: found_by_head(head, hidden, weight, jnp.full(dead.shape, token), dead, bias, **options)[0]
        of_selected = [seen(jnp.stack([of(token) for token in selected_token_ids], axis=-1))] if selected else []
        return (log_probs, *([entropy] if with_entropy else []), *of_selected, lse)

    says = options_text({**options, **limits, **head.options, "entropy": with_entropy, "selected": selected})
    return Case(
        "fused_linear_log_probs",
        ours,
        truth,
        inputs,
        says,
        has_products=True,
        may_refuse=may_refuse,
        silent={"hidden": "dead"},
    )


def _ratio_loss(log_prob, old, advantage):
    """A policy's clipped ratio."""
    ratio = jnp.exp(log_prob - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


TOKEN_LOSSES = {
    "weighted": lambda log_prob, old, advantage: -advantage * log_prob,
    "squared": lambda log_prob, old, advantage: advantage * jnp.square(log_prob - old),
    "clipped ratio": _ratio_loss,
}


def fused_linear_token_loss(draw: Draw) -> Case:
    head, with_entropy = Head.drawn(draw), draw.chance(0.4)
    kind = draw.pick(*TOKEN_LOSSES)
    options, counting = token_options(draw, head), Tokens.drawn(draw, head.tokens, head.v)
    limits, may_refuse = drawn_limits(draw)

    def inputs(draw):
        _, constants = counting.arguments(draw)
        arrays = head.arrays(draw, constants["labels"])
        arrays["hidden"] = poisoned(draw, arrays["hidden"], constants["dead"])
        tokens = {"old": draw.normal(head.tokens, jnp.float32) - 2, "advantage": draw.normal(head.tokens, jnp.float32)}
        tokens = {name: poisoned(draw, x[..., None], constants["dead"])[..., 0] for name, x in tokens.items()}
        return arrays | tokens | {"denominator": draw.uniform((), jnp.float32)}, constants

    def of_token(log_prob, *rest):
        entropy, rest = (rest[0], rest[1:]) if with_entropy else (0.0, rest)
        return TOKEN_LOSSES[kind](log_prob, *rest) - 0.1 * entropy

    def ours(dead, old, advantage, denominator, **arrays):
        static = {**options, **limits, **head.options, "entropy": with_entropy}
        loss, tokens = ops.fused_linear_token_loss(
            of_token, per_token=(old, advantage), denominator=denominator, **arrays, **static
        )
        return loss, tokens.losses, tokens.log_probs

    def truth(hidden, weight, labels, dead, old, advantage, denominator, bias=None, where=None):
        log_probs, entropy, _ = found_by_head(head, hidden, weight, labels, dead, bias, **options)
        found = (log_probs, entropy) if with_entropy else (log_probs,)
        losses = jnp.where(dead, 0.0, of_token(*found, *(jnp.where(dead, 0.0, x) for x in (old, advantage))))
        return jnp.sum(losses) / denominator, *jax.lax.stop_gradient((losses, log_probs))

    return Case(
        "fused_linear_token_loss",
        ours,
        truth,
        inputs,
        options_text({"loss": kind, **options, **limits, **head.options, "entropy": with_entropy}),
        has_products=True,
        may_refuse=may_refuse,
        silent={"hidden": "dead"},
    )
