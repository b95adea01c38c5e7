"""Optimizers and schedules: they are optax's, in one order, and each option does what it says."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import GptOssConfig, GptOssForCausalLM, Qwen2Config, Qwen2ForCausalLM
from liger_jax.models.core.parameters import matrices, path_of
from liger_jax.models.lora import add_lora
from liger_jax.training import (
    adamw,
    adamw_8bit,
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    held_in,
    linear_schedule_with_warmup,
    make_step,
    optimizer_named,
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


SMALL: Any = dict(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)
GPT_OSS = GptOssConfig(**SMALL, head_dim=4, num_local_experts=2, num_experts_per_tok=1, rope_scaling=None)
MODELS = {
    "Qwen2": lambda scan: Qwen2ForCausalLM(Qwen2Config(**SMALL), scan_layers=scan, rngs=nnx.Rngs(0)),
    "gpt-oss": lambda scan: GptOssForCausalLM(GPT_OSS, scan_layers=scan, rngs=nnx.Rngs(0)),
    "DoRA": lambda scan: add_lora(MODELS["Qwen2"](scan), 2, alpha=4, dora=True, rngs=nnx.Rngs(0)),
}
VECTORS = {"bias", "scale", "sinks", "gate_up_proj_bias", "down_proj_bias", "magnitude"}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_known_however_many_layers_or_experts_are_in_one_array(name, scan):
    params = nnx.state(nnx.eval_shape(lambda: MODELS[name](scan)), (nnx.Param, nnx.LoRAParam))
    found = {path_of(keys)[-1]: x for keys, x in jax.tree.leaves_with_path(matrices(params))}
    assert VECTORS & {*found} and {*found} - VECTORS
    assert found == {name: name not in VECTORS for name in found}


def test_vectors_are_decayed_unless_they_are_left_out():
    shapes = dict(layers=dict(q_proj=dict(kernel=(2, 4, 4), bias=(2, 4)), sinks=(2, 3)))
    params = jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    zeros = jax.tree.map(jnp.zeros_like, params)

    def decayed(optimizer):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        return [bool(np.any(np.asarray(x))) for x in jax.tree.leaves(updates)]

    assert decayed(adamw(1.0, weight_decay=0.01)) == [True, True, True]
    assert decayed(adamw(1.0, decays_all=False)) == [False, True, False]  # of bias, kernel and sinks


def test_vectors_of_other_models_are_known_by_their_axes_and_names():
    shapes = dict(a=dict(kernel=(3, 3, 4, 4), bias=(2, 4)), norms=dict(scale=(2, 4)), embedding=(8, 4), weight=(4,))
    tree = jax.tree.map(lambda shape: jnp.zeros(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    expected = dict(a=dict(kernel=True, bias=False), norms=dict(scale=False), embedding=True, weight=False)
    assert matrices(tree) == expected and matrices(jnp.zeros((2, 2)))


def test_two_options_for_one_thing_are_refused():
    with pytest.raises(ValueError, match="mask and decays_all=False both say which parameters decay"):
        adamw(1e-3, mask={"kernel": True, "scale": False}, decays_all=False)
    with pytest.raises(
        ValueError, match="mu_dtype='bfloat16' and state_dtype='float16' both set the dtype of the first"
    ):
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_moments_held_in_bfloat16_rise_and_fall_as_in_float32(dtype, rng):
    """Rounded to nearest, a second moment would never fall: a step takes a thousandth of it."""
    params, steps, late = {"kernel": jnp.zeros((32, 32), dtype)}, 600, 50
    sizes = np.where(np.arange(steps) < late, 1.0, 0.1)[:, None, None]
    grads = np.float32(sizes * rng.normal(size=(steps, 32, 32)))
    optimizer = adamw(1e-3, weight_decay=0.0, max_norm=None, state_dtype="bfloat16", seed=7)

    def step(state, grad):
        return optimizer.update({"kernel": grad}, state, params)[1], None

    state: Any = jax.jit(lambda state: jax.lax.scan(step, state, grads)[0])(optimizer.init(params))
    (nu,) = (adam.nu["kernel"] for adam in [state.inner_state.inner_state[0]])
    decays = 0.999 ** np.arange(steps - 1, -1, -1)[:, None, None]
    truth = np.sum(0.001 * decays * np.float64(grads) ** 2, axis=0)
    assert nu.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(nu).mean(), truth.mean(), rtol=0.01)


def test_bits_of_held_moments_follow_from_the_seed_and_the_step_whatever_the_sharding(rng, devices):
    params = {"kernel": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    optimizer = held_in(optax.scale_by_adam(), jnp.bfloat16, seed=3)

    def updated(state, params):
        return jax.jit(optimizer.update)(params, state)[1]

    first: Any = updated(optimizer.init(params), params)
    second = jax.tree.map(np.asarray, updated(first, params))
    again = updated(first._replace(step=jnp.zeros((), jnp.int32)), params)  # another step, other bits
    assert not np.array_equal(second.inner_state.nu["kernel"], again.inner_state.nu["kernel"])
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(axis_type,), devices=devices)
        put = lambda x, mesh=mesh: jax.device_put(x, NamedSharding(mesh, P("fsdp") if x.ndim else P()))
        with jax.set_mesh(mesh):
            found = updated(*jax.tree.map(put, (first, params)))
        jax.tree.map(np.testing.assert_array_equal, found, second)


def test_muon_trains_on_explicit_axes_what_one_device_trains(devices):
    """Its products contract over axes that a mesh splits, which Explicit axes call ambiguous."""
    graph, params = nnx.split(nnx.Linear(4 * len(devices), 6, rngs=nnx.Rngs(0)))
    optimizer = optax.contrib.muon(0.1)
    step = jax.jit(make_step(graph, optimizer, lambda model, x, _: jnp.sum(jnp.sin(model.kernel[...] * x))))
    state, x = (params, optimizer.init(params)), jnp.arange(6.0)
    wanted, _ = step(state, x)
    mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(AxisType.Explicit,), devices=devices)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("fsdp") if x.ndim == 2 else P()))
    with jax.set_mesh(mesh):
        found, _ = step(jax.tree.map(put, state), put(x))
    (kernel,) = (x for x in jax.tree.leaves(found[0]) if x.ndim == 2)
    assert kernel.sharding.spec[0] == "fsdp"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_held_in_leaves_numbers_and_arrays_of_other_shapes_as_they_are():
    """An injected 0.999 is 1 in bfloat16."""
    params = {"kernel": jnp.ones((4, 3))}
    state: Any = held_in(optax.inject_hyperparams(optax.adam)(1e-3), jnp.bfloat16).init(params)
    inner: Any = state.inner_state
    assert math.isclose(inner.hyperparams["b2"], 0.999, rel_tol=1e-6)
    with pytest.raises(ValueError, match="held_in: dtype=float16 must be bfloat16 or float32"):
        adamw(1e-3, state_dtype=jnp.float16)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("make", [adamw, adamw_8bit])
def test_injected_numbers_in_bfloat16_are_refused(make):
    """optax takes their dtype from the parameters, unless it is given one."""
    params = {"kernel": jnp.ones((4, 3), jnp.bfloat16)}
    with pytest.raises(TypeError, match="is an array of bfloat16, .* hyperparam_dtype=jnp.float32"):
        jax.eval_shape(optax.inject_hyperparams(make)(1e-3).init, params)
    optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-3).init(params)


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


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3])
def test_a_learning_rate_that_is_none_is_refused(rate):
    for make in SCHEDULES:
        with pytest.raises(ValueError, match=rf"^{make.__name__}: peak=.* must be a finite number, at least 0\.$"):
            make(rate, 10)
    for make in (adamw, sgd, adamw_8bit):
        with pytest.raises(
            ValueError, match=rf"^{make.__name__}: learning_rate=.* must be a finite number, at least 0"
        ):
            make(rate)
    sgd(0.0)  # a rate of 0 stays one


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_gradients_are_not_clipped_at_a_norm_that_is_none(max_norm):
    for make in (adamw, sgd, functools.partial(optimizer_named, "adamw8bit")):
        with pytest.raises(
            ValueError, match=rf"^max_norm={max_norm} must be more than 0; None does not clip gradients\.$"
        ):
            make(1.0, max_norm=max_norm)
