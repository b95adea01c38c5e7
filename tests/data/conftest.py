"""Runs of these tests take one device unless they name a mesh, as those of the trainers' tests do."""

from tests.trainers.conftest import one_device_unless_a_mesh_is_named as one_device_unless_a_mesh_is_named
