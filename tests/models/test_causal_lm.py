"""The contract of a call: labels, what is scored, and when logits come to exist."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import ops
from liger_jax.models import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    KernelOptions,
    LlamaConfig,
    Qwen2ForCausalLM,
)
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope
from liger_jax.ops.linear.plan import budget_beside_layers
from liger_jax.planner.planning import make_run
from tests.models._llama import CONFIG, loss_and_gradients, make_model, random_tokens
from tests.ops._oracle import first

LOGITS_KERNELS = {
    "cross_entropy kernel": KernelOptions(cross_entropy=True, fused_linear_cross_entropy=False),
    "plain": KernelOptions(fused_linear_cross_entropy=False),
}
H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def tokens(rng):
    return random_tokens(rng)


@nnx.jit
def all_logits(model, tokens):
    return model(tokens).logits


@nnx.jit
def loss_of(model, tokens, **arrays):
    return model(tokens, **arrays).loss


@pytest.fixture
def budgets(monkeypatch):
    """The memory budgets that models give to their fused losses."""
    found, loss = [], ops.fused_linear_cross_entropy

    def recording(*arrays, memory_budget_bytes, **options):
        found.append(memory_budget_bytes)
        return loss(*arrays, memory_budget_bytes=memory_budget_bytes, **options)

    monkeypatch.setattr(ops, "fused_linear_cross_entropy", recording)
    return found


def token_losses(model, tokens):
    """−log p(tokens[:, t + 1]) for each t but the last, from all logits."""
    log_p = jax.nn.log_softmax(all_logits(model, tokens))
    return -jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


# --- the loss's memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat, is_bounded", [("none", False), ("full", True), ("dots", True)])
def test_beside_layers_that_are_made_again_the_loss_is_bounded(remat, is_bounded, tokens, budgets):
    loss_of = nnx.jit(lambda model: model(tokens, labels=tokens).loss)
    loss = loss_of(make_model(remat=remat))
    close(loss, loss_of(make_model()))
    assert budgets[-1] is None  # one of equal models is traced once
    assert (budgets[0] is not None) == is_bounded


def test_a_named_budget_or_mode_is_not_overridden(tokens, budgets):
    for options in (dict(memory_budget_bytes=2**30), dict(mode="fast"), dict(mode="lean")):
        nnx.eval_shape(
            lambda model: model(tokens, labels=tokens).loss, make_model(kernels=KernelOptions(**options), remat="full")
        )
    assert budgets == [2**30, None, None]
    with pytest.raises(ValueError, match="memory_budget_bytes=1 is too small"):
        make_model(kernels=KernelOptions(memory_budget_bytes=1))(tokens, labels=tokens)


def loss_budget(remat, config, tokens, weight_dtype, *, is_copied=False, is_widened=False, device=H200):
    """The memory budget that a bfloat16 model of this config gives to its fused loss."""
    return budget_beside_layers(
        tokens,
        config.hidden_size,
        config.vocab_size,
        f=config.intermediate_size,
        f_tokens=tokens,
        dtype=jnp.bfloat16,
        weight_dtype=weight_dtype,
        layers_are_recomputed=remat != "none",
        head_is_copied=is_copied,
        head_is_widened=is_widened,
        device=device,
    )


def test_the_bound_is_a_layers_memory_or_the_least_that_the_loss_needs():
    config = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192)

    def bound(tokens, dtype=jnp.bfloat16, **options):
        return loss_budget("full", config, tokens, dtype, **options) or 0

    assert loss_budget("none", config, 16384, jnp.bfloat16) is None
    gate_up_and_product = 3 * 16384 * 8192 * 2
    assert gate_up_and_product < bound(16384) < 1.5 * gate_up_and_product
    assert bound(16384) == pytest.approx(2 * bound(8192), rel=0.01)
    copy_of_the_head = 128256 * 2048 * 2
    assert bound(16384, jnp.float32, is_copied=True) == bound(16384) + copy_of_the_head
    assert bound(16384, jnp.float32) == bound(16384)
    mixed = dict(weight_dtype=jnp.float32, device=H200)
    plans = [ops.plan_fused_linear_cross_entropy(1, 2048, 128256, mode=mode, **mixed) for mode in ("fast", "lean")]
    assert bound(1, jnp.float32) == min(plan.extra_bytes for plan in plans)


def test_beside_kept_layers_a_float32_gradient_of_the_head_is_not_made_in_one_chunk():
    config = LlamaConfig(vocab_size=151936, hidden_size=896, intermediate_size=4864)
    plan = functools.partial(ops.plan_fused_linear_cross_entropy, d=896, v=151936, weight_dtype=jnp.float32)

    def plans(tokens, is_widened=True, device=H200):
        """The fused loss's budget without the bound, and with it."""
        bound = loss_budget("none", config, tokens, jnp.float32, is_widened=is_widened, device=device)
        return plan(tokens, device=device), plan(tokens, memory_budget_bytes=bound, device=device)

    free, bounded = plans(4096)
    assert free.chunk_size == 4096 and bounded.mode == "fast" and bounded.chunk_size == 2048
    assert bounded.extra_bytes < free.extra_bytes - 300 * 2**20
    for tokens, options in (
        (1024, {}),  # only the lean mode is smaller
        (2048, {}),  # chunks of 1,024 would be slow
        (16384, {}),  # a chunk is a part of these anyway
        (4096, dict(is_widened=False)),
        (4096, dict(device=AbstractDevice("NVIDIA A100", 108, "gpu"))),
    ):
        free, bounded = plans(tokens, **options)
        assert free == bounded


@pytest.mark.parametrize("is_tied", [True, False])
def test_model_and_planner_give_the_loss_the_same_bound(is_tied, budgets):
    run = make_run("qwen2-0.5b", batch=8, seq=512, device="h200", param_dtype="bfloat16", remat="none")
    config = dataclasses.replace(run.model.config, tie_word_embeddings=is_tied)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, config=config))
    create = lambda: Qwen2ForCausalLM(
        config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, remat="none"
    )
    graph, params = nnx.split(nnx.eval_shape(create))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=H200)):
        ids = jax.ShapeDtypeStruct((8, 512), jnp.int32)
        jax.eval_shape(lambda params, ids: nnx.merge(graph, params)(ids, labels=ids).loss, params, ids)
    assert run.loss_plan().chunk_size == (2048 if is_tied else 4096)
    assert budgets == [run.loss_plan().extra_bytes if is_tied else None]


@pytest.mark.parametrize("head", first(2, [(128264, None), (128256, 100.0), (128256, None), (50257, 30.0)]), ids=str)
@pytest.mark.parametrize("param_dtype", first(1, [jnp.bfloat16, jnp.float32]))
@pytest.mark.parametrize("tokens", first(1, [(1, 1), (2, 50), (8, 2048)]))
def test_the_bound_is_of_the_kernels_that_run(head, param_dtype, tokens):
    """On Hopper vocabularies and softcaps decide on them, and on whether a mode's are others than "auto"'s."""
    vocab_size, softcap = head
    sizes = dict(vocab_size=vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64)
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=softcap)
    options = dict(remat="full", dtype=jnp.bfloat16, param_dtype=param_dtype)
    model = lambda: Gemma2ForCausalLM(config, rngs=nnx.Rngs(0), **options)
    graph, params = nnx.split(nnx.eval_shape(model))
    loss = lambda params, ids: nnx.merge(graph, params)(ids, labels=ids).loss
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=H200)):
        ids = jax.ShapeDtypeStruct(tokens, jnp.int32)
        assert jax.eval_shape(loss, params, ids).shape == ()
        jax.eval_shape(jax.grad(loss), params, ids)


# --- the table of design: labels, return_logits → logits, loss ------------------------------------------------------


@pytest.mark.parametrize("return_logits", [None, True])
def test_without_labels_come_the_logits_of_kept_positions(model, tokens, return_logits):
    output = model(tokens, return_logits=return_logits, logits_to_keep=3)
    assert output.loss is None and output.metrics is None
    assert output.logits.dtype == jnp.float32
    close(output.logits, all_logits(model, tokens)[:, -3:])


def test_without_labels_and_logits_nothing_comes(model, tokens):
    output = model(tokens, return_logits=False)
    assert output.loss is None and output.logits is None and output.metrics is None


@pytest.mark.parametrize("return_logits", [False, True])
def test_metrics_without_labels_are_the_logits_argmax_and_maximum(model, tokens, return_logits):
    output, logits = model(tokens, return_logits=return_logits, return_metrics=True), all_logits(model, tokens)
    assert (output.logits is None) == (not return_logits)
    np.testing.assert_array_equal(output.metrics.predicted_tokens, logits.argmax(-1))
    close(output.metrics.max_logit, logits.max(-1))
    close(output.metrics.log_normalizer, jax.nn.logsumexp(logits, -1))
    assert output.metrics.num_tokens == 0 and output.metrics.accuracy == 0


@pytest.mark.parametrize("return_logits", [None, False])
@pytest.mark.parametrize("kernels", [KernelOptions(), *LOGITS_KERNELS.values()], ids=["fused", *LOGITS_KERNELS])
def test_with_labels_comes_the_loss_alone(tokens, return_logits, kernels):
    model = make_model(kernels=kernels)
    output = model(tokens, labels=tokens, return_logits=return_logits)
    assert output.logits is None and output.metrics is None
    assert output.loss.dtype == jnp.float32
    close(output.loss, token_losses(model, tokens).mean())


@pytest.mark.parametrize("kernels", [KernelOptions(), *LOGITS_KERNELS.values()], ids=["fused", *LOGITS_KERNELS])
def test_with_labels_and_return_logits_the_loss_is_that_of_these_logits(tokens, kernels):
    model = make_model(kernels=kernels)
    output = model(tokens, labels=tokens, return_logits=True)
    close(output.logits, all_logits(model, tokens))
    close(output.loss, token_losses(model, tokens).mean())


def test_logits_are_computed_once_when_a_loss_is_returned_too(model, tokens):
    graph, params = nnx.split(model)
    call = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens, return_logits=True)
    jaxpr = str(jax.make_jaxpr(call)(params, tokens))
    assert jaxpr.count(f"f32[{tokens.shape[0]},{tokens.shape[1]},{CONFIG.vocab_size}] = dot_general") == 1


@pytest.mark.parametrize("return_metrics", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_no_logits_buffer_where_no_logits_are_returned(labelled, return_metrics):
    batch, length, vocab = 4, 1024, 1536  # tokens enough for several chunks on every platform
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    graph, params = nnx.split(make_model(config))

    def result(params, tokens, **arguments):
        output = nnx.merge(graph, params)(tokens, return_metrics=return_metrics, **arguments)
        return (output.loss, output) if labelled else output

    def step(params, tokens):
        if not labelled:
            return result(params, tokens, return_logits=False)
        return jax.value_and_grad(result, has_aux=True)(params, tokens, labels=tokens)

    program = jax.jit(step).lower(params, jax.ShapeDtypeStruct((batch, length), jnp.int32)).compile().as_text() or ""
    assert f"[{batch},{length},{vocab}]" not in program
    assert f"[{batch * length},{vocab}]" not in program and f"[{vocab},{batch * length}]" not in program


def test_metrics_without_labels_take_the_one_product_that_logits_take(model, tokens):
    graph, params = nnx.split(model)
    call = lambda options: jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens, **options))
    products = lambda **options: call(options).lower(params, tokens).as_text().count("dot_general")
    assert products(return_logits=False, return_metrics=True) == products() == products(return_metrics=True)


@pytest.mark.parametrize("kernels", LOGITS_KERNELS.values(), ids=LOGITS_KERNELS)
def test_loss_on_logits_has_the_fused_loss_and_gradients(tokens, kernels):
    fused, on_logits = (loss_and_gradients(make_model(kernels=k), tokens, {}) for k in (KernelOptions(), kernels))
    jax.tree.map(functools.partial(close, atol=1e-5), on_logits, fused)


@pytest.mark.parametrize("cross_entropy", [True, False])
def test_the_loss_on_logits_is_the_op_s_if_that_is_asked_for(cross_entropy, tokens, monkeypatch):
    calls, op = [], ops.cross_entropy
    monkeypatch.setattr(ops, "cross_entropy", lambda *args, **options: calls.append(args) or op(*args, **options))
    kernels = KernelOptions(cross_entropy=cross_entropy, fused_linear_cross_entropy=False)
    make_model(kernels=kernels)(tokens, labels=tokens)
    assert len(calls) == cross_entropy


def test_both_losses_at_once_are_refused():
    with pytest.raises(ValueError, match="exclude each other.*Pass fused_linear_cross_entropy=False"):
        KernelOptions(cross_entropy=True)


# --- labels ---------------------------------------------------------------------------------------------------------


def test_position_t_is_scored_against_the_label_at_t_plus_1(model, tokens):
    shifted = jnp.concatenate([tokens[:, 1:], jnp.full_like(tokens[:, :1], -100)], axis=1)
    close(model(tokens, labels=tokens).loss, model(tokens, shift_labels=shifted).loss)
    other_first = tokens.at[:, 0].add(1) % CONFIG.vocab_size  # a label that nothing predicts
    assert model(tokens, labels=tokens).loss == model(tokens, labels=other_first).loss


def test_labels_of_minus_100_are_not_scored(model, tokens):
    labels = tokens.at[0, 3:7].set(-100).at[1].set(-100)
    scored = np.asarray(token_losses(model, tokens))[0, [0, 1, 6, 7, 8, 9, 10]]
    close(model(tokens, labels=labels).loss, scored.mean())


@pytest.mark.parametrize("kernels", [KernelOptions(), *LOGITS_KERNELS.values()], ids=["fused", *LOGITS_KERNELS])
@pytest.mark.parametrize("dtype", first(1, [jnp.uint8, jnp.uint32]))
def test_tokens_may_be_unsigned(kernels, dtype, tokens):
    """Unsigned labels cannot hold -100, the label of ignored positions; 8 bits cannot hold a vocabulary's size."""
    model = make_model(dataclasses.replace(CONFIG, vocab_size=256), kernels=kernels)
    tokens = tokens.at[0, :2].set(jnp.array([156, 255]))
    unsigned = tokens.astype(dtype)
    close(model(unsigned, labels=unsigned).loss, model(tokens, labels=tokens).loss)
    close(model(unsigned, shift_labels=unsigned).loss, model(tokens, shift_labels=tokens).loss)


def test_packed_segments_are_scored_as_if_they_were_alone(model, rng):
    first, second = random_tokens(rng, 1, 5), random_tokens(rng, 1, 7)
    packed, segments = jnp.concatenate([first, second], axis=1), jnp.array([[1] * 5 + [2] * 7])
    apart = [loss_of(model, part, labels=part, loss_normalizer=10) for part in (first, second)]
    close(loss_of(model, packed, labels=packed, segment_ids=segments), sum(apart))


def test_padding_changes_nothing(model, rng):
    tokens, filler = random_tokens(rng, 2, 9), random_tokens(rng, 2, 3)
    loss = loss_of(model, tokens, labels=tokens)
    for side in (lambda x, pad: [x, pad], lambda x, pad: [pad, x]):
        join = lambda x, pad, side=side: jnp.concatenate(side(x, pad), axis=1)
        mask = join(jnp.ones_like(tokens), jnp.zeros_like(filler))
        labels = join(tokens, jnp.full_like(filler, -100))
        labels = jnp.where((jnp.cumsum(mask, axis=1) == 1) & (mask == 1), -100, labels)  # none predicts the first
        close(loss_of(model, join(tokens, filler), labels=labels, attention_mask=mask), loss)


def test_padding_may_have_any_id(model, tokens):
    mask = jnp.ones(tokens.shape, jnp.int32).at[:, -3:].set(0)
    labels = jnp.where(mask == 0, -100, tokens)
    loss = lambda ids: loss_of(model, ids, labels=labels, attention_mask=mask)
    for padding in (-1, CONFIG.vocab_size):
        assert loss(jnp.where(mask == 0, padding, tokens)) == loss(tokens)


@pytest.mark.parametrize(
    "kernels", first(1, [LOGITS_KERNELS["plain"], KernelOptions(), LOGITS_KERNELS["cross_entropy kernel"]])
)
def test_token_scaling_multiplies_losses_by_probabilities_without_gradient(kernels, tokens, rng):
    weights = jnp.asarray(rng.uniform(0.5, 2.0, tokens.shape), jnp.float32)

    def scaled(model):
        return model(tokens, labels=tokens, loss_weights=weights, token_scaling=True).loss

    def expected(model):
        losses = token_losses(model, tokens)
        p = jax.lax.stop_gradient(jnp.exp(-losses))
        return jnp.sum(weights[:, :-1] * p * losses) / jnp.sum(weights[:, :-1])

    model = make_model(kernels=kernels)
    found, truth = (nnx.jit(nnx.value_and_grad(f))(model) for f in (scaled, expected))
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4 * np.max(np.abs(y))), found, truth)


def test_loss_weights_weigh_scoring_positions(model, tokens, rng):
    weights = jnp.asarray(rng.uniform(0.0, 2.0, tokens.shape), jnp.float32)
    scored = weights[:, :-1]
    expected = (scored * token_losses(model, tokens)).sum() / scored.sum()
    close(model(tokens, labels=tokens, loss_weights=weights).loss, expected)


@pytest.mark.parametrize("kernels", [KernelOptions(), KernelOptions.off()], ids=["kernels", "plain"])
def test_four_micro_batches_add_up_to_one_batch(rng, kernels):
    model, tokens = make_model(kernels=kernels), random_tokens(rng, 8, 12)
    labels = jnp.where(jnp.asarray(rng.uniform(size=tokens.shape)) < 0.4, -100, tokens)  # unequal shares
    count = jnp.sum(labels[:, 1:] != -100)
    whole = loss_and_gradients(model, tokens, dict(labels=labels))
    parts = [
        loss_and_gradients(model, tokens[i : i + 2], dict(labels=labels[i : i + 2], loss_normalizer=count))
        for i in range(0, 8, 2)
    ]
    jax.tree.map(lambda whole, *parts: close(sum(parts), whole, atol=1e-6), whole, *parts)


@pytest.mark.parametrize(
    "kernels, scan_layers, tied", [(KernelOptions(), True, True), (LOGITS_KERNELS["plain"], False, False)]
)
def test_a_batch_of_no_sequences_has_loss_0_and_no_gradient(kernels, scan_layers, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    model = make_model(config, kernels=kernels, scan_layers=scan_layers)
    loss, gradients = loss_and_gradients(model, jnp.zeros((0, 5), jnp.int32), {})
    assert loss == 0
    assert not any(jnp.any(gradient) for gradient in jax.tree.leaves(gradients))


def test_metrics_count_what_is_scored(model, tokens):
    labels = tokens.at[0, 3:7].set(-100)
    metrics = model(tokens, labels=labels, return_metrics=True).metrics
    predicted = all_logits(model, tokens).argmax(-1)
    counts = np.asarray(labels[:, 1:] != -100)
    assert metrics.num_tokens == counts.sum()
    close(metrics.accuracy, np.asarray(predicted[:, :-1] == tokens[:, 1:])[counts].mean())
    np.testing.assert_array_equal(metrics.predicted_tokens[:, -1], -1)


# --- logits_to_keep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", first(3, [1, 12, np.array([0, 5, 5, -2]), 4, 0, np.array([10])]), ids=str)
@pytest.mark.parametrize("return_logits", [False, True])
def test_each_kept_position_keeps_its_label(model, tokens, kept, return_logits):
    index = np.arange(12)[-kept if kept else 0 :] if isinstance(kept, int) else kept
    keep = kept if isinstance(kept, int) else jnp.asarray(kept)
    shift_labels = jnp.roll(tokens, -1, axis=1)  # the last position counts too
    log_p = jax.nn.log_softmax(all_logits(model, tokens))
    losses = -jnp.take_along_axis(log_p, shift_labels[..., None], axis=-1)[..., 0]
    output = model(tokens, shift_labels=shift_labels, logits_to_keep=keep, return_logits=return_logits)
    close(output.loss, losses[:, index].mean())
    if return_logits:
        close(output.logits, all_logits(model, tokens)[:, index])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_hidden_states_are_cut_before_the_head_in_training_and_evaluation(tokens, mode):
    model = make_model(kernels=KernelOptions.off())
    getattr(model, mode)()
    graph, params = nnx.split(model)
    call = lambda params: nnx.merge(graph, params)(tokens, labels=tokens, logits_to_keep=2).loss
    jaxpr = str(jax.make_jaxpr(jax.value_and_grad(call))(params))
    assert f"[2,2,{CONFIG.vocab_size}]" in jaxpr and f"[2,12,{CONFIG.vocab_size}]" not in jaxpr


def test_a_kept_position_outside_the_sequence_is_refused_and_under_jit_nan(model, tokens):
    keep = jnp.array([3, 12])
    with pytest.raises(ValueError, match=r"logits_to_keep holds 12.*\[-12, 12\)"):
        model(tokens, labels=tokens, logits_to_keep=keep)
    call = nnx.jit(lambda model, keep: model(tokens, labels=tokens, logits_to_keep=keep, return_logits=True))
    output = call(model, keep)
    assert jnp.isnan(output.loss) and jnp.isnan(output.logits[:, 1]).all()
    assert jnp.isfinite(output.logits[:, 0]).all()


# --- errors ---------------------------------------------------------------------------------------------------------

IDS = jnp.zeros((2, 12), jnp.int32)
WRONG_CALLS = {
    "labels": (dict(labels=IDS[:, 1:]), ValueError, r"labels has shape \(2, 11\).*\(2, 12\).*not shifted"),
    "shift_labels": (dict(shift_labels=IDS[:1]), ValueError, r"shift_labels has shape \(1, 12\).*\(2, 12\)"),
    "both": (dict(labels=IDS, shift_labels=IDS), ValueError, "exclude each other"),
    "loss_weights": (dict(labels=IDS, loss_weights=jnp.ones(12)), ValueError, r"loss_weights has shape \(12,\)"),
    "token_scaling alone": (dict(token_scaling=True), ValueError, "token_scaling .*without labels"),
    "loss_weights alone": (dict(loss_weights=jnp.ones((2, 12))), ValueError, "loss_weights .*without labels"),
    "loss_normalizer alone": (dict(loss_normalizer=3.0), ValueError, "loss_normalizer .*without labels"),
    "loss_normalizer": (dict(labels=IDS, loss_normalizer=jnp.ones(2)), ValueError, "must be a scalar"),
    "too many kept": (dict(logits_to_keep=13), ValueError, r"logits_to_keep=13 .*\[0, 12\]"),
    "negative kept": (dict(logits_to_keep=-1), ValueError, r"logits_to_keep=-1"),
    "kept matrix": (dict(logits_to_keep=IDS), ValueError, "logits_to_keep has shape.*one-dimensional"),
    "kept text": (dict(logits_to_keep="last"), TypeError, "logits_to_keep='last'"),
    "positions": (dict(positions=jnp.arange(12)), ValueError, r"positions has shape \(12,\)"),
    "segment_ids": (dict(segment_ids=IDS[:, :3]), ValueError, r"segment_ids has shape \(2, 3\)"),
    "attention_mask": (dict(attention_mask=IDS[None]), ValueError, r"attention_mask has shape \(1, 2, 12\)"),
    "float labels": (dict(labels=jnp.ones((2, 12))), TypeError, "labels has dtype float32"),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(["arguments", "error", "message"], WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_arguments_are_refused_by_name(model, arguments, error, message):
    with pytest.raises(error, match=message):
        model(IDS, **arguments)


@pytest.mark.usefixtures("unchecked_types")
def test_input_ids_without_a_batch_axis_are_refused(model):
    with pytest.raises(ValueError, match=r"input_ids has shape \(12,\).*\(batch, length\)"):
        model(IDS[0])
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 0\); a sequence must have at least one token"):
        model(IDS[:, :0])


def test_a_sequence_longer_than_the_model_takes_is_refused(model):
    with pytest.raises(
        ValueError, match="65 positions, and this model accepts at most 64 .*max_position_embeddings=64"
    ):
        model(jnp.zeros((1, 65), jnp.int32))


@pytest.mark.parametrize(
    ["scaling", "longest"],
    [(LinearRope(4.0), 256), (DynamicRope(2.0, 64), 128), (YarnRope(4.0, 32), 128), (Llama3Rope(8.0, 1.0, 4.0, 4), 64)],
)
def test_a_rope_scaling_makes_the_model_take_longer_sequences(scaling, longest):
    model = make_model(dataclasses.replace(CONFIG, rope_scaling=scaling))
    assert jnp.isfinite(model(jnp.zeros((1, longest), jnp.int32), logits_to_keep=1).logits).all()
    with pytest.raises(
        ValueError, match=f"{longest + 1} positions, and this model accepts at most {longest} .*rope_scaling="
    ):
        model(jnp.zeros((1, longest + 1), jnp.int32))


def test_gemma_3_s_longest_sequence_counts_its_scaling():
    """Gemma 3 with 4 billion parameters was trained on 131,072 positions, as many as its scaling reaches."""
    config = Gemma3TextConfig(rope_scaling=LinearRope(8.0))
    assert config.longest_sequence == config.max_position_embeddings == 131072
