"""Cases of distillation, from a teacher's head and from its largest log-probabilities."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import ops
from tests.fuzz.case import Arrays, Case, Draw, options_text
from tests.fuzz.linear import (
    Head,
    Tokens,
    at,
    denominator,
    drawn_limits,
    living,
    log_softmax,
    logit_options,
    poisoned,
    scaled,
    without,
)
from tests.ops.references import distillation


def _with_labels(draw: Draw, options: dict[str, Any], tokens: Tokens) -> Arrays:
    """The constants of a distillation: `dead`, and labels where a part of the loss is of labels."""
    _, constants = tokens.arguments(draw)
    if "hard_weight" not in options:
        constants.pop("labels")
        constants["dead"] = ~constants["where"] if tokens.has_where else jnp.zeros(tokens.shape, bool)
    return constants


def _mixed(soft, student_logits, labels, dead, hard_weight: float = 0.0, reduction: str = "mean", normalizer=None):
    """(1 − hard_weight)·soft + hard_weight·ce, reduced."""
    losses = (1 - hard_weight) * soft
    if hard_weight:
        losses -= hard_weight * at(labels, log_softmax(student_logits), dead)
    losses = jnp.where(dead, 0.0, losses)
    if reduction != "mean":
        return losses if reduction == "none" else jnp.sum(losses)
    if normalizer is not None:
        return jnp.where(jnp.all(dead), 0.0, jnp.sum(losses) / normalizer)
    return jnp.sum(losses) / denominator(jnp.sum(~dead), dead)


def _distillation_options(draw: Draw) -> dict[str, Any]:
    options = draw.optional(hard_weight=(0.3, 1.0), reduction=("mean", "sum", "none"))
    if options.get("reduction", "mean") == "mean":
        options |= draw.optional(denominator=(7, 16384.0))
    return options | draw.optional(temperature=(0.5, 2.0))


def _flat(x):
    return x.reshape(-1, x.shape[-1])


def fused_linear_distillation(draw: Draw) -> Case:
    student = Head.drawn(draw, prefix="student_")
    teacher = Head.drawn(draw, student.tokens, student.v, prefix="teacher_")
    student, teacher = (
        dataclasses.replace(h, bias=None if h.bias == "forbidden" else h.bias) for h in (student, teacher)
    )
    kinds = {"divergence": draw.pick("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")}
    kinds |= draw.optional(beta=(0.1, 0.5))
    options, counting = _distillation_options(draw), Tokens.drawn(draw, student.tokens, student.v)
    if kinds["divergence"] != "jsd":
        kinds.pop("beta", None)
    if kinds["divergence"] == "cosine":
        options.pop("temperature", None)
    of_heads = {f"{head.prefix}{name}": x for head in (student, teacher) for name, x in logit_options(draw).items()}
    limits, may_refuse = drawn_limits(draw)
    static = {**kinds, **options, **of_heads, **limits, **student.options, **teacher.options}

    def inputs(draw):
        constants = _with_labels(draw, options, counting)
        arrays = student.arrays(draw)
        arrays["student_hidden"] = poisoned(draw, arrays["student_hidden"], constants["dead"])
        return arrays, constants | teacher.arrays(draw)

    def truth(student_hidden, student_weight, teacher_hidden, teacher_weight, dead, labels=None, where=None, **biases):
        logits = {}
        for head, hidden, weight in (
            (student, student_hidden, student_weight),
            (teacher, teacher_hidden, teacher_weight),
        ):
            own = {name.removeprefix(head.prefix): x for name, x in of_heads.items() if name.startswith(head.prefix)}
            u = head.logits(living(hidden, dead), weight, biases.get(f"{head.prefix}bias"))
            logits[head.prefix] = scaled(u, **own)
        z, teacher_z = logits["student_"], logits["teacher_"]
        t = options.get("temperature", 1.0)
        compared = _flat(z / t), _flat(teacher_z / t)
        kind = {"kind": kinds["divergence"], "beta": kinds.get("beta", 0.5)}
        soft = distillation.divergence(*compared, **kind, log_softmax=log_softmax)
        rest = {"reduction": options.get("reduction", "mean"), "normalizer": options.get("denominator")}
        return _mixed(soft.reshape(dead.shape), z, labels, dead, options.get("hard_weight", 0.0), **rest)

    return Case(
        "fused_linear_distillation",
        without(functools.partial(ops.fused_linear_distillation, **static), "dead"),
        truth,
        inputs,
        options_text(static),
        has_products=True,
        may_refuse=may_refuse,
        silent={"student_hidden": "dead"},
    )


def topk_divergence(student, token_ids, log_probs, *, tail):
    """The formula's divergence, with a bucket of what is outside and not of 1 less what is stored: that cancels."""
    divergence = distillation.topk_divergence(student, token_ids, log_probs, tail="ignore", log_softmax=log_softmax)
    if tail == "ignore":
        return divergence
    used = log_probs > -jnp.inf
    stored = jnp.zeros(student.shape, bool).at[jnp.arange(len(student))[:, None], token_ids].set(used)
    rest, outside = 1.0 - jnp.sum(jnp.exp(log_probs), axis=1), ~jnp.all(stored, axis=1)
    log_p = jnp.where(stored, -jnp.inf, log_softmax(student)).at[:, 0].max(jnp.where(outside, -jnp.inf, 0.0))
    counts = outside & (rest > 0)
    log_rest = jnp.log(jnp.where(counts, rest, 1.0))
    return divergence + jnp.where(counts, rest * (log_rest - jax.scipy.special.logsumexp(log_p, axis=1)), 0.0)


def fused_linear_topk_distillation(draw: Draw) -> Case:
    head = Head.drawn(draw)
    head = dataclasses.replace(head, bias=None if head.bias == "forbidden" else head.bias)
    entries = draw.pick(1, draw.size(min(head.v, 12)), min(head.v, 12))
    options = _distillation_options(draw) | draw.optional(tail=("ignore", "bucket"))
    counting = Tokens.drawn(draw, head.tokens, head.v)
    of_head = logit_options(draw)
    limits, may_refuse = drawn_limits(draw)
    static = {**options, **of_head, **limits, **head.options}

    def inputs(draw):
        constants = _with_labels(draw, options, counting)
        arrays = head.arrays(draw)
        arrays["hidden"] = poisoned(draw, arrays["hidden"], constants["dead"])
        order = np.argsort(draw.rng.uniform(size=(*head.tokens, head.v)), axis=-1)[..., :entries]
        teacher = jax.nn.log_softmax(draw.normal((*head.tokens, head.v), jnp.float32))
        stored = jnp.take_along_axis(teacher, jnp.asarray(order), axis=-1)
        if draw.chance(0.3):  # places that are not used
            stored = stored.at[..., 0].set(-jnp.inf)
        return arrays, constants | {"token_ids": jnp.asarray(order, jnp.int32), "log_probs": stored}

    def truth(hidden, weight, token_ids, log_probs, dead, labels=None, where=None, bias=None):
        z = scaled(head.logits(living(hidden, dead), weight, bias), **of_head)
        tail, t = options.get("tail", "ignore"), options.get("temperature", 1.0)
        soft = topk_divergence(_flat(z / t), _flat(token_ids), _flat(log_probs), tail=tail)
        rest = {"reduction": options.get("reduction", "mean"), "normalizer": options.get("denominator")}
        return _mixed(soft.reshape(dead.shape), z, labels, dead, options.get("hard_weight", 0.0), **rest)

    return Case(
        "fused_linear_topk_distillation",
        without(functools.partial(ops.fused_linear_topk_distillation, **static), "dead"),
        truth,
        inputs,
        options_text({**static, "K": entries}),
        has_products=True,
        may_refuse=may_refuse,
        silent={"hidden": "dead"},
    )
