"""LayerNorm in Pallas Mosaic GPU (Hopper): the formulas of xla.py.

Memory passes: forward one read and one write. Backward one read of x and dy and one write of dx, with dscale and dbias
summed on the way. For wide rows, of which registers hold one at a time: the next ones arrive in shared memory. On an
H200 forward 90 % of the speed of a copy at 18,432 columns, backward 85 to 96 from 5,120 on; narrower rows are faster in
Triton (benchmarks/results/row_tiles.md).
"""

import functools

from liger_jax.pallas_kernels._rows import mosaic_gpu
from liger_jax.pallas_kernels.layer_norm import xla

unsupported = mosaic_gpu.unsupported
forward = functools.partial(xla.forward, run=mosaic_gpu.run)
backward = functools.partial(xla.backward, run=mosaic_gpu.run)
