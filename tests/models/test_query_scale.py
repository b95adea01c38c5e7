"""The factor of queries that grows with positions, against its formula in float64."""

import jax.numpy as jnp
import numpy as np

from liger_jax.models.core.query_scale import query_scale


def test_queries_grow_with_the_logarithm_of_their_position_in_lengths_of_training(rng):
    positions = rng.integers(0, 2**24, (3, 50)).astype(np.int32)
    positions[0, :3] = 0, 16383, 16384  # the first two are within the length in training
    truth = 1 + 0.1 * np.log(1 + np.floor(positions / 16384.0))
    found = np.asarray(query_scale(jnp.asarray(positions), 0.1, 16384), np.float64)
    np.testing.assert_allclose(found, truth[..., None], rtol=3e-7)
    assert found[0, :2].tolist() == [[1.0], [1.0]] and found[0, 2, 0] > 1.06
