"""Runs of these tests take one device unless they name a mesh, as those of the trainers' tests do."""

from tests.trainers.conftest import each_program_is_compiled_once as each_program_is_compiled_once
from tests.trainers.conftest import one_device_unless_a_mesh_is_named as one_device_unless_a_mesh_is_named
