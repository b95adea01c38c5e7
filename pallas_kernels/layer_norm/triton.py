"""LayerNorm in Pallas-Triton (NVIDIA, Ampere and newer): the formulas of xla.py.

Memory passes: forward one read and one write. Backward one read of x and dy and one write of dx, with dscale and dbias
summed on the way. On an H200 forward 86 to 94 % of the speed of a copy, backward 72 to 86 %; 77 and 46 % at 18,432
columns (benchmarks/results/row_tiles.md).
"""

import functools

from liger_jax.pallas_kernels.norms import layer_norm as xla
from liger_jax.pallas_kernels.norms import run_triton as triton

unsupported = triton.unsupported
forward = functools.partial(xla.forward, run=triton.run)
backward = functools.partial(xla.backward, run=triton.run)
