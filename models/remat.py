"""What the layers of every family keep for the backward."""

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
    """What the fused loss may use, so as not to be the step's peak itself, or not to raise it far.

    Beside layers that are made again, that is what one of them uses: its norms, gate, up, product and sums; or what the
    loss needs, if more. On one device the copy of a head in another dtype comes on top: it has room where
    layers' gradients will be. On 8 H200, where their shares are small, it would cost LLaMA-3-8B, 16 × 4,096, 1.7 GiB.
    Beside layers that keep all it may use anything, but for one chunk of all tokens beside a float32 gradient of a
    widened head: chunks of 2,048 tokens or more take its place. So Qwen2-0.5B, 8 × 512, takes 0.55 GiB less on an H200
    and 2 % longer; 8 × 1,024 1.65 GiB less and 1.3 % longer.

    Args:
        remat: what layers keep.
        config: of the model.
        tokens: B·T of one device.
        dtype: of the computation.
        weight_dtype: of the head, as the loss gets it.
        is_copied: whether a copy of the head, in the computation's dtype, may come on top.
        is_widened: whether the head is a 16-bit one's in float32, so that its gradient is.
        **options: of `plan_fused_linear_cross_entropy`.

    Returns:
        Bytes, or `None` for no bound.

    Raises:
        ValueError: as `plan_fused_linear_cross_entropy` does.
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
