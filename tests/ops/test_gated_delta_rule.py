"""The gated delta rule beside its recurrence in float64, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops import gated_delta_rule
from liger_jax.pallas_kernels.gated_delta_rule import mosaic_tpu

B, T, K, H, D, E = 2, 150, 2, 4, 8, 6


def recurrence(q, k, v, gate, beta, ids=None, state=None):
    """(output, last state) of NumPy arrays in float64, by the definition."""
    q, k, v, gate, beta = (np.asarray(x, np.float64) for x in (q, k, v, gate, beta))
    batch, length, heads, width = v.shape
    q, k = (np.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    S = np.zeros((batch, heads, q.shape[3], width)) if state is None else np.array(state, np.float64)
    out = np.zeros(v.shape)
    for t in range(length):
        if ids is not None and t:
            S = np.where((ids[:, t] != ids[:, t - 1])[:, None, None, None], 0.0, S)
        S = np.exp(gate[:, t])[..., None, None] * S
        error = v[:, t] - np.einsum("bhde,bhd->bhe", S, k[:, t])
        S = S + np.einsum("bhd,bhe->bhde", k[:, t], beta[:, t][..., None] * error)
        out[:, t] = np.einsum("bhde,bhd->bhe", S, q[:, t]) * q.shape[3] ** -0.5
    return out, S


def draw(rng, length=T, batch=B, dtype=np.float32):
    """Arguments as models have them: keys of norm 1, decays of every size, and heads whose state outlives a chunk."""
    q, k = rng.standard_normal((2, batch, length, K, D))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, length, H, E))
    gate = -np.exp(rng.uniform(-8, 2, (batch, length, H)))
    gate[..., ::2] *= 0.01
    gate[..., 1::2][rng.random((batch, length, H // 2)) < 0.02] = -100.0
    beta = 1 / (1 + np.exp(-3 * rng.standard_normal((batch, length, H))))
    beta[rng.random(beta.shape) < 0.05] = rng.choice([0.0, 1.0])
    return [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(x, jnp.float32) for x in (gate, beta)]


def documents(rng, batch=B, length=T):
    """Packed rows of many documents, which begin anywhere, to a few long ones; they end in padding."""
    ids = 1 + np.cumsum(rng.random((batch, length)) < np.geomspace(0.04, 0.004, batch)[:, None], axis=1)
    ids[:, length - 9 :] = 0
    return ids.astype(np.int32)


def relative(x, truth):
    return np.max(np.abs(np.asarray(x, np.float64) - truth)) / np.max(np.abs(truth))


run = jax.jit(gated_delta_rule, static_argnames="implementation")
WITHIN = {"xla": 4e-6, "triton": 2e-5, "mosaic_tpu": 4e-6}  # TF32 in three products, where a GPU runs it
in_full = lambda *names: [pytest.param(name, marks=pytest.mark.full) for name in names]
kernels = pytest.mark.parametrize("kernel", ["xla", "triton", *in_full("mosaic_tpu")])
kernels_in_full = pytest.mark.parametrize("kernel", ["xla", *in_full("triton", "mosaic_tpu")])


def here(kernel, platform):
    if kernel in ("xla", {"gpu": "triton", "tpu": "mosaic_tpu"}.get(platform)):
        return kernel
    if platform != "cpu":
        pytest.skip("simulated on a CPU, whose products are float32")
    return f"{kernel}:interpret"


@pytest.mark.parametrize("length", [1, 2, 63, 64, T, pytest.param(1100, marks=pytest.mark.full)])
def test_equals_the_recurrence(length, rng):
    arrays = draw(rng, length)
    out, state = run(*arrays)
    truth, last = recurrence(*arrays)
    assert relative(out, truth) < 4e-6 and relative(state, last) < 4e-6


@pytest.mark.parametrize("kernel", ["xla", "triton", "mosaic_tpu"])
def test_packed_rows_are_their_documents_one_by_one(kernel, platform, rng):
    arrays, ids, before = draw(rng), documents(rng), rng.standard_normal((B, H, D, E)).astype(np.float32)
    out, state = run(*arrays, segment_ids=ids, state=before, implementation=here(kernel, platform))
    truth, last = recurrence(*arrays, ids=ids, state=before)
    assert relative(out, truth) < WITHIN[kernel] and relative(state, last) < WITHIN[kernel]


def test_a_row_in_two_calls_is_the_row(rng):
    arrays = draw(rng)
    first, middle = run(*[x[:, :77] for x in arrays])
    second, last = run(*[x[:, 77:] for x in arrays], state=middle)
    whole, state = run(*arrays)
    assert relative(np.concatenate([first, second], axis=1), np.asarray(whole)) < 4e-6
    assert relative(last, np.asarray(state)) < 4e-6


@kernels
def test_gradients_are_those_of_the_recurrence(kernel, platform, rng):
    """By central differences of the float64 recurrence along random directions, the state's included."""
    arrays, ids, before = draw(rng), documents(rng), rng.standard_normal((B, H, D, E)).astype(np.float32)
    dout, dstate = rng.standard_normal((B, T, H, E)), rng.standard_normal((B, H, D, E))

    def loss(*arrays):
        options = dict(segment_ids=ids, state=arrays[5], implementation=here(kernel, platform))
        out, state = gated_delta_rule(*arrays[:5], **options)
        return jnp.sum(out * dout) + jnp.sum(state * dstate)

    def truth(*arrays):
        out, state = recurrence(*arrays[:5], ids=ids, state=arrays[5])
        return np.sum(out * dout) + np.sum(state * dstate)

    arrays = [*arrays, jnp.asarray(before)]
    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*arrays)
    wide = [np.asarray(x, np.float64) for x in arrays]
    for i, g in enumerate(gradients):
        step = 1e-5 * rng.standard_normal(g.shape)
        up, down = (truth(*wide[:i], wide[i] + sign * step, *wide[i + 1 :]) for sign in (1, -1))
        slope = np.sum(np.asarray(g, np.float64) * step)
        scale = np.linalg.norm(np.asarray(g)) * np.linalg.norm(step)
        assert abs((up - down) / 2 - slope) < 1e-4 * scale, i


@kernels_in_full
def test_equal_keys_that_overwrite_each_other_stay_exact(kernel, platform, rng):
    """Powers of such a chunk's system grow as binomials do."""
    q, k, v, gate, beta = draw(rng)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    arrays = q, k, v, 0.0 * gate, jnp.ones_like(beta)
    out, _ = run(*arrays, implementation=here(kernel, platform))
    assert relative(out, recurrence(*arrays)[0]) < max(1e-5, WITHIN[kernel])


@kernels_in_full
def test_a_decay_of_nothing_forgets(kernel, platform, rng):
    """Decays after it are as exact as ever."""
    q, k, v, gate, beta = draw(rng)
    gate = gate.at[:, 70].set(-jnp.inf).at[:, 66].set(-1e30)
    of_kernel = functools.partial(run, implementation=here(kernel, platform))
    out, state = of_kernel(q, k, v, gate, beta)
    alone, last = of_kernel(*[x[:, 70:] for x in (q, k, v, gate, beta)])
    assert relative(out[:, 70:], np.asarray(alone)) < 4e-6 and relative(state, np.asarray(last)) < 4e-6


def test_half_precision_rounds_its_arguments_and_its_output_alone(rng):
    arrays = draw(rng, dtype=jnp.bfloat16)
    out, state = run(*arrays, implementation="xla")
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    truth, last = recurrence(*arrays)
    assert relative(out, truth) < 2**-8 and relative(state, last) < 4e-6


@functools.partial(jax.jit, static_argnames="implementation")
def with_gradients(ids, dout, dstate, *arrays, implementation):
    """Output, state, and the gradients by all six arrays."""
    call = lambda *arrays: gated_delta_rule(
        *arrays[:5], segment_ids=ids, state=arrays[5], implementation=implementation
    )
    results, back = jax.vjp(call, *arrays)
    return *results, *back((dout.astype(results[0].dtype), dstate))


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["triton", "mosaic_tpu"])
def test_kernels_in_half_precision_round_operands_of_products(kernel, platform, rng):
    """A small RMS error of output, state and all gradients, beside XLA in float32. The gate's has the most."""
    arrays, ids, before = draw(rng, dtype=jnp.bfloat16), documents(rng), rng.standard_normal((B, H, D, E))
    dout = jnp.asarray(rng.standard_normal((B, T, H, E)), jnp.bfloat16)
    cotangents, before = (dout, rng.standard_normal((B, H, D, E)).astype(np.float32)), before.astype(np.float32)
    results = with_gradients(ids, *cotangents, *arrays, before, implementation=here(kernel, platform))
    wide = [x.astype(jnp.float32) for x in arrays]
    exact = with_gradients(ids, *cotangents, *wide, before, implementation="xla")
    for x, like, truth in zip(results, [arrays[2], before, *arrays, before], exact, strict=True):
        assert x.dtype == like.dtype
        error = np.asarray(x, np.float64) - np.asarray(truth, np.float64)
        assert np.sqrt(np.mean(error**2)) < 2**-6 * np.sqrt(np.mean(np.asarray(truth, np.float64) ** 2))


@pytest.mark.full
@pytest.mark.parametrize("key_heads, heads", [(1, 8), (2, 2), (3, 3)])
def test_heads_of_a_program_on_a_tpu(key_heads, heads, rng, monkeypatch, capfd, caplog):
    """Eight heads of one key take two programs, two heads of keys one, and three heads three; on a TPU's two cores."""
    interpreter = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    monkeypatch.setattr(mosaic_tpu, "tpu_interpreter", lambda _: interpreter)
    params = lambda _, *semantics, **__: pltpu.CompilerParams(dimension_semantics=semantics)
    monkeypatch.setattr(mosaic_tpu, "tpu_params", params)
    q, k, v, gate, beta = draw(rng)
    q, k = (jnp.concatenate([x, x[:, ::-1]], axis=2)[:, :, :key_heads] for x in (q, k))
    v, gate, beta = (jnp.concatenate([x, 0.5 * x], axis=2)[:, :, :heads] for x in (v, gate, beta))
    ids, cotangents = documents(rng), (rng.standard_normal(v.shape), rng.standard_normal((B, heads, D, E)))
    arrays = q, k, v, gate, beta, rng.standard_normal((B, heads, D, E)).astype(np.float32)
    results, truths = (
        with_gradients(ids, *cotangents, *arrays, implementation=name) for name in ("mosaic_tpu:interpret", "xla")
    )
    for x, truth in zip(results, truths, strict=True):
        assert relative(x, np.asarray(truth)) < 1e-5
    assert "RACE DETECTED" not in capfd.readouterr().out + caplog.text


def test_float64_is_kept(rng):
    with jax.enable_x64(True):
        arrays = [np.asarray(x, np.float64) for x in draw(rng, 70)]
        out, state = jax.jit(gated_delta_rule)(*arrays)
        q, k, v, gate, beta = arrays
        gradient = jax.jit(jax.grad(lambda v: jnp.sum(gated_delta_rule(q, k, v, gate, beta)[0])))(v)
    truth, last = recurrence(*arrays)
    assert relative(out, truth) < 1e-13 and relative(state, last) < 1e-13 and gradient.dtype == np.float64


@functools.partial(jax.jit, static_argnames="implementation")
def of_documents(ids, dout, *arrays, implementation):
    """Output, state, and the gradients by all arrays for the output's gradient `dout`."""
    call = functools.partial(gated_delta_rule, segment_ids=ids, implementation=implementation)
    (out, state), back = jax.vjp(call, *arrays)
    return out, state, back((dout, jnp.zeros_like(state)))


@pytest.mark.parametrize("which", range(6))
@kernels_in_full
def test_nan_stays_in_its_document_and_head(kernel, which, platform, rng):
    """An argument's, or the output's gradient's. A head of queries is shared by two of values."""
    arrays = draw(rng)
    ids = np.repeat([[1, 2, 3]], B, axis=0).repeat(T // 3, axis=1).astype(np.int32)
    dout = np.ones((B, T, H, E), np.float32)
    if which == 5:
        dout[0, 70, 1] = np.nan
    else:
        arrays[which] = np.array(arrays[which])
        arrays[which][0, 70, 1] = np.nan
    out, state, gradients = of_documents(ids, dout, *arrays, implementation=here(kernel, platform))
    heads = [2, 3] if which < 2 else [1]
    expected = np.zeros((B, T, H), bool)
    if which < 5:
        expected[0, 70 if which else 70 : 100, heads] = True
    assert np.isnan(out).any(axis=3).tolist() == expected.tolist() and not np.isnan(state).any()
    expected[0, 50:100, heads] = True
    for g in gradients:
        is_nan = np.isnan(g) if g.ndim == 3 else np.isnan(g).any(axis=3)
        wanted = expected.reshape(B, T, is_nan.shape[2], -1).any(axis=3)
        assert is_nan.tolist() == wanted.tolist()


def test_the_backward_keeps_no_state_of_a_chunk(rng):
    """Of 2,048 tokens the states of 32 chunks would be 32 times the state; two are kept, beside one group's."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    types = shape(1, 2048, 1, 64), shape(1, 2048, 1, 64), shape(1, 2048, 1, 64), shape(1, 2048, 1), shape(1, 2048, 1)
    _, vjp = jax.eval_shape(lambda *arrays: jax.vjp(gated_delta_rule, *arrays), *types)
    kept = sum(x.size for x in jax.tree.leaves(vjp) if x.dtype == jnp.float32)
    assert kept < 1.2 * (sum(x.size for x in types) + 2 * 64 * 64)


def test_a_mesh_of_explicit_axes_splits_rows_and_heads(rng, devices):
    arrays, ids = draw(rng), documents(rng)
    mesh = jax.make_mesh((len(devices) // 2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        of_heads = [P("data", None, "tensor", None)] * 3 + [P("data", None, "tensor")] * 2
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, of_heads, strict=True)]
        out, state = jax.jit(lambda ids, *arrays: gated_delta_rule(*arrays, segment_ids=ids))(ids, *placed)
    expected, last = run(*arrays, segment_ids=ids)
    assert relative(out, np.asarray(expected)) < 4e-6 and relative(state, np.asarray(last)) < 4e-6
    assert jax.typeof(out).sharding.spec == of_heads[0]


@pytest.mark.usefixtures("unchecked_types")
def test_refusals(rng):
    q, k, v, gate, beta = draw(rng, 5)
    for arguments, words in (
        ((q, k, v[:, :4], gate, beta), "same B and T"),
        ((q, k[..., :4], v, gate, beta), "k has shape"),
        ((q, k, v, gate[..., :2], beta), "gate has shape"),
        ((q, k, v[:, :, :3], gate, beta), "H a multiple of K"),
    ):
        with pytest.raises(ValueError, match=words):
            gated_delta_rule(*arguments)
    with pytest.raises(ValueError, match="state has shape"):
        gated_delta_rule(q, k, v, gate, beta, state=jnp.zeros((B, H, E, D)))
    with pytest.raises(ValueError, match="scale=nan must be finite"):
        gated_delta_rule(q, k, v, gate, beta, scale=float("nan"))
    with pytest.raises(ValueError, match="segment_ids"):
        gated_delta_rule(q, k, v, gate, beta, segment_ids=jnp.ones((B, 4), jnp.int32))
    with pytest.raises(TypeError, match="floating"):
        gated_delta_rule(q, k, v, gate, jnp.ones((B, 5, H), jnp.int32))
    with pytest.raises(ValueError, match="widths up to 64 of other dtypes"):
        wide = jnp.zeros((B, 5, K, 300))
        gated_delta_rule(wide, wide, v, gate, beta, implementation="triton:interpret")
