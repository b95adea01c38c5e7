"""Op tests run under strict type promotion: an op must not lean on JAX's implicit casts."""

import re

import jax
import pytest

from tests.ops import _oracle


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def pytest_generate_tests(metafunc):
    """What a class of promises (_norms.py) says of its op."""
    promises = metafunc.cls
    if not hasattr(promises, "num_optional"):
        return
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", _oracle.first(2, promises.shapes), ids=str)
    if "num_present" in metafunc.fixturenames:
        metafunc.parametrize("num_present", _oracle.first(2, range(promises.num_optional, -1, -1)))
    if "parameters_shared" in metafunc.fixturenames:
        metafunc.parametrize("parameters_shared", [True, False], ids=["parameters shared", "all mapped"])


def pytest_collection_modifyitems(items):
    """Normalisations share the code that transformations meet: one class of them shows it, the full run all."""
    for item in items:
        transformed = re.match(r"test_(vmap|scan|checkpoint|shard_map|xla_is_partitioned)", item.name)
        if transformed and hasattr(item.cls, "num_optional") and item.cls.__name__ != "TestFusedAddRMSNorm":
            item.add_marker(pytest.mark.full)
