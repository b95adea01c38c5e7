"""What importing the package imports."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["liger_jax", "liger_jax.commands"])  # the second imports the models
def test_what_only_some_programs_need_is_imported_there_alone(module):
    program = f"import sys, {module}; print(*sys.modules)"
    imported = {*subprocess.check_output([sys.executable, "-c", program], text=True).split()}
    assert module in imported
    assert not {"jax.experimental.mosaic.gpu", "jax.experimental.pallas.mosaic_gpu"} & imported
    assert not {"tokenizers", "jinja2", "tqdm", "orbax", "tensorboardX", "datasets"} & imported
    assert module == "liger_jax.commands" or not {"liger_jax.commands", "liger_jax.planner"} & imported
