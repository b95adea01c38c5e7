"""A residual's addition and the RMSNorm of the sum in Pallas for TPU: the formulas of xla.py.

Memory passes: forward two reads and two writes, for the sum is normalised while it is there. Backward one read of the
sum and of both cotangents and one write of their common gradient, with dscale summed on the way. Not measured on a TPU:
no speed is claimed.
"""

import functools

from liger_jax.pallas_kernels.norms import fused_add_rms_norm as xla
from liger_jax.pallas_kernels.norms import run_mosaic_tpu as mosaic_tpu

unsupported = mosaic_tpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_tpu.run)
backward = functools.partial(xla.backward, run=mosaic_tpu.run)
