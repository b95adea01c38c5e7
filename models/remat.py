"""What the layers of every family keep for the backward."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from liger_jax.ops import plan_fused_linear_cross_entropy
from liger_jax.ops._linear_plan import SHARE_OF_MEMORY
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


def loss_budget_bytes(
    remat: Remat, config: Any, tokens: int, dtype: Any, *, weight_dtype: Any, is_copied: bool = False, **options: Any
) -> int | None:
    """What the fused loss may use, beside layers that are made again, without being the step's peak itself.

    That is what one of them uses: its norms, gate, up, their product and its sums; or what the loss needs, if more. On
    one device the copy of a head in another dtype comes on top: it has room where layers' gradients will be. On 8 H200,
    whose shares of these are small, it would cost LLaMA-3-8B, 16 × 4,096, 1.7 GiB.

    Args:
        remat: what layers keep.
        config: of the model.
        tokens: B·T of one device.
        dtype: of the computation.
        weight_dtype: of the head.
        is_copied: whether a copy of the head, in the computation's dtype, may come on top.
        **options: of `plan_fused_linear_cross_entropy`.

    Returns:
        Bytes, or `None` where layers are not made again.

    Raises:
        ValueError: as `plan_fused_linear_cross_entropy` does.
    """
    if remat == "none":
        return None
    itemsize = jnp.dtype(dtype).itemsize
    of_a_layer = tokens * (5 * config.hidden_size + 3 * config.intermediate_size) * itemsize
    allowed = of_a_layer + is_copied * config.vocab_size * config.hidden_size * itemsize
    plan = plan_fused_linear_cross_entropy(
        max(1, tokens),
        config.hidden_size,
        config.vocab_size,
        dtype=dtype,
        weight_dtype=weight_dtype,
        logit_softcap=config.final_logit_softcapping,
        device_memory_bytes=SHARE_OF_MEMORY * allowed,
        **options,
    )
    return max(allowed, plan.extra_bytes)
