"""RMSNorm in Pallas Mosaic GPU (Hopper): the formulas of xla.py.

Memory passes: forward one read and one write. Backward one read of x and dy and one write of dx, with dscale summed on
the way. For wide rows, of which registers hold one at a time: the next ones arrive in shared memory. Not measured yet:
no speed is claimed.
"""

import functools

from liger_jax.pallas_kernels._rows import mosaic_gpu
from liger_jax.pallas_kernels.rms_norm import xla

unsupported = mosaic_gpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_gpu.run)
backward = functools.partial(xla.backward, run=mosaic_gpu.run)
