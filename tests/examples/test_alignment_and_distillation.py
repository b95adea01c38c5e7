"""DPO, GRPO and distillation: a few steps of each example move what its picture shows."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import distill, dpo, grpo, trainers_distill, trainers_dpo
from examples._lib import tiny
from examples._lib.command import run
from liger_jax.training import make_step, scored_tokens


def test_the_reward_margin_starts_at_zero_and_rises_on_pairs_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dpo, "PRETRAINING_STEPS", 0)
    log = dpo.main(["--steps=12", f"--out={tmp_path}"])
    before, halfway, after = log["pairs held out"]
    np.testing.assert_allclose([before, log["trained pairs"][0]], 0, atol=1e-5)  # the policy is the reference
    assert 0 < halfway < after < np.inf
    assert (tmp_path / "dpo.png").stat().st_size and "12/12" in capsys.readouterr().err


@pytest.mark.full
def test_the_margin_rises_on_rows_of_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dpo, "PRETRAINING_STEPS", 0)
    log = trainers_dpo.main(["--steps=12", f"--out={tmp_path}"])
    assert abs(log["trained"][0]) < 1e-5 and 0 < log["held out"][0] < log["held out"][-1] < np.inf
    assert (tmp_path / "dpo.png").stat().st_size and (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_pairs_differ_in_their_answers_only_and_prompts_held_out_are_not_trained_on():
    pairs, held_out = map(np.asarray, dpo.make_pairs())
    assert (pairs[:, 0, 0] == pairs[:, 1, 0]).all() and not set(pairs[:, 0, 0]) & set(held_out[:, 0, 0])
    assert (np.diff(pairs[:, 0]) % dpo.VOCAB <= 3).all() and (-np.diff(pairs[:, 1]) % dpo.VOCAB <= 3).all()


def test_the_reward_is_one_for_the_right_sum_alone():
    right = grpo.sums(0)
    assert grpo.reward(right).all() and not grpo.reward(right.at[:, 5].set((right[:, 5] + 1) % 12)).any()


def test_rollouts_keep_their_prompts_and_the_penalty_is_finite(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "PRETRAINING_STEPS", 0)
    log = grpo.main(["--steps=2", f"--out={tmp_path}"])
    assert all(0 <= reward <= 1 for reward in log["reward"]) and all(0 <= kl < 1 for kl in log["kl"])
    assert (tmp_path / "grpo.png").stat().st_size and "2/2" in capsys.readouterr().err


def test_with_adapters_the_reference_is_the_policy_s_own_weights():
    graph, params = tiny.llama(grpo.VOCAB, num_hidden_layers=1)
    model, log_probs = nnx.merge(graph, params), jax.jit(grpo.answer_log_probs)
    tokens = grpo.sums(0, 8)
    before = log_probs(model, tokens)
    graph, adapters, frozen, reference = grpo.policy_and_reference(model, 2)
    policy = nnx.merge(graph, jax.tree.map(lambda x: x + 0.1, adapters), frozen)
    np.testing.assert_array_equal(log_probs(reference, tokens), before)
    assert jnp.abs(log_probs(policy, tokens) - before).max() > 0.01
    held = {id(x) for x in jax.tree.leaves((adapters, frozen))}
    assert {id(x) for x in jax.tree.leaves(nnx.state(reference))} <= held  # no second copy


@pytest.mark.full
def test_adapters_move_away_from_their_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "PRETRAINING_STEPS", 20)
    log = grpo.main(["--steps=4", "--lora=2", f"--out={tmp_path}"])
    assert log["kl"][0] == 0 < log["kl"][-1]  # B is zero at first


def test_an_update_makes_rewarded_answers_likelier_than_the_others():
    graph, params = tiny.llama(grpo.VOCAB)
    right = grpo.sums(0, 8)
    tokens = jnp.concatenate([right, right.at[:, 5].set((right[:, 5] + 1) % 10)])
    log_probs = jax.jit(lambda params: grpo.answer_log_probs(nnx.merge(graph, params), tokens))
    old, advantages = log_probs(params), 2 * grpo.reward(tokens) - 1
    optimizer = optax.adam(1e-3)
    step = jax.jit(make_step(graph, optimizer, grpo.policy_loss, has_aux=True))
    batch = dict(input_ids=tokens, advantages=advantages, old=old, reference=old)
    (params, _), _ = step((params, optimizer.init(params)), batch)
    assert jnp.sum(advantages[:, None] * (log_probs(params) - old)) > 0


def test_students_come_nearer_to_their_teacher(tmp_path, monkeypatch, capsys):
    for name, value in dict(PRETRAINING_STEPS=10, SEQUENCES=8, BATCH=8, LENGTH=32, EVERY=4).items():
        monkeypatch.setattr(distill, name, value)
    log = distill.main(["--steps=6", f"--out={tmp_path}"])
    assert list(log) == ["labels alone", "top 16", "all probabilities"]
    for before, _, after in (log["top 16"], log["all probabilities"]):
        assert 0 < after < before < np.inf
    assert (tmp_path / "distill.png").stat().st_size and "6/6" in capsys.readouterr().err


@pytest.mark.full
def test_students_of_stored_tokens_and_of_all_come_nearer(tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "PRETRAINING_STEPS", 20)
    log = trainers_distill.main(["--steps=20", f"--out={tmp_path}"])
    assert list(log) == list(trainers_distill.WAYS) and all(0 < each[-1] < each[0] for each in log.values())
    assert (tmp_path / "distill.png").stat().st_size


def test_micro_batches_of_the_distillation_losses_add_up_to_the_batch():
    def bigram(seed, width) -> Any:
        head = jax.random.normal(jax.random.key(seed), (distill.VOCAB, width))
        return types.SimpleNamespace(head=head, hidden_states=lambda tokens: head[tokens])

    student, teacher = bigram(0, 8), bigram(1, 16)
    whole = distill.lesson(teacher, distill.markov_text(0, 4))
    whole["labels"] = whole["labels"].at[0, :40].set(-100)  # one part counts fewer tokens than the other
    parts = [{name: x[i::2] for name, x in whole.items()} for i in range(2)]
    losses = [
        functools.partial(distill.full_loss, student, teacher.head),
        functools.partial(distill.topk_loss, student),
    ]
    for loss in losses:
        added = sum(loss(part, scored_tokens(whole)) for part in parts)
        np.testing.assert_allclose(added, loss(whole), rtol=1e-5)


def test_a_number_of_steps_that_is_none_is_one_sentence(tmp_path, capsys):
    for program in (dpo, grpo, distill):
        assert run(program.main, ["--steps=0", f"--out={tmp_path}"]) == 2
        assert "--steps=0 must be at least 1." in capsys.readouterr().err
