"""Cases of losses that add arithmetic to the ops, and of heads that are split over devices or quantised."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax import losses, ops
from liger_jax.ops.linear._quantized_head import quantized_log_probs
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

    def inputs(draw):
        # Rewards are often the same for a whole group, and their advantages are then 0.
        rewards = draw.rng.choice(draw.pick((0.0, 1.0), (12345.678,), (0.1, 0.3, 0.7)), shape)
        return {}, {"rewards": jnp.asarray(rewards, jnp.float32)}

    def truth(rewards):
        centred = rewards - rewards[..., :1]  # exact where all are equal
        centred -= jnp.mean(centred, axis=-1, keepdims=True)
        if method == "rloo":
            return centred * shape[-1] / (shape[-1] - 1)
        return centred if method == "dr_grpo" else centred / (jnp.std(centred, axis=-1, ddof=1, keepdims=True) + 1e-4)

    return Case("group_advantages", lambda rewards: losses.group_advantages(rewards, method), truth, inputs, method)


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
