"""RMSNorm in Pallas for TPU: the formulas of xla.py.

Memory passes: forward one read and one write. Backward one read of x and dy and one write of dx, with dscale summed in
VMEM, where XLA may read x and dy a second time for it. Not measured on a TPU: no speed is claimed.
"""

import functools

from liger_jax.pallas_kernels.norms import rms_norm as xla
from liger_jax.pallas_kernels.norms import run_mosaic_tpu as mosaic_tpu

unsupported = mosaic_tpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_tpu.run)
backward = functools.partial(xla.backward, run=mosaic_tpu.run)
