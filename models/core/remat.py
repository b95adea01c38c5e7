"""What the layers of every family keep for the backward."""

from typing import Any, Literal

import jax

from liger_jax.ops.attention import ATTENTION_OUTPUT
from liger_jax.ops.gated_mlp import UP_PROJECTION
from liger_jax.ops.loss_plan import budget_beside_layers

Remat = Literal["none", "full", "dots", "offload"]

INPUT = "layer_input"


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory. Norms, gates, rotations and sums do not."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu", "rope"))
    if primitive.name == "name":
        return params["name"] in (ATTENTION_OUTPUT, UP_PROJECTION)
    is_cudnn = primitive.name.startswith("dot_product_attention")
    return is_cudnn or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


# What a layer keeps for the backward. "none" does not keep the gated product, a third of what a LLaMA would keep: the
# pass that makes the gate's gradients makes it too. Nor does it keep a norm's output, which takes one pass.
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


def loss_budget_bytes(
    remat: Remat,
    config: Any,
    tokens: int,
    dtype: Any,
    *,
    is_copied: bool = False,
    is_widened: bool = False,
    **head: Any,
) -> int | None:
    """`budget_beside_layers` for a model: what the fused loss may use beside inputs and gradients; None for no bound.

    `is_copied` says whether a copy of the head, in the computation's dtype, may come on top of a layer's memory, and
    `is_widened` whether the head is a 16-bit table in float32. `head` is its `weight_dtype`, and options of
    `plan_fused_linear_cross_entropy`.
    """
    return budget_beside_layers(
        tokens,
        config.hidden_size,
        config.vocab_size,
        f=config.intermediate_size,
        dtype=dtype,
        layers_are_recomputed=remat != "none",
        head_is_copied=is_copied,
        head_is_widened=is_widened,
        logit_softcap=config.final_logit_softcapping,
        **head,
    )
