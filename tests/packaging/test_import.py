"""What importing the package imports."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["liger_jax", "liger_jax.models"])
def test_mosaic_gpu_is_imported_only_where_its_kernels_run(module):
    program = f"import sys, {module}; print(*sys.modules)"
    imported = {*subprocess.check_output([sys.executable, "-c", program], text=True).split()}
    assert module in imported
    assert not {"jax.experimental.mosaic.gpu", "jax.experimental.pallas.mosaic_gpu"} & imported
