"""The library inside other people's trainers: optax's wrappers around an optimizer, and orbax's checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import integrations_optax, integrations_orbax


@pytest.fixture(scope="module")
def trained():
    return integrations_optax.main(steps=8)


def test_every_optimizer_learns(trained):
    for name, (*_, losses) in trained.items():
        assert losses[-1] < losses[0] - 0.1, name


def test_a_micro_step_moves_nothing_and_the_second_moves_by_both_gradients(trained):
    """So the losses of the first two batches are the untrained model's, and those after are not a plain run's."""
    losses = trained["8-bit AdamW every second step"][3]
    plain = trained["8-bit AdamW"][3]
    assert losses[0] == pytest.approx(plain[0]) and losses[1] != pytest.approx(plain[1], abs=1e-4)
    state = trained["8-bit AdamW every second step"][2]
    assert int(state.gradient_step) == 4 and int(state.inner_opt_state[0].count) == 4


def test_a_frozen_part_stays_and_has_no_state(trained):
    before, after, state, _ = trained["8-bit AdamW, the embedding frozen"]
    for (path, x), y in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert bool(jnp.all(x == y)) == ("embed_tokens" in integrations_optax.names(path))
    assert not any("embed_tokens" in integrations_optax.names(path) for path, _ in jax.tree.leaves_with_path(state))


def test_muon_takes_the_kernels_and_adam_the_rest(trained):
    state = trained["Muon, and 8-bit AdamW for the rest"][2]
    codes = [path for path, x in jax.tree.leaves_with_path(state) if x.dtype == jnp.uint8]
    assert codes and all("embed_tokens" in integrations_optax.names(path) for path in codes)


def test_training_goes_on_from_a_checkpoint_on_another_mesh():
    here, there, state = integrations_orbax.main(steps=1)
    np.testing.assert_allclose(there, here, rtol=1e-5)
    meshes = {dict(x.sharding.mesh.shape)["data"] for x in jax.tree.leaves(state) if x.ndim}
    assert meshes == {2} or len(jax.devices()) < 4
    assert sum(x.dtype == jnp.uint8 for x in jax.tree.leaves(state)) > 2
