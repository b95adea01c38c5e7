"""RMSNorm in Pallas Mosaic GPU (Hopper): the formulas of xla.py.

Memory passes: forward one read and one write. Backward one read of x and dy and one write of dx, with dscale summed on
the way, and the next rows arriving in shared memory. On an H200 forward 93 % of the speed of a copy at 18,432 columns
(narrower rows are faster in Triton), backward 90 to 98 from 2,560 on, narrower ones as fast as in Triton
(benchmarks/results/row_tiles.md).
"""

import functools

from liger_jax.pallas_kernels.norms import rms_norm as xla
from liger_jax.pallas_kernels.norms import run_mosaic_gpu as mosaic_gpu

unsupported = mosaic_gpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_gpu.run)
backward = functools.partial(xla.backward, run=mosaic_gpu.run)
