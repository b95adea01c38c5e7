"""Dynamic tanh in Pallas-Triton (NVIDIA, Ampere and newer): the formulas of xla.py.

Memory passes: backward one read of x and dy and one write of dx, with all sums made on the way. Forward one read and
one write, which XLA may fuse into its neighbours and a kernel cannot. Not measured on a GPU: no speed is claimed.
"""

import functools

from liger_jax.pallas_kernels.norms import dyt as xla
from liger_jax.pallas_kernels.norms import run_triton as triton

unsupported = triton.unsupported
forward = functools.partial(xla.forward, run=triton.run)
backward = functools.partial(xla.backward, run=triton.run)
