"""Where the tests run, and under which rules.

    pytest --platform=cpu|gpu|tpu

The cases are the same everywhere. On a CPU the Pallas kernels run in their interpreters, through the public ops;
on a GPU or TPU they are compiled for it.
"""

import os

import pytest

IMPLEMENTATIONS = {
    "cpu": ("xla", "triton:interpret", "mosaic_tpu:interpret"),
    "gpu": ("xla", "triton"),
    "tpu": ("xla", "mosaic_tpu"),
}


def pytest_addoption(parser):
    parser.addoption(
        "--platform", choices=tuple(IMPLEMENTATIONS), default="cpu", help="the device that the tests run on"
    )


def pytest_configure(config):
    # Before anything imports jax. Four CPU devices serve the sharding tests.
    platform = config.getoption("--platform")
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[platform]
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    from jaxtyping import install_import_hook

    config.add_cleanup(install_import_hook("liger_jax", "beartype.beartype").uninstall)


def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs once for each kernel that its op has on this platform.

    A module whose op lacks a kernel says so: `KERNELS = ("xla", "triton")`.
    """
    if "implementation" in metafunc.fixturenames:
        kernels = getattr(metafunc.module, "KERNELS", ("xla", "triton", "mosaic_tpu"))
        names = IMPLEMENTATIONS[metafunc.config.getoption("--platform")]
        metafunc.parametrize("implementation", [name for name in names if name.partition(":")[0] in kernels])


@pytest.fixture(scope="session")
def platform(request):
    return request.config.getoption("--platform")
