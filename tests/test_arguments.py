"""Every public function of ops and losses refuses a wrong argument in a sentence of its own, or computes with it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import losses, ops

N, D, V, E, K, F = 6, 8, 11, 4, 2, 5
FUNCTIONS = {
    name: function
    for module in (ops, losses)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__name__ == name
}
pytestmark = pytest.mark.usefixtures("unchecked_types")  # wrong arguments are for our own errors


def f(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def i(below, *shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, below, size=shape), jnp.int32)


def all_true(*shape):
    return jnp.ones(shape, bool)


def calls() -> dict[str, dict[str, Any]]:
    """A call of each function, with all arrays that it takes."""
    heads = dict(q=f(1, 5, 2, D), k=f(1, 5, 2, D))
    cos, sin = ops.rope_table(jnp.arange(5)[None], D)
    sums, tokens = ops.router_sums(f(N, E), i(E, N, K)), dict(labels=i(V, N), where=all_true(N))
    linear = dict(hidden=f(N, D), weight=f(V, D), bias=f(V))
    weights = dict(token_weights=f(N) ** 2, class_weights=f(V) ** 2)
    both = dict(student_hidden=f(N, D), student_weight=f(V, D), teacher_hidden=f(N, F), teacher_weight=f(V, F))
    logits = dict(student=f(N, V), teacher=f(N, V), where=all_true(N))
    p, mask, places = -(f(4) ** 2), all_true(4, 5), jnp.asarray([[0, 0], [0, 1], [1, 0], [1, 1]])
    pairs, means = dict(chosen=p, rejected=2 * p), dict(chosen=p - 0.1, rejected=2 * p - 0.1)
    packed = dict(segment_ids=jnp.asarray([[1, 1, 2, 2, 0]] * 4), num_segments=2)
    lp, row = -(f(4, 5) ** 2) - 0.1, jnp.asarray([[1, 1, 1, 2, 2]])
    policy = dict(log_probs=lp, old_log_probs=lp, reference_log_probs=lp, importance_ratio=lp, beta=0.1)
    log_p = jax.nn.log_softmax(f(N, V))
    return dict(
        apply_rope=dict(**heads, cos=cos, sin=sin),
        apply_mrope=dict(**heads, cos=jnp.stack([cos] * 3), sin=jnp.stack([sin] * 3), sections=(2, 1, 1)),
        rope_table=dict(positions=jnp.arange(5)[None], width=D),
        balancing_loss=dict(sums=sums),
        expert_load=dict(sums=sums),
        router_z_loss=dict(sums=sums),
        router_sums=dict(logits=f(N, E), experts=i(E, N, K), where=all_true(N)),
        softmax_top_k=dict(logits=f(N, E), k=2, normalized=True),
        top_k_softmax=dict(logits=f(N, E), k=2),
        grouped_matmul=dict(x=f(N, D), w=f(E, D, F), group_sizes=jnp.asarray([1, 2, 3, 0])),
        moe_mlp=dict(
            x=f(N, D), weights=f(N, K), experts=i(E, N, K), gate_up=f(E, D, 2 * F), down=f(E, F, D),
            gate_up_bias=f(E, 2 * F), down_bias=f(E, D), activation="silu",
        ),
        block_quantized=dict(weight=f(64, D), kind="nf4"),
        causal_attention=dict(**heads, v=f(1, 5, 2, D), segment_ids=row, sinks=f(2)),
        gated_delta_rule=dict(**heads, v=f(1, 5, 2, 4), gate=-(f(1, 5, 2) ** 2), beta=f(1, 5, 2) ** 2, segment_ids=row),
        causal_conv1d=dict(x=f(1, 5, D), weight=f(D, 4), bias=f(D), segment_ids=row),
        cross_entropy=dict(logits=f(N, V), **tokens, **weights),
        fused_linear_cross_entropy=dict(**linear, **tokens, **weights),
        fused_linear_log_probs=dict(**linear, **tokens),
        fused_linear_token_loss=dict(
            loss_fn=lambda log_p, w: -w * log_p, **linear, **tokens, per_token=(f(N),), denominator=3.0
        ),
        fused_linear_distillation=dict(**both, **tokens, student_bias=f(V), teacher_bias=f(V)),
        fused_linear_topk_distillation=dict(**linear, **tokens, token_ids=i(V, N, 1), log_probs=log_p[:, :1]),
        plan_fused_linear_cross_entropy=dict(n=128, d=64, v=1000),
        rms_norm=dict(x=f(N, D), scale=f(D)),
        layer_norm=dict(x=f(N, D), scale=f(D), bias=f(D)),
        group_norm=dict(x=f(2, D, 3), scale=f(D), bias=f(D), num_groups=2),
        fused_add_rms_norm=dict(x=f(N, D), residual=f(N, D), scale=f(D)),
        gated_rms_norm=dict(x=f(N, D), gate=f(N, D), scale=f(D)),
        poly_norm=dict(x=f(N, D), weight=f(3), bias=f()),
        dyt=dict(x=f(N, D), alpha=f(), scale=f(D), bias=f(D)),
        gated_mlp=dict(x=f(N, D), gate_kernel=f(D, F), up_kernel=f(D, F), down_kernel=f(F, D), activation="silu"),
        geglu=dict(gate=f(N, D), up=f(N, D)),
        swiglu=dict(gate=f(N, D), up=f(N, D)),
        relu_squared=dict(x=f(N, D)),
        softmax=dict(x=f(N, D), where=all_true(N, D)),
        sparsemax=dict(x=f(N, D)),
        softmax_cross_entropy_with_integer_labels=dict(logits=f(N, V), **tokens),
        causal_lm_loss=dict(hidden=f(1, 5, D), head=f(V, D), labels=i(V, 1, 5), segment_ids=row),
        shifted_labels=dict(labels=i(V, 1, 5), segment_ids=row),
        cosine_distance=dict(predictions=f(N, D), targets=f(N, D), where=all_true(N, D)),
        kl_divergence=dict(log_predictions=log_p, targets=jnp.exp(log_p), where=all_true(N, V)),
        **dict.fromkeys(("forward_kl", "reverse_kl", "tv_distance", "js_divergence", "gkd_loss"), logits),
        dpo_loss=dict(**pairs, reference_chosen=p, reference_rejected=p, pair_weights=p**2),
        cpo_loss=dict(**pairs, chosen_nll=-p),
        orpo_loss=dict(**means, chosen_nll=-p),
        simpo_loss=means,
        alphapo_loss=dict(**means, reward_alpha=0.25),
        kto_loss=dict(log_probs=p, reference_log_probs=p, desirable=all_true(4), kl=p),
        running_baseline=dict(log_ratios=p, where=all_true(4)),
        group_advantages=dict(rewards=f(2, 4), where=all_true(2, 4)),
        reinforce_advantages=dict(rewards=p, where=all_true(4)),
        reverse_kl_advantages=dict(sampled_log_probs=lp, teacher_log_probs=lp),
        policy_loss=dict(**policy, entropy=-lp, entropy_coef=0.1, advantages=f(4, 2), mask=mask, **packed),
        policy_token_loss=dict(**policy, advantages=f(4, 5)),
        policy_weights=dict(mask=mask, **packed),
        mask_truncated=dict(mask=mask, truncated=all_true(4, 2), **packed),
        importance_sampling_ratio=dict(old_log_probs=lp, sampling_log_probs=lp, mask=mask, **packed),
        sequence_log_probs=dict(log_probs=lp, where=mask, **packed),
        wpo_weights=dict(log_probs=lp, log_sum_of_squares=lp, where=mask, **packed),
        take_segments=dict(values=f(4, 2), places=places),
        place_segments=dict(values=p, places=places, shape=(2, 2)),
        spread_segments=dict(values=f(4, 2), segment_ids=packed["segment_ids"]),
    )  # fmt: skip


def wrong_arrays(x):
    """Values that are no array, and arrays of other shapes and dtypes."""
    yield from (None, "text", object(), {"a": 1}, [[1, 2], [3]], (x, x), 1.5, 3, True, 10**30, jax.random.key(0))
    yield from (x.astype(dtype) for dtype in (bool, jnp.int32, jnp.float32, jnp.complex64))
    yield from (x.reshape(-1)[0], x.reshape(-1), x[None], x[..., None])
    if x.ndim:
        yield from (x[0], x[:0], x[:1], x[..., :1], jnp.concatenate([x, x[:1]]))
        yield from (jnp.concatenate([x, x[..., :1]], axis=-1), jnp.swapaxes(x, 0, -1))


# Ops whose kernels an op runs: their names begin messages about `implementation`.
_OPS_WITHIN = dict(
    moe_mlp=["grouped_matmul"],
    fused_linear_log_probs=["fused_linear_cross_entropy"],
    fused_linear_token_loss=["fused_linear_cross_entropy"],
    plan_fused_linear_cross_entropy=["fused_linear_cross_entropy"],
)


def raw_errors(name, good, wrong):
    """The errors of calls with one argument that is wrong which are not sentences of the function's own."""
    raw = []
    for argument, values in wrong.items():
        for value in values:
            try:
                FUNCTIONS[name](**good | {argument: value})
            except (TypeError, ValueError) as error:
                if str(error).partition(": ")[0] in (name, *_OPS_WITHIN.get(name, ())):
                    continue
                raw.append((argument, value, error))
            except Exception as error:
                raw.append((argument, value, error))
    return [
        f"{name}({argument}={value!r:.60}): {type(error).__name__}: {error!s:.120}" for argument, value, error in raw
    ]


def test_every_public_function_has_a_call():
    assert calls().keys() == FUNCTIONS.keys()
    for name, good in calls().items():
        FUNCTIONS[name](**good)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_array_that_is_wrong_is_refused_in_a_sentence(name):
    good = calls()[name]
    arrays = {argument: wrong_arrays(x) for argument, x in good.items() if isinstance(x, jax.Array)}
    assert not raw_errors(name, good, arrays)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_that_is_wrong_is_refused_in_a_sentence(name):
    good = calls()[name]
    wrong = object(), "text", {"a": 1}, jnp.arange(3.0), jax.random.key(0)
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    options = {p.name: wrong for p in parameters if p.name not in good and p.kind is not p.VAR_KEYWORD}
    options |= {option: wrong for option, x in good.items() if not isinstance(x, jax.Array) and option != "loss_fn"}
    assert not raw_errors(name, good, options)


@pytest.mark.parametrize("name", ["balancing_loss", "router_z_loss", "expert_load"])
def test_what_are_no_sums_of_a_router_are_refused(name):
    for wrong in (None, f(3), "text", ops.softmax_top_k(f(N, E), K, normalized=True), {"chosen": f(3)}):
        with pytest.raises(TypeError, match=rf"{name}: sums is a \w+, but must be RouterSums; pass router_sums\("):
            FUNCTIONS[name](wrong)


def test_the_message_says_what_was_given():
    with pytest.raises(TypeError, match="rms_norm: x is None, but must be an array of numbers, of JAX or NumPy."):
        ops.rms_norm(None)
    with pytest.raises(TypeError, match="cross_entropy: labels is a str, but must be integers, of JAX or NumPy."):
        ops.cross_entropy(f(N, V), "text")
    with pytest.raises(ValueError, match=r"kl_divergence: log_predictions \(6, 11\) and targets \(6, 8\) do not broad"):
        losses.kl_divergence(f(N, V), f(N, D))
    with pytest.raises(ValueError, match=r"shifted_labels: segment_ids has shape \(1, 4\), but must have shape \(1, 5"):
        losses.shifted_labels(i(V, 1, 5), jnp.ones((1, 4), int))
