"""The examples that bring the losses into other training loops and models."""

import numpy as np
import pytest

from examples import linen_or_other_model, optax_swap


@pytest.mark.parametrize("loss", [optax_swap.swapped, optax_swap.fused])
def test_the_swapped_loss_trains_like_the_one_before(loss):
    before = optax_swap.train(optax_swap.before, steps=6)
    np.testing.assert_allclose(optax_swap.train(loss, steps=6), before, rtol=1e-4)
    assert before[-1] < before[0]


def test_linen_and_nnx_models_learn():
    losses = linen_or_other_model.main(steps=12)
    assert all(values[-1] < values[0] - 0.2 for values in losses.values())
