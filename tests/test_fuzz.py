"""The fuzz of defaults: some seconds of it, and that it can fail."""

import inspect
import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from liger_jax import models, ops
from tests.fuzz import run
from tests.ops._oracle import first

pytestmark = pytest.mark.usefixtures("unchecked_types")  # illegal arguments are for our own errors


def test_defaults_are_right_for_random_arguments(platform):
    seed = int(os.environ["TEST_SEED"])
    found = run.fuzz(seed, itertools.count(), tuple(run.DRAWN), platform, seconds=1.5)
    repeat = f"python -m tests.fuzz --platform {platform} --seed {seed} --only"
    wrong = [f"{name}: {sentence}\n    {repeat} {number}" for number, name, misses in found for sentence in misses]
    assert not wrong, "\n".join(wrong)


def test_every_public_op_is_drawn():
    functions = {name for name, op in vars(ops).items() if inspect.isfunction(op) and op.__name__ == name}
    # What chooses experts jumps where two are nearly alike: its tests compare choices, and numbers where they agree.
    choosing = {"softmax_top_k", "top_k_softmax", "router_sums", "balancing_loss", "router_z_loss", "expert_load"}
    assert run.OPS.keys() == functions - choosing
    assert {f"{name}config" for name in run.MODELS} == {
        name.lower().replace("text", "") for name in vars(models) if name.endswith("Config")
    }


FAULTS = {
    "is off by": lambda y: y.at[..., -1:].multiply(1.5),  # in one column
    "is NaN where": lambda y: jnp.where(y == jnp.max(y, initial=0), jnp.nan, y),
    "is infinite where": lambda y: jnp.where(y == jnp.max(y, initial=0), jnp.inf, y),
    "raises ZeroDivisionError": lambda y: y * (1 // 0),
    "raises ValueError": lambda y: y[None],  # the cotangent does not fit
}


@pytest.mark.parametrize("sentence", first(2, list(FAULTS)))
def test_a_fault_is_found_and_can_be_repeated(sentence, platform, monkeypatch):
    monkeypatch.setattr(ops, "relu_squared", lambda x, right=ops.relu_squared: FAULTS[sentence](right(x)))
    seed, names = int(os.environ["TEST_SEED"]), ("relu_squared",)
    found = [(number, misses) for number, _, misses in run.fuzz(seed, range(6), names, platform) if misses]
    assert any(sentence in miss for _, misses in found for miss in misses)
    number, misses = found[0]
    assert list(run.fuzz(seed, [number], names, platform)) == [(number, *names, misses)]


def test_a_wrong_gradient_is_found(platform, monkeypatch):
    def wrong(x, right=ops.relu_squared):
        return right(x) + 0.1 * (x - jax.lax.stop_gradient(x))

    monkeypatch.setattr(ops, "relu_squared", wrong)
    found = run.fuzz(int(os.environ["TEST_SEED"]), range(6), ("relu_squared",), platform)
    assert any("dx is off by" in sentence for *_, misses in found for sentence in misses)
