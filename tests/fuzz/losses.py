"""Cases of losses that add arithmetic to the ops, and of heads that are split over devices or quantised."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from liger_jax import losses, ops
from liger_jax.ops.linear.quantized_head import quantized_log_probs
from tests.fuzz.case import Case, Draw, options_text
from tests.fuzz.linear import (
    Head,
    Tokens,
    at,
    found_by_head,
    living,
    log_normalizer,
    log_softmax,
    poisoned,
    scaled,
    token_options,
)  # fmt: skip


def softmax_cross_entropy_with_integer_labels(draw: Draw) -> Case:
    shape, v, dtype = draw.leading(), draw.size(90, 9000), draw.dtype()
    axis, has_where = draw.pick(-1, -1, 0), draw.chance(0.4)
    whole = (*shape, v) if axis == -1 else (v, *shape)

    def inputs(draw):
        constants = {"labels": draw.integers(v, shape)}
        if has_where:
            constants["where"] = jnp.asarray(draw.rng.uniform(size=shape) < 0.7)
        return {"logits": draw.normal(whole, dtype, draw.magnitude())}, constants

    def truth(logits, labels, where=None):
        where = jnp.ones(shape, bool) if where is None else where
        return jnp.where(where, -at(labels, log_softmax(jnp.moveaxis(logits, axis, -1)), ~where), 0.0)

    ours = lambda logits, labels, where=None: losses.softmax_cross_entropy_with_integer_labels(
        logits, labels, axis, where
    )
    return Case("softmax_cross_entropy_with_integer_labels", ours, truth, inputs, f"axis={axis}")


def group_advantages(draw: Draw) -> Case:
    shape, method = (draw.size(9), draw.size(16, least=2)), draw.pick("grpo", "dr_grpo", "rloo")
    size = draw.pick(1.0, 1.0, 1e18, 1e30)

    def inputs(draw):
        # Rewards are often the same for a whole group, and their advantages are then 0.
        rewards = draw.rng.choice(draw.pick((0.0, 1.0), (12345.678,), (0.1, 0.3, 0.7)), shape)
        return {}, {"rewards": jnp.asarray(size * rewards, jnp.float32)}

    def truth(rewards):
        centred = rewards - rewards[..., :1]  # exact where all are equal
        centred -= jnp.mean(centred, axis=-1, keepdims=True)
        if method == "rloo":
            return centred * shape[-1] / (shape[-1] - 1)
        return centred if method == "dr_grpo" else centred / (jnp.std(centred, axis=-1, ddof=1, keepdims=True) + 1e-4)

    return Case("group_advantages", lambda rewards: losses.group_advantages(rewards, method), truth, inputs, method)


def policy_loss(draw: Draw) -> Case:
    """With tokens that policy and reference call impossible, and ratios away from where they are clipped."""
    shape, unbiased = (draw.size(5), draw.size(40)), draw.chance(0.5)

    def inputs(draw):
        log_probs, reference = (-draw.rng.gamma(1.0, 2.0, shape) for _ in range(2))
        old = log_probs - draw.rng.choice([-1.0, -0.05, 0.05, 1.0], shape)
        impossible = draw.rng.uniform(size=shape) < 0.1
        log_probs, reference = (np.where(impossible, -np.inf, x) for x in (log_probs, reference))
        mask = (draw.rng.uniform(size=shape) < 0.8) | (np.arange(shape[1]) == 0)
        tokens = dict(old=old, reference=reference, advantages=draw.rng.standard_normal(shape[0]))
        constants = {name: jnp.asarray(x, jnp.float32) for name, x in tokens.items()}
        return {"log_probs": jnp.asarray(log_probs, jnp.float32)}, constants | {"mask": jnp.asarray(mask)}

    def ours(log_probs, old, reference, advantages, mask):
        others = dict(mask=mask, reference_log_probs=reference, beta=0.3, unbiased_kl=unbiased)
        return losses.policy_loss(log_probs, old, advantages, **others).loss

    def truth(log_probs, old, reference, advantages, mask):
        ratio, advantages = jnp.exp(log_probs - old), advantages[:, None]
        d = jnp.where(log_probs == -jnp.inf, 0.0, reference - log_probs)
        penalty = (jnp.exp(d) - d - 1.0) * (ratio if unbiased else 1.0)
        of_tokens = 0.3 * penalty - jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return jnp.sum(jnp.where(mask, of_tokens, 0.0)) / jnp.sum(mask)

    return Case("policy_loss", ours, truth, inputs, f"unbiased_kl={unbiased}")


def split_log_probs(draw: Draw) -> Case:
    """The vocabulary split over all devices, so that a bias may forbid the whole of a device's part."""
    devices = jax.device_count()
    head = dataclasses.replace(Head.drawn(draw, v=devices * draw.size(20, 300)), layout="vd", bias="forbidden")
    options, tokens = token_options(draw, head), Tokens.drawn(draw, head.tokens, head.v)
    mesh = jax.make_mesh((devices,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))

    def inputs(draw):
        _, constants = tokens.arguments(draw)
        arrays = head.arrays(draw, constants["labels"])
        return arrays | {"hidden": poisoned(draw, arrays["hidden"], constants["dead"])}, constants

    def ours(dead, **arrays):
        def local(arrays):
            found = ops.fused_linear_log_probs(**arrays, **options, entropy=True, vocab_axis="vocab")
            return found.log_probs, found.entropy, found.log_normalizer

        specs = {name: P("vocab") if name in ("weight", "bias") else P() for name in arrays}
        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P())(arrays)

    def truth(hidden, weight, bias, labels, dead, where=None):
        return found_by_head(head, hidden, weight, labels, dead, bias, **options)

    says = options_text({"devices": devices, **options})
    silent = {"hidden": "dead"}
    return Case("split_log_probs", ours, truth, inputs, says, has_products=True, silent=silent)


def quantized_head(draw: Draw) -> Case:
    """The head of a quantised model."""
    kind, block = draw.pick("nf4", "int8"), 2 * draw.size(8)
    head = dataclasses.replace(Head.drawn(draw), d=block * draw.size(4), layout="vd", bias=None)
    options, tokens = token_options(draw, head), Tokens(head.tokens, head.v, has_where=False, has_weights=False)

    def inputs(draw):
        _, constants = tokens.arguments(draw)
        arrays = head.arrays(draw)
        quantized = ops.block_quantized(arrays["weight"], kind, block_size=block, axis=-1)
        constants |= {"head": quantized, "dense": quantized.astype(head.dtype)}
        return {"hidden": poisoned(draw, arrays["hidden"], constants["dead"])}, constants

    def ours(hidden, head, dense, labels, dead):
        found = quantized_log_probs(hidden, head, labels, ignore_index=-100, entropy=True, **options)
        return found.log_probs, found.entropy

    def truth(hidden, dense, labels, dead, **_):
        # Hopper's kernels make the label's logit apart from the sum's: each is rounded by itself.
        z, again = (scaled(head.logits(living(hidden, dead), dense, None), **options) for _ in range(2))
        log_p, lse = log_softmax(z), log_normalizer(z)[..., 0]
        found = at(labels, again, dead) - lse, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return tuple(jnp.where(dead, 0.0, x) for x in found)

    says = options_text({"kind": kind, "block_size": block, **options})
    silent = {"hidden": "dead"}
    return Case("quantized_head", ours, truth, inputs, says, has_products=True, silent=silent)
