"""Fused kernels for training language models in JAX, on NVIDIA GPUs, TPUs and CPUs."""

from liger_jax.ops import rms_norm as rms_norm
