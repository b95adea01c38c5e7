"""The examples on one page: a step written both ways, and the losses in other training loops and models."""

from pathlib import Path

import numpy as np
import pytest

from examples import linen_or_other_model, optax_swap, train_step

PROGRAMS = [path for path in Path(optax_swap.__file__).parent.glob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_file_of_the_folder_is_a_program_that_says_how_it_is_started(path):
    text = path.read_text(encoding="utf-8")
    assert f"\n    python -m examples.{path.stem}" in text and 'if __name__ == "__main__":' in text


@pytest.mark.parametrize("loss", [optax_swap.swapped, optax_swap.fused])
def test_the_swapped_loss_trains_like_the_one_before(loss):
    before = optax_swap.train(optax_swap.before, steps=6)
    np.testing.assert_allclose(optax_swap.train(loss, steps=6), before, rtol=1e-4)
    assert before[-1] < before[0]


def test_linen_and_nnx_models_learn():
    losses = linen_or_other_model.main(steps=12)
    assert all(values[-1] < values[0] - 0.2 for values in losses.values())


def test_both_ways_to_write_a_step_learn_with_the_same_numbers():
    modules, split_state = train_step.main(steps=6).values()
    np.testing.assert_allclose(modules, split_state, rtol=1e-5)
    assert modules[-1] < modules[0]
