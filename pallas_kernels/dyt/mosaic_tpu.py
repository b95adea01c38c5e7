"""Dynamic tanh in Pallas for TPU: the formulas of xla.py.

Memory passes: backward one read of x and dy and one write of dx, with all sums made on the way. Forward one read and
one write, which XLA may fuse into its neighbours and a kernel cannot. Not measured on a TPU: no speed is claimed.
"""

import functools

from liger_jax.pallas_kernels.norms import dyt as xla
from liger_jax.pallas_kernels.norms import run_mosaic_tpu as mosaic_tpu

unsupported = mosaic_tpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_tpu.run)
backward = functools.partial(xla.backward, run=mosaic_tpu.run)
