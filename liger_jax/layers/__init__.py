"""Thin Flax NNX modules around the ops."""

from liger_jax.layers.mlp import GeGLUMLP as GeGLUMLP
from liger_jax.layers.mlp import SwiGLUMLP as SwiGLUMLP
from liger_jax.layers.norms import DyT as DyT
from liger_jax.layers.norms import GroupNorm as GroupNorm
from liger_jax.layers.norms import LayerNorm as LayerNorm
from liger_jax.layers.norms import PolyNorm as PolyNorm
from liger_jax.layers.norms import RMSNorm as RMSNorm
