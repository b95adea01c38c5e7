"""Differentiable ops: each a public function whose kernel is chosen by platform.

They take arrays of JAX and NumPy and Flax's variables, and each result has the dtype that its function names. All raise
a `TypeError` where a dtype or the type of an option is wrong, and a `ValueError` where shapes or dtypes do not fit each
other, a number is out of its range, or a name is unknown. The message names argument, value, rule and cure. What else a
function raises is in its own "Raises".

`implementation` is None for the platform's default, or a name that the function lists. ":interpret" after the name of
a Pallas kernel runs it in the Pallas interpreter, on any platform. Of a tuple of names, the first one that can run is
taken, with a warning for each before it. A name alone that cannot run here is a `ValueError` that says why.

On meshes, ops know how one call is sharded: by specs (`layout`), with a shard on each device (`_explicit`, `meshes`),
and on which meshes a kernel can run (`place`).
"""

from liger_jax.ops.attention import Segments as Segments
from liger_jax.ops.attention import causal_attention as causal_attention
from liger_jax.ops.block_quantized import BlockQuantized as BlockQuantized
from liger_jax.ops.block_quantized import block_quantized as block_quantized
from liger_jax.ops.causal_conv1d import causal_conv1d as causal_conv1d
from liger_jax.ops.cross_entropy import cross_entropy as cross_entropy
from liger_jax.ops.dyt import dyt as dyt
from liger_jax.ops.experts.grouped_matmul import grouped_matmul as grouped_matmul
from liger_jax.ops.experts.moe_mlp import moe_mlp as moe_mlp
from liger_jax.ops.experts.router import RouterSums as RouterSums
from liger_jax.ops.experts.router import Routing as Routing
from liger_jax.ops.experts.router import balancing_loss as balancing_loss
from liger_jax.ops.experts.router import expert_load as expert_load
from liger_jax.ops.experts.router import router_sums as router_sums
from liger_jax.ops.experts.router import router_z_loss as router_z_loss
from liger_jax.ops.experts.router import softmax_top_k as softmax_top_k
from liger_jax.ops.experts.router import top_k_softmax as top_k_softmax
from liger_jax.ops.fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from liger_jax.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
from liger_jax.ops.gated_mlp import gated_mlp as gated_mlp
from liger_jax.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_jax.ops.glu import geglu as geglu
from liger_jax.ops.glu import swiglu as swiglu
from liger_jax.ops.group_norm import group_norm as group_norm
from liger_jax.ops.layer_norm import layer_norm as layer_norm
from liger_jax.ops.linear._plan_ahead import plan_fused_linear_cross_entropy as plan_fused_linear_cross_entropy
from liger_jax.ops.linear.fused_linear_cross_entropy import fused_linear_cross_entropy as fused_linear_cross_entropy
from liger_jax.ops.linear.fused_linear_distillation import fused_linear_distillation as fused_linear_distillation
from liger_jax.ops.linear.fused_linear_log_probs import TokenLogProbs as TokenLogProbs
from liger_jax.ops.linear.fused_linear_log_probs import fused_linear_log_probs as fused_linear_log_probs
from liger_jax.ops.linear.fused_linear_token_loss import TokenLosses as TokenLosses
from liger_jax.ops.linear.fused_linear_token_loss import fused_linear_token_loss as fused_linear_token_loss
from liger_jax.ops.linear.fused_linear_topk_distillation import (
    fused_linear_topk_distillation as fused_linear_topk_distillation,
)
from liger_jax.ops.loss_terms import LossMetrics as LossMetrics
from liger_jax.ops.poly_norm import poly_norm as poly_norm
from liger_jax.ops.relu_squared import relu_squared as relu_squared
from liger_jax.ops.rms_norm import rms_norm as rms_norm
from liger_jax.ops.rope import apply_mrope as apply_mrope
from liger_jax.ops.rope import apply_rope as apply_rope
from liger_jax.ops.rope_table import DynamicRope as DynamicRope
from liger_jax.ops.rope_table import LinearRope as LinearRope
from liger_jax.ops.rope_table import Llama3Rope as Llama3Rope
from liger_jax.ops.rope_table import LongRope as LongRope
from liger_jax.ops.rope_table import ProportionalRope as ProportionalRope
from liger_jax.ops.rope_table import RopeScaling as RopeScaling
from liger_jax.ops.rope_table import YarnRope as YarnRope
from liger_jax.ops.rope_table import rope_table as rope_table
from liger_jax.ops.softmax import softmax as softmax
from liger_jax.ops.softmax import sparsemax as sparsemax
