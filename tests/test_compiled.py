"""What the suite does to compile less changes no program."""

import jax
import numpy as np


def test_a_program_is_run_while_another_is_lowered():
    """As numbers are drawn here, whose program is lowered with constants that one of its own makes."""
    with jax.ensure_compile_time_eval():
        found = jax.random.normal(jax.random.key(0), (3, 5))
    np.testing.assert_array_equal(found, jax.random.normal(jax.random.key(0), (3, 5)))
