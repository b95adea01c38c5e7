"""The fused loss's TPU kernels on a chip of two cores, in the interpreter: no core touches what another one writes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from liger_jax import fused_linear_cross_entropy
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, mosaic_tpu_tiles

# 3 row tiles (one core gets 2, the other 1) and 2 weight tiles; the last ones are partial. No other test has these
# sizes: a trace of the same shapes would have been made for one core.
N, V = 35, 133


@pytest.fixture
def two_cores(monkeypatch):
    """Runs the kernels on two cores that share the grid's parallel axes; those are as the kernels say unless given."""
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    only_report = {"on_race": "warn"} if "on_race" in fields else {}  # JAX 0.10 knows nothing else
    interpreter = pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan", **only_report
    )

    def run(d_block_size, semantics=None):
        def tiles(n, v, d, itemsize, *_, **__):
            traced.append((n, v, d))
            return config.TpuConfig(16, 128, d_block_size, keeps_hidden=d_block_size == d and itemsize == 2)

        params = lambda _, *named, vmem_limit_bytes: pltpu.CompilerParams(dimension_semantics=semantics or named)
        monkeypatch.setattr(config, "tpu_config", tiles)
        monkeypatch.setattr(mosaic_tpu_tiles, "tpu_params", params)
        monkeypatch.setattr(mosaic_tpu_tiles, "tpu_interpreter", lambda _: interpreter)

    traced = []
    yield run
    assert traced, "the kernels were traced before, and not for two cores"


def loss_and_inputs(rng, d, dtype, implementation, mode="lean", n=N, v=V):
    """With every option, so that each operand is there."""
    hidden, weight, bias = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((n, d), (v, d), (v,)))
    hidden /= 16
    class_weights = jnp.asarray(rng.uniform(0.5, 2.0, v), jnp.float32)
    labels = jnp.asarray(rng.integers(0, v, n))
    loss = lambda hidden, weight, bias, implementation=implementation: fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, class_weights=class_weights, label_smoothing=0.1, return_metrics=True,
        mode=mode, implementation=implementation,
    )  # fmt: skip
    return loss, (hidden, weight, bias)


@pytest.fixture
def races(capfd, caplog):
    """Whether the interpreter saw a race: it prints so, and since JAX 0.12 logs it."""
    return lambda: "RACE DETECTED" in capfd.readouterr().out + caplog.text


def agrees_with_xla(loss, inputs, races):
    """The step in the interpreter sees no race, and its results are those of XLA's products."""
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    jax.block_until_ready(found)
    assert not races()
    reference = functools.partial(loss, implementation="xla")
    expected = jax.jit(jax.value_and_grad(reference, (0, 1, 2), has_aux=True))(*inputs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = jnp.max(jnp.abs(b.astype(jnp.float32)))
        assert jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))) <= 0.02 * scale


@pytest.mark.parametrize(
    "dtype, d, d_block_size, mode",
    [
        ("bfloat16", 20, 20, "lean"),
        pytest.param("bfloat16", 100, 100, "fast", marks=pytest.mark.full),  # by default, where all tiles are whole
        *(pytest.param("float32", 100, 100, mode, marks=pytest.mark.full) for mode in ("fast", "lean")),
        *(pytest.param("bfloat16", 256, 128, mode, marks=pytest.mark.full) for mode in ("fast", "lean")),
    ],
)
def test_cores_do_not_race(dtype, d, d_block_size, mode, two_cores, rng, races):
    two_cores(d_block_size)
    loss, inputs = loss_and_inputs(rng, d, dtype, "mosaic_tpu:interpret", mode)
    agrees_with_xla(loss, inputs, races)


def test_cores_do_not_race_where_gradients_are_written_in_place(two_cores, rng, races):
    """Where all tiles are whole, the interpreter also writes the logits' gradient over their exponentials."""
    two_cores(100)
    loss, inputs = loss_and_inputs(rng, 100, "bfloat16", "mosaic_tpu:interpret", "fast", n=48, v=384)
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    assert "input_output_aliases=((0, 0),)" in str(step.trace(*inputs).jaxpr)
    agrees_with_xla(loss, inputs, races)


def test_a_race_would_be_seen(two_cores, rng, races):
    """With the vocabulary shared out too, both cores write the statistics of the same rows."""
    two_cores(8, semantics=("parallel", "parallel", "arbitrary"))
    loss, inputs = loss_and_inputs(rng, 8, "float32", "mosaic_tpu:interpret")
    jax.block_until_ready(jax.jit(loss)(*inputs))
    assert races()
