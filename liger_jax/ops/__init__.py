"""Differentiable ops: each a public function with a `custom_vjp` and a kernel chosen by platform."""

from liger_jax.ops.rms_norm import rms_norm as rms_norm
