"""Op tests run under strict type promotion: an op must not lean on JAX's implicit casts."""

import itertools
import re

import jax
import pytest

from liger_jax.ops.place import Place, described
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
    if platform == "gpu" and Place(described(jax.devices()[0])).is_hopper:
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


# Cases in an interpreter whose claim another case of the same kernel shows, with other arrays or in another mode.
SHOWN_IN_AN_INTERPRETER = {
    "test_rope.py": r"test_vmap\[.*all mapped|test_mrope_matches_float64\[.*-2-",
    "test_gated_mlp.py": r"test_what_is_frozen_.*-recomputed",
    "test_losses.py": r"test_(nothing_counts|mean_over|metrics_of_nothing)_|test_shard_map_.*-False",
    "test_fused_linear_cross_entropy.py": r"(mixed|frozen)_.*mosaic_tpu.*lean|(layouts|width|chunk)_.*mosaic_tpu.*fast",
    "test_fused_linear_log_probs.py": r"gradients_are_exact\[.*-plain|test_(vmap|entries)_.*mosaic_tpu",
}


def _is_shown_by_others(item) -> bool:
    """Whether another op's test already covers the same shared code. The default run then leaves this one out."""
    if ":interpret" in item.name:
        if re.search(SHOWN_IN_AN_INTERPRETER.get(item.path.name, r"$^"), item.name):
            return True
        # These run a kernel as it is: XLA's case shows the op's own rules, and the norm of a sum JAX's for a kernel.
        as_it_is = re.match(r"test_(mrope_in_)?(scan|checkpoint|shard_map)(?!_over)|test_scan_over", item.name)
        if as_it_is and item.path.name != "test_rms_norm.py":
            return True
    about_values = re.match(r"test_(every_|half_|plain_|the_largest_)", item.name)
    transformed = re.match(r"test_(vmap|scan|checkpoint|shard_map|xla_is_partitioned)", item.name)
    promises = getattr(item, "cls", None)
    if hasattr(promises, "num_optional"):  # a normalisation: those with kernels go through one pass over rows
        if getattr(item.module, "KERNELS", ()) == ("xla",):
            return not (about_values or re.match(r"test_(the_smallest_|a_row_of_nan_|no_more_than_)", item.name))
        if promises.__name__ == "TestRMSNorm":  # how a mode casts is one formula for all kernels
            return bool(transformed or re.match(r"test_every_[co].*mosaic_tpu.*(gemma|none)", item.name))
        if "mosaic_tpu" in item.name and (transformed or re.match(r"test_(every_shape|the_largest)", item.name)):
            return True
        if promises.__name__ == "TestFusedAddRMSNorm":  # its norm is rms_norm's
            rows = re.match(
                r"test_(rows_of_zeros|a_row_of_nan|the_largest|the_smallest|more_rows|float32_parameters|every_[co])",
                item.name,
            )
            in_both = ":interpret" in item.name and rows
            return bool(in_both or re.search(r"casting_mode.*gemma|option.*(gemma|none)", item.name))
        return bool(transformed) or not about_values
    if item.path.name == "test_losses.py":  # the fused loss's kernels have the formulas of cross_entropy's
        if transformed and "triton:interpret" in item.name:  # "mosaic_tpu:interpret" has the same rules
            return True
        return "-cross_entropy" in item.name and ":interpret" in item.name and not about_values
    return False
