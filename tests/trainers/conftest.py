"""Runs of the tests of trainers take one device unless they name a mesh, though several are simulated here."""

import pytest

from liger_jax.training import meshes


@pytest.fixture(autouse=True, scope="module")
def one_device_unless_a_mesh_is_named():
    chosen = meshes.chosen
    of_first = lambda text, devices, *others: chosen(text, devices if text else devices[:1], *others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "chosen", of_first)
        yield chosen


@pytest.fixture(scope="module")
def each_program_is_compiled_once(caches):
    """Runs compile the same programs as the runs before them, and read them from the cache of commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches))  # fixtures of a module run commands, too
        yield
