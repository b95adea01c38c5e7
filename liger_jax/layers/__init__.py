"""Thin Flax NNX modules around the ops."""

from liger_jax.layers.mlp import GeGLUMLP as GeGLUMLP
from liger_jax.layers.mlp import SwiGLUMLP as SwiGLUMLP
