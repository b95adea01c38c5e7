"""The losses on a mesh with Auto axes: they wrap themselves where arrays show how they are sharded, else a sentence
helps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import ops
from liger_jax.losses import causal_lm_loss

close: Any = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
B, T, D, V = 4, 6, 16, 24


@pytest.fixture
def mesh(devices):
    shape, types = (len(devices) // 2, 2), (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=types, devices=devices)  # of two devices: (1, 2)


@pytest.fixture
def arrays(rng):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(B, T, D), draw(V, D), jnp.asarray(rng.integers(0, V, (B, T))).at[0, 3:].set(-100)


def placed(mesh, arrays, weight=None):
    specs = P(("data", "fsdp")), weight or P(), P(("data", "fsdp"))
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


@pytest.mark.parametrize(
    "weight, options",
    [
        (P(), {}),
        pytest.param(P("fsdp"), {"mode": "lean"}, marks=pytest.mark.full),
        pytest.param(P(None, "fsdp"), {"reduction": "sum"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_concrete_arrays_get_the_global_mean_and_gradients_that_lie_as_they_do(weight, options, mesh, arrays):
    loss = functools.partial(causal_lm_loss, **options)
    expected, truth = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    hidden, head, labels = placed(mesh, arrays, weight)
    close(loss(hidden, head, labels), expected)
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head, labels)
    close(value, expected)
    jax.tree.map(close, grads, truth)
    assert [x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(grads, (hidden, head), strict=True)]


@pytest.mark.full
def test_labels_of_one_device_are_cut_and_losses_of_tokens_stay_where_they_are(mesh, arrays):
    hidden, head, _ = placed(mesh, arrays)
    losses: Any = causal_lm_loss(hidden, head, arrays[2], reduction="none")
    close(losses, causal_lm_loss(*arrays, reduction="none"))
    assert losses.sharding.spec[0] == ("data", "fsdp")
    found = ops.fused_linear_log_probs(hidden, head, arrays[2]).log_probs
    close(found, ops.fused_linear_log_probs(*arrays).log_probs)


def test_a_head_that_is_not_on_the_mesh_is_refused(mesh, arrays):
    hidden, _, labels = placed(mesh, arrays)
    with pytest.raises(ValueError, match="^causal_lm_loss: "):
        causal_lm_loss(hidden, arrays[1], labels)


@pytest.mark.parametrize(
    "in_context", [True, pytest.param(False, marks=pytest.mark.full)], ids=["in context", "no context"]
)
def test_under_jit_the_sentence_shows_the_call_with_the_axes_and_the_call_is_right(in_context, mesh, arrays):
    hidden, head, labels = placed(mesh, arrays)
    with jax.set_mesh(mesh) if in_context else jax.default_matmul_precision("float32"):
        with pytest.raises(ValueError, match=r"write jax\.shard_map") as error:
            jax.jit(ops.fused_linear_cross_entropy)(hidden, head, labels)
    call, _, rest = (
        str(error.value).partition("write ")[2].partition(", where num_tokens is the number of tokens that ")
    )
    assert rest.startswith(
        "are scored. P() gathers a weight that is split: if another axis splits its vocabulary, name"
    )
    assert "With token_weights or class_weights, divide by the sum of the weights" in rest and "refused, too." in rest
    assert ("leave one out that holds the vocabulary" in str(error.value)) == (mesh.shape["data"] > 1)
    assert ("('data', 'fsdp')" if mesh.shape["data"] > 1 else "'fsdp'") in call
    names = dict(jax=jax, P=P, mesh=mesh, num_tokens=B * T - 3)
    names["fused_linear_cross_entropy"] = ops.fused_linear_cross_entropy
    run = jax.jit(lambda arrays: eval(call, names | arrays))
    found = run(dict(hidden=hidden, weight=head, labels=labels))
    close(found, jax.jit(ops.fused_linear_cross_entropy)(*arrays))


def test_the_sentences_of_other_losses_show_calls_that_are_right(mesh, arrays):
    hidden, head, labels = placed(mesh, arrays)
    loss_fn, per_token = lambda p, t: -t * p, (jnp.where(labels < 0, 0.0, 1.0),)
    ids, log_probs = jnp.zeros((B, T, 1), jnp.int32), jnp.full((B, T, 1), -1.0)
    names = dict(jax=jax, P=P, mesh=mesh, num_tokens=B * T, loss_fn=loss_fn, token_ids=ids, log_probs=log_probs)
    names |= dict(hidden=hidden, weight=head, head=head, labels=labels, per_token=per_token)
    names |= dict(student_hidden=hidden, student_weight=head, teacher_hidden=2 * hidden, teacher_weight=head)
    topk = functools.partial(ops.fused_linear_topk_distillation, tail="bucket")
    token_loss = lambda h, w, y, t, denominator=B * T: ops.fused_linear_token_loss(
        loss_fn, h, w, y, t, denominator=denominator
    )
    calls = {
        "causal_lm_loss": (causal_lm_loss, ("hidden", "head", "labels"), B * (T - 1) - 3),
        "fused_linear_log_probs": (ops.fused_linear_log_probs, ("hidden", "weight", "labels"), None),
        "fused_linear_token_loss": (token_loss, ("hidden", "weight", "labels", "per_token"), B * T),
        "fused_linear_distillation": (
            ops.fused_linear_distillation,
            ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight"),
            B * T,
        ),
        "fused_linear_topk_distillation": (topk, ("hidden", "weight", "token_ids", "log_probs"), B * T),
    }
    for op, (loss, arguments, num_tokens) in calls.items():
        given = [names[name] for name in arguments]
        with pytest.raises(ValueError, match=f"^{op}") as error:
            jax.eval_shape(loss, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given))
            jax.jit(loss).lower(*given)
        call = str(error.value).partition("write ")[2].partition(", where num_tokens")[0].partition(". P() gathers")[0]
        public = topk if op == "fused_linear_topk_distillation" else getattr(ops, op, causal_lm_loss)
        found = jax.tree.leaves(
            jax.eval_shape(lambda call=call, n=names | {op: public, "num_tokens": num_tokens}: eval(call, n))
        )
        expected: Any = jax.eval_shape(loss, *jax.device_get(given))
        expected = expected[0] if op == "fused_linear_token_loss" else expected
        assert [x.shape for x in found] == [x.shape for x in jax.tree.leaves(expected)], call
