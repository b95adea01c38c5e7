"""Optimizers and schedules: they are optax's, in one order, and each option does what it says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from liger_jax.models import Qwen2Config, Qwen2ForCausalLM
from liger_jax.training import (
    adamw,
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    held_in,
    linear_schedule_with_warmup,
    sgd,
    stochastic_rounding,
)

SCHEDULES = (constant_schedule_with_warmup, cosine_schedule_with_warmup, linear_schedule_with_warmup)


def params_of(dtype=jnp.float32):
    key = jax.random.key(0)
    return {"kernel": jax.random.normal(key, (4, 3), dtype), "scale": jnp.ones(3, dtype)}


def program(optimizer, dtype):
    """The text of an update's program, names of variables aside."""
    params = params_of(dtype)
    return str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))


RATE = cosine_schedule_with_warmup(1e-3, 50)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ["ours", "optax_s"],
    [
        (
            lambda: adamw(RATE, b2=0.95, weight_decay=0.01, max_norm=1.0, seed=3),
            lambda: stochastic_rounding(
                optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, b2=0.95, weight_decay=0.01)), 3
            ),
        ),
        (
            lambda: adamw(1e-4, state_dtype=jnp.bfloat16, seed=0),
            lambda: held_in(stochastic_rounding(optax.adamw(1e-4)), jnp.bfloat16),
        ),
        (lambda: sgd(1e-4, seed=0), lambda: stochastic_rounding(optax.sgd(1e-4))),
        (lambda: adamw(1e-4, mu_dtype=jnp.bfloat16), lambda: optax.adamw(1e-4, mu_dtype=jnp.bfloat16)),
        (lambda: sgd(1e-4, 0.9, True, jnp.bfloat16), lambda: optax.sgd(1e-4, 0.9, True, jnp.bfloat16)),
    ],
    ids=["clipped AdamW", "moments in bfloat16", "SGD", "optax's AdamW", "optax's SGD"],
)
def test_an_update_is_the_program_that_is_written_by_hand(ours, optax_s, dtype):
    assert program(ours(), dtype) == program(optax_s(), dtype)


def test_gradients_are_clipped_to_the_norm_that_is_given():
    params = params_of()
    large = jax.tree.map(lambda x: 100 * jnp.ones_like(x), params)
    optimizer = sgd(1.0, max_norm=2.0)
    updates, _ = optimizer.update(large, optimizer.init(params), params)
    assert math.isclose(optax.tree.norm(updates), 2.0, rel_tol=1e-5)


def test_norms_and_biases_are_decayed_unless_they_are_left_out():
    config = Qwen2Config(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    model = nnx.eval_shape(lambda: Qwen2ForCausalLM(config, rngs=nnx.Rngs(0)))  # its layers are stacked
    params = jax.tree.map(lambda x: jnp.ones(x.shape), nnx.state(model))
    zeros = jax.tree.map(jnp.zeros_like, params)

    def kinds(optimizer):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        flat = nnx.to_flat_state(updates)
        return {(path[-1], bool(jnp.any(x[...] != 0))) for path, x in flat}

    assert kinds(adamw(1.0, weight_decay=0.01)) == {
        (name, True) for name in ("embed_tokens", "lm_head", "kernel", "bias", "scale")
    }
    assert kinds(adamw(1.0, decays_all=False)) == {
        ("embed_tokens", True), ("lm_head", True), ("kernel", True), ("bias", False), ("scale", False)
    }  # fmt: skip


def test_two_options_for_one_thing_are_refused():
    with pytest.raises(ValueError, match="mask and decays_all=False both say which parameters decay"):
        adamw(1e-3, mask={"kernel": True, "scale": False}, decays_all=False)
    with pytest.raises(ValueError, match="mu_dtype='bfloat16' and state_dtype='float16' both say how the first"):
        adamw(1e-3, mu_dtype="bfloat16", state_dtype="float16")


def test_state_that_is_held_in_few_bits_is_computed_with_in_float32():
    params, grads = params_of(), jax.tree.map(lambda x: jnp.full_like(x, 0.1), params_of())
    optimizer = adamw(1e-2, state_dtype=jnp.bfloat16)
    state = optimizer.init(params)
    updates, after = optimizer.update(grads, state, params)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
    wide = adamw(1e-2)
    expected, _ = wide.update(grads, wide.init(params), params)  # the first state is zeros, which both hold
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_rate_rises_in_a_line_to_the_peak_and_never_again(make):
    rates = np.array([make(2.0, 50, warm_up=0.1)(step) for step in range(50)])
    np.testing.assert_allclose(rates[:4], [0.4, 0.8, 1.2, 1.6], rtol=1e-6)
    assert rates.max() <= 2.0 and rates.argmax() == 4 and np.all(np.diff(rates[5:]) <= 0)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize(["steps", "rising"], [(12, 4), (12, 6), (7, 7), (1, 1), (3000, 90)])
def test_the_peak_is_reached_however_long_the_warm_up_is(make, steps, rising):
    rates = [float(make(1e-3, steps, warm_up=rising / steps)(step)) for step in range(steps)]
    np.testing.assert_allclose(rates[rising - 1], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(rates[:rising], 1e-3 * np.arange(1, rising + 1) / rising, rtol=1e-5)


def test_a_rate_goes_down_from_the_peak_over_the_steps_that_are_left():
    left = np.arange(9, 0, -1) / 9  # of 12 steps, the fourth has the peak
    rates = lambda make, **end: [float(make(1.0, 12, warm_up=4 / 12, **end)(step)) for step in range(3, 12)]
    np.testing.assert_allclose(rates(linear_schedule_with_warmup), left, rtol=1e-6)
    np.testing.assert_allclose(rates(linear_schedule_with_warmup, end=0.5), 0.5 + 0.5 * left, rtol=1e-6)
    np.testing.assert_allclose(rates(cosine_schedule_with_warmup), 0.55 - 0.45 * np.cos(np.pi * left), rtol=1e-5)


@pytest.mark.parametrize(
    ["make", "end"],
    [(constant_schedule_with_warmup, 1.0), (cosine_schedule_with_warmup, 0.1), (linear_schedule_with_warmup, 0.0)],
)
def test_a_rate_ends_as_it_says_and_stays_there(make, end):
    schedule = make(1.0, 1000)
    np.testing.assert_allclose([schedule(1000)], end, atol=1e-6)
    assert schedule(0) > 0 and float(make(1.0, 1)(0)) > 0  # a run of one step learns


@pytest.mark.parametrize("make", SCHEDULES)
def test_numbers_out_of_their_range_are_refused(make):
    with pytest.raises(ValueError, match=rf"^{make.__name__}: steps=0 must be at least 1\.$"):
        make(1.0, 0)
    with pytest.raises(ValueError, match=rf"^{make.__name__}: warm_up=3\.0 is a share, and must be in \[0, 1\]\.$"):
        make(1.0, 10, warm_up=3.0)
