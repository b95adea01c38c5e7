"""Rematerialisation: what a layer keeps for the backward."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from liger_jax.ops import plan_fused_linear_cross_entropy
from liger_jax.ops._linear_plan import SHARE_OF_MEMORY
from liger_jax.ops.attention import ATTENDED
from liger_jax.ops.gated_mlp import KEPT

Remat = Literal["none", "full", "dots", "offload"]

INPUT = "layer_input"


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory; norms, gates, rotations and sums cost one."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu", "rope"))
    if primitive.name == "name":
        return params["name"] in (ATTENDED, KEPT)
    is_cudnn = primitive.name.startswith("dot_product_attention")
    return is_cudnn or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


# What a layer keeps for the backward. "none" does not keep a norm's output, which takes one pass to compute again. It
# does not keep the gated product either, which would be a third of what a LLaMA keeps: the pass that computes the
# gate's gradients computes it too.
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
    weight_dtype: Any,
    is_copied: bool = False,
    is_widened: bool = False,
    **options: Any,
) -> int | None:
    """The memory that the fused loss may use without being the step's peak, or without raising it far.

    Where layers are computed again, that is the memory of one layer: its norms, gate, up, product and sums. The loss
    gets more if it cannot do with that. On one device a copy of the head in another dtype comes on top: it lies where
    the layers' gradients will be. On 8 H200, where these are small, the copy would cost LLaMA-3-8B, 16 × 4,096, 1.7
    GiB.

    Where layers keep all, the loss has no bound, with one exception: a tied bfloat16 head, whose gradient is float32,
    beside one chunk of all tokens. Chunks of 2,048 tokens or more are taken instead. On an H200 that saves Qwen2-0.5B,
    8 × 512, 0.55 GiB for 2 % of its time, and 8 × 1,024 1.65 GiB for 1.3 %.

    Args:
        remat: what layers keep.
        config: the model's architecture.
        tokens: B·T on one device.
        dtype: dtype of the computation.
        weight_dtype: dtype of the head that the loss gets.
        is_copied: whether a copy of the head, in the computation's dtype, may come on top.
        is_widened: whether the head is a 16-bit table in float32, which has a float32 gradient.
        **options: options of `plan_fused_linear_cross_entropy`.

    Returns:
        Bytes, or `None` for no bound.

    Raises:
        ValueError: `plan_fused_linear_cross_entropy` refuses the options.
    """
    if remat == "none" and not is_widened:
        return None
    itemsize = jnp.dtype(dtype).itemsize
    plan = functools.partial(
        plan_fused_linear_cross_entropy,
        max(1, tokens),
        config.hidden_size,
        config.vocab_size,
        dtype=dtype,
        weight_dtype=weight_dtype,
        logit_softcap=config.final_logit_softcapping,
        **options,
    )
    if remat == "none":
        freely = plan()
        chunked = plan(device_memory_bytes=SHARE_OF_MEMORY * (freely.extra_bytes - 1))
        helps = freely.chunk_size >= tokens and chunked.mode == "fast" and chunked.chunk_size >= 2048
        return chunked.extra_bytes if helps else None
    of_a_layer = tokens * (5 * config.hidden_size + 3 * config.intermediate_size) * itemsize
    allowed = of_a_layer + is_copied * config.vocab_size * config.hidden_size * itemsize
    return max(allowed, plan(device_memory_bytes=SHARE_OF_MEMORY * allowed).extra_bytes)
