"""Steps for several GPUs are compiled with options of their own, which the installed XLA knows."""

import types

import jax
import numpy as np
import pytest

from liger_jax.training import compiler_options
from liger_jax.training.compiling import GPU_OPTIONS


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("platform, count, has_options", [("gpu", 2, True), ("gpu", 1, False), ("tpu", 4, False)])
def test_several_gpus_have_options_and_others_have_none(platform, count, has_options):
    devices = np.array([types.SimpleNamespace(platform=platform)] * count)
    mesh = types.SimpleNamespace(devices=devices, size=count)
    assert compiler_options(mesh) == (GPU_OPTIONS if has_options else None)
    assert compiler_options(None) is None


def test_xla_knows_the_options():
    assert jax.jit(lambda x: x + 1, compiler_options=dict(GPU_OPTIONS))(1.0) == 2
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options=dict(xla_gpu_no_such_option=1))(1.0)
