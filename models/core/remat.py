"""Rematerialisation: what a layer keeps for the backward."""

from typing import Any, Literal

import jax

from liger_jax.ops.attention import ATTENTION_OUTPUT
from liger_jax.ops.gated_mlp import UP_PROJECTION
from liger_jax.ops.moe_mlp import EXPERT_GATE_UP

Remat = Literal["none", "full", "dots", "offload"]

INPUT = "layer_input"
# The sum of a projection and its adapter. Where it is kept, neither of its terms is, which would be twice the memory.
ADAPTED = "adapted_projection"


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory; norms, gates, rotations and sums cost one."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu", "rope"))
    if primitive.name == "reduce_scatter":  # a sublayer's result, summed over devices: theirs is not kept, then
        return True
    if primitive.name == "name":
        return params["name"] in (ADAPTED, ATTENTION_OUTPUT, EXPERT_GATE_UP, UP_PROJECTION)
    is_cudnn = primitive.name.startswith("dot_product_attention")
    return is_cudnn or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


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
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
