"""Fused kernels for training language models in JAX, on NVIDIA GPUs, TPUs and CPUs."""

from liger_jax import losses as losses
from liger_jax.ops import DynamicRope as DynamicRope
from liger_jax.ops import LinearRope as LinearRope
from liger_jax.ops import Llama3Rope as Llama3Rope
from liger_jax.ops import LossMetrics as LossMetrics
from liger_jax.ops import RopeScaling as RopeScaling
from liger_jax.ops import YarnRope as YarnRope
from liger_jax.ops import apply_mrope as apply_mrope
from liger_jax.ops import apply_rope as apply_rope
from liger_jax.ops import causal_attention as causal_attention
from liger_jax.ops import cross_entropy as cross_entropy
from liger_jax.ops import dyt as dyt
from liger_jax.ops import fused_add_rms_norm as fused_add_rms_norm
from liger_jax.ops import fused_linear_cross_entropy as fused_linear_cross_entropy
from liger_jax.ops import gated_mlp as gated_mlp
from liger_jax.ops import geglu as geglu
from liger_jax.ops import group_norm as group_norm
from liger_jax.ops import layer_norm as layer_norm
from liger_jax.ops import plan_fused_linear_cross_entropy as plan_fused_linear_cross_entropy
from liger_jax.ops import poly_norm as poly_norm
from liger_jax.ops import relu_squared as relu_squared
from liger_jax.ops import rms_norm as rms_norm
from liger_jax.ops import rope_table as rope_table
from liger_jax.ops import softmax as softmax
from liger_jax.ops import sparsemax as sparsemax
from liger_jax.ops import swiglu as swiglu
