"""Optimizers by the names that commands take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.training import optimizer_named

PARAMS = {"kernel": jnp.linspace(-1.0, 1.0, 16 * 512).reshape(16, 512)}
GRADS = {"kernel": 100 * jnp.cos(jnp.arange(16 * 512.0)).reshape(16, 512)}


def first_update(name, **options) -> tuple[Any, Any]:
    optimizer: Any = optimizer_named(name, 1e-2, **options)
    state = optimizer.init(PARAMS)
    return optimizer.update(GRADS, state, PARAMS)[0]["kernel"], state


def test_8_bits_are_adamw_but_for_the_state():
    """The first update is the sign of the gradient, whatever holds the moments; decay and clipping are the same."""
    (exact, _), (ours, state) = first_update("adamw", weight_decay=0.1), first_update("adamw8bit", weight_decay=0.1)
    np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-7)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.shape == (16, 512)} == {"uint8"}
    undecayed, _ = first_update("adamw8bit", weight_decay=0.0)
    assert not np.allclose(ours, undecayed, rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw8bit", "sgd"])
def test_gradients_are_clipped(name):
    """A clipped gradient has norm 1, so plain descent moves by the rate; AdamW's eps then counts."""
    clipped, free = (first_update(name, max_norm=norm, weight_decay=0.0)[0] for norm in (1e-7, None))
    assert float(jnp.linalg.norm(clipped)) < 0.9 * float(jnp.linalg.norm(free))


def test_what_an_optimizer_does_not_have_is_refused():
    with pytest.raises(ValueError, match="optimizer='lion' must be one of"):
        optimizer_named("lion", 1e-3)
    with pytest.raises(
        ValueError, match="state_dtype='bfloat16' is for optimizer='adamw', and 'adamw8bit' has its own"
    ):
        optimizer_named("adamw8bit", 1e-3, state_dtype="bfloat16")
