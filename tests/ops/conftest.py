"""Op tests run under strict type promotion: an op must not lean on JAX's implicit casts."""

import itertools
import re

import jax
import pytest

from liger_jax.ops._device import described, is_hopper
from tests.ops import _oracle


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def hopper(platform):
    """The implementation for Hopper that runs here."""
    if platform == "cpu" and jax.__version_info__ >= (0, 12):
        return "mosaic_gpu:interpret"
    if platform == "gpu" and is_hopper(described(jax.devices()[0])):
        return "mosaic_gpu"
    pytest.skip("needs a Hopper GPU, or a CPU and JAX 0.12, whose interpreter runs these kernels")


@pytest.fixture
def hardware(hopper):
    if hopper != "mosaic_gpu":
        pytest.skip("too much for an interpreter")


def pytest_generate_tests(metafunc):
    """What a class of tests in _norms.py says about its op."""
    promises = metafunc.cls
    if not hasattr(promises, "num_optional"):
        return
    presences = range(promises.num_optional, -1, -1)
    if {"shape", "num_present"} <= {*metafunc.fixturenames}:
        # By default one shape with all parameters, and another with one of them absent.
        default = list(zip(promises.shapes, presences, strict=False))[:2]
        others = [case for case in itertools.product(promises.shapes, presences) if case not in default]
        cases = [*default, *(pytest.param(*case, marks=pytest.mark.full) for case in others)]
        metafunc.parametrize("shape, num_present", cases, ids=str)
    elif "num_present" in metafunc.fixturenames:
        metafunc.parametrize("num_present", _oracle.first(2, presences))
    if "parameters_shared" in metafunc.fixturenames:
        metafunc.parametrize("parameters_shared", [True, False], ids=["parameters shared", "all mapped"])


def pytest_collection_modifyitems(items):
    for item in items:
        if _is_shown_by_others(item):
            item.add_marker(pytest.mark.full)


def _is_shown_by_others(item) -> bool:
    """Whether another op's test already covers the same shared code. The default run then leaves this one out."""
    about_values = re.match(r"test_(every_|half_|plain_|the_largest_)", item.name)
    transformed = re.match(r"test_(vmap|scan|checkpoint|shard_map|xla_is_partitioned)", item.name)
    promises = getattr(item, "cls", None)
    if hasattr(promises, "num_optional"):  # a normalisation: all go through one pass over rows
        if promises.__name__ == "TestRMSNorm":
            return bool(transformed)
        if "mosaic_tpu" in item.name and (transformed or item.name.startswith("test_every_shape")):
            return True
        if promises.__name__ == "TestFusedAddRMSNorm":  # its norm is rms_norm's
            return bool(re.search(r"casting_mode.*gemma|option.*(gemma|none)", item.name))
        return bool(transformed) or not about_values
    if item.path.name == "test_losses.py":  # the fused loss's kernels have the formulas of cross_entropy's
        if transformed and "triton:interpret" in item.name:  # "mosaic_tpu:interpret" has the same rules
            return True
        return "-cross_entropy" in item.name and ":interpret" in item.name and not about_values
    return False
