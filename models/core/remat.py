"""Rematerialisation: what a layer keeps for the backward."""

from typing import Any, Literal

import jax
from jax import lax

from liger_jax.ops.adapted_linear import ADAPTED
from liger_jax.ops.attention import ATTENTION_OUTPUT
from liger_jax.ops.experts.moe_mlp import EXPERT_GATE_UP
from liger_jax.ops.gated_mlp import UP_PROJECTION
from liger_jax.pallas_kernels.gated_delta_rule.config import GATED_DELTA_RULE_STATES

Mode = Literal["none", "full", "dots", "offload", "offload_attention"]  # of one layer
# What the layers of a model keep: all the same; or, as a number, the products of so many last layers ("dots"), while
# those before them keep their inputs ("full").
Remat = Mode | int

INPUT = "layer_input"
# Queries, keys and values as attention takes them.
ATTENTION_INPUT = "attention_input"
# What the gated delta rule returns for tokens, before its norm.
LINEAR_ATTENTION_OUTPUT = "linear_attention_output"

_KEPT = (
    ADAPTED, ATTENTION_INPUT, ATTENTION_OUTPUT, EXPERT_GATE_UP, GATED_DELTA_RULE_STATES, LINEAR_ATTENTION_OUTPUT,
    UP_PROJECTION,
)  # fmt: skip


def mode_of_first(remat: Remat) -> Mode:
    """What the first layers keep, where the last ones may keep more."""
    return "full" if isinstance(remat, int) else remat


def check(remat: Any, num_layers: int) -> None:
    """Refuses what is neither a mode nor a number of layers."""
    is_number = isinstance(remat, int) and not isinstance(remat, bool)
    if not (0 <= remat <= num_layers if is_number else remat in POLICIES):
        raise ValueError(
            f"remat={remat!r} must be one of {list(POLICIES)}, or how many of the last layers keep their products, "
            f"from 0 to {num_layers}."
        )


def keeps_products(remat: Remat) -> bool:
    """Whether a layer keeps results of its matrix products for the backward."""
    return mode_of_first(remat) in ("none", "dots")


def is_offloaded(remat: Remat) -> bool:
    """Whether the arrays that a layer keeps for the backward are stored in the host's memory."""
    return remat in ("offload", "offload_attention")


def _is_cudnn(primitive: Any) -> bool:
    """Whether this is cuDNN's attention, to whose results we can give no name."""
    return primitive.name.startswith("dot_product_attention")


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory; norms, gates, rotations and sums cost one."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu", "rope"))
    if primitive.name == "reduce_scatter":  # a sublayer's result, summed over devices: theirs is not kept, then
        return True
    if primitive.name == "name":
        return params["name"] in _KEPT
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)
    return _is_cudnn(primitive) or is_product


def _to_host(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst="pinned_host"
    )


_INPUT_AND_ATTENTION = _to_host(INPUT, ATTENTION_OUTPUT)
# JAX has no public name for a policy's answer that an array is offloaded. This policy gives that answer for products.
_OF_PRODUCTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
_TO_HOST = _OF_PRODUCTS(lax.dot_general_p, dimension_numbers=(((0,), (0,)), ((), ())))


def _input_and_attention(primitive: Any, *shapes: Any, **params: Any) -> Any:
    """A layer's input, and attention's result with its sums, go to the host."""
    return _TO_HOST if _is_cudnn(primitive) else _INPUT_AND_ATTENTION(primitive, *shapes, **params)


# What a layer keeps for the backward. "none" does not keep a norm's output, which takes one pass to compute again. It
# does not keep the gated product either, which would be a third of what a LLaMA keeps: the pass that computes the
# gate's gradients computes it too.
POLICIES = {
    "none": _more_than_one_pass,
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        lambda primitive, *shapes, **params: (
            primitive.name == "reduce_scatter"
            or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)
        ),
        jax.checkpoint_policies.save_only_these_names(ADAPTED, EXPERT_GATE_UP),
    ),
    "offload": _to_host(INPUT),
    "offload_attention": _input_and_attention,
}
