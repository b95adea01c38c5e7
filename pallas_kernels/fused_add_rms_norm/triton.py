"""A residual's addition and the RMSNorm of the sum in Pallas-Triton (NVIDIA, Ampere and newer): the formulas of xla.py.

Memory passes: forward two reads and two writes, for the sum is normalised while it is there. Backward one read of the
sum and of both cotangents and one write of their common gradient, with dscale summed on the way. On an H200 forward
92 to 98 % of the speed of a copy, backward 81 to 86 %; 84 and 70 % at 18,432 columns (benchmarks/results/row_tiles.md).
"""

import functools

from liger_jax.pallas_kernels.norms import fused_add_rms_norm as xla
from liger_jax.pallas_kernels.norms import run_triton as triton

unsupported = triton.unsupported
forward = functools.partial(xla.forward, run=triton.run)
backward = functools.partial(xla.backward, run=triton.run)
