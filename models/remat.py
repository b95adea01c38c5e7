"""What the layers of every family keep for the backward."""

from typing import Any, Literal

import jax

from liger_jax.ops.gated_mlp import KEPT

Remat = Literal["none", "full", "dots", "offload"]

INPUT, ATTENDED = "layer_input", "attended"


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory: all do but norms, gates, rotations and sums."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu", "rope"))
    if primitive.name == "name":
        return params["name"] in (ATTENDED, KEPT)
    is_cudnn = primitive.name.startswith("dot_product_attention")
    return is_cudnn or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


# What a layer keeps for the backward. With "none" the gated product, which is a third of what a LLaMA would keep, is
# made again in the very pass that makes the gate's gradients, and a norm's output in one pass.
POLICIES = {
    "none": _more_than_one_pass,
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
