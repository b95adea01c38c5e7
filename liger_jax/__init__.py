"""Fused kernels for training language models in JAX, on NVIDIA GPUs, TPUs and CPUs."""

from liger_jax import _interrupt  # noqa: F401, I001  # first: it says what Ctrl-C does during the other imports
from liger_jax import _packages  # noqa: F401  # then: it says which versions do not work together
from liger_jax import _simulated  # noqa: F401, I001  # then: XLA reads it when it starts
from liger_jax import losses as losses
from liger_jax.ops import BlockQuantized as BlockQuantized
from liger_jax.ops import DynamicRope as DynamicRope
from liger_jax.ops import LinearRope as LinearRope
from liger_jax.ops import Llama3Rope as Llama3Rope
from liger_jax.ops import LongRope as LongRope
from liger_jax.ops import LossMetrics as LossMetrics
from liger_jax.ops import ProportionalRope as ProportionalRope
from liger_jax.ops import RopeScaling as RopeScaling
from liger_jax.ops import RouterSums as RouterSums
from liger_jax.ops import Routing as Routing
from liger_jax.ops import Segments as Segments
from liger_jax.ops import TokenLogProbs as TokenLogProbs
from liger_jax.ops import TokenLosses as TokenLosses
from liger_jax.ops import YarnRope as YarnRope
from liger_jax.ops import apply_mrope as apply_mrope
from liger_jax.ops import apply_rope as apply_rope
from liger_jax.ops import balancing_loss as balancing_loss
from liger_jax.ops import block_quantized as block_quantized
from liger_jax.ops import causal_attention as causal_attention
from liger_jax.ops import causal_conv1d as causal_conv1d
from liger_jax.ops import cross_entropy as cross_entropy
from liger_jax.ops import dyt as dyt
from liger_jax.ops import expert_load as expert_load
from liger_jax.ops import fused_add_rms_norm as fused_add_rms_norm
from liger_jax.ops import fused_linear_cross_entropy as fused_linear_cross_entropy
from liger_jax.ops import fused_linear_distillation as fused_linear_distillation
from liger_jax.ops import fused_linear_log_probs as fused_linear_log_probs
from liger_jax.ops import fused_linear_token_loss as fused_linear_token_loss
from liger_jax.ops import fused_linear_topk_distillation as fused_linear_topk_distillation
from liger_jax.ops import gated_delta_rule as gated_delta_rule
from liger_jax.ops import gated_mlp as gated_mlp
from liger_jax.ops import gated_rms_norm as gated_rms_norm
from liger_jax.ops import geglu as geglu
from liger_jax.ops import group_norm as group_norm
from liger_jax.ops import grouped_matmul as grouped_matmul
from liger_jax.ops import layer_norm as layer_norm
from liger_jax.ops import moe_mlp as moe_mlp
from liger_jax.ops import plan_fused_linear_cross_entropy as plan_fused_linear_cross_entropy
from liger_jax.ops import poly_norm as poly_norm
from liger_jax.ops import relu_squared as relu_squared
from liger_jax.ops import rms_norm as rms_norm
from liger_jax.ops import rope_table as rope_table
from liger_jax.ops import router_sums as router_sums
from liger_jax.ops import router_z_loss as router_z_loss
from liger_jax.ops import softmax as softmax
from liger_jax.ops import softmax_top_k as softmax_top_k
from liger_jax.ops import sparsemax as sparsemax
from liger_jax.ops import swiglu as swiglu
from liger_jax.ops import top_k_softmax as top_k_softmax
