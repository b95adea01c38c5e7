"""What a run says before it waits, and at its end."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from liger_jax.trainers import outlook, pairs, text
from liger_jax.trainers.distillation import Distillation
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.finish import learned
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.preference_losses import Preference
from liger_jax.trainers.scored_answers import ScoredAnswers
from liger_jax.trainers.teacher import Teacher
from liger_jax.training.row_sizes import Size

FEW = "update{} in all: pass more --epochs, or a smaller --batch"
MARGINS = {"eval_rewards/margins": 0.0, "eval_rewards/accuracies": 0.5}
AFTER = {"eval_rewards/margins": 0.25, "eval_rewards/accuracies": 0.75}
M = "rewards/margins 0.000 → 0.250"


@pytest.mark.parametrize(
    "steps, options, expected",
    [(1, {}, ["1 " + FEW.format("")]), (9, {}, ["9 " + FEW.format("s")]), (10, {}, []), (1, {"steps": 1}, [])],
)
def test_a_run_of_few_updates_says_so_unless_it_was_asked_for_so_few_steps(steps, options, expected):
    settings = Settings.of(FinetuneOptions, model="m", data="d", out="runs/a", **options)
    first, where, *rest = outlook.lines(settings, steps, Path("runs/a/model"))
    assert rest == expected and where == f"result: {Path('runs/a/model')}"
    assert first.startswith("rate: 1.0e-05 at its peak, schedule cosine; held-out data is scored before step 1, after")


def test_a_run_without_a_folder_says_that_only_its_model_is_the_result():
    settings = Settings.of(FinetuneOptions, model="m", data="d", out="runs/a").changed(is_kept=False)
    assert "result: only in result.model, since there is no out" in [*outlook.lines(settings, 20, Path("runs/a/model"))]


def test_updates_of_a_step_count_and_no_reward_is_held_out():
    settings = Settings.of(GrpoOptions, model="m", data="d", reward="a:b", lora=8)
    steps, rate = outlook.lines(settings, 5, updates=2)
    assert steps == "steps: 5, each with 2 updates" and "rate: 1.0e-05" in rate and "nothing is held out: " in rate
    steps, *_ = outlook.lines(settings, 5, updates=1, sizes=[Size(24, 4), Size(24, 8)])
    assert steps == "steps: 5, each with 1 update, in rows × places of 4 × 24 or 8 × 24"
    assert list(outlook.lines(settings, 4, updates=2))[-1] == "8 " + FEW.format("s")


def test_a_model_that_learns_no_end_is_told():
    settings = Settings.of(FinetuneOptions, model="m", data="d")
    (line,) = {*outlook.lines(settings, 20, stops=False)} - {*outlook.lines(settings, 20)}
    assert line.startswith("no token ends a text: the tokenizer names no eos_token in tokenizer_config.json, nor the")


@pytest.mark.parametrize(
    "task, before, after, expected",
    [
        (text.TASK, {"eval_loss": 5.756}, {"eval_loss": 5.714}, "held out: loss 5.756 → 5.714"),
        (text.TASK, None, {"eval_loss": 5.714}, "held out: loss 5.714"),  # of a run that began when it was not kept
        (text.TASK, None, {}, "loss 3.000 → 1.000, of the first and the last step"),
        ("sigmoid", MARGINS, AFTER, f"held out: {M}, rewards/accuracies 0.750"),
        ("simpo", MARGINS, AFTER, f"held out: {M}, rewards/accuracies 0.500 → 0.750"),
        (Distillation(mock.Mock(Teacher, vocab_size=8), 0.0), {"eval_divergence": 2.5}, {"eval_divergence": 1.25},
         "held out: divergence 2.500 → 1.250"),
    ],
)  # fmt: skip
def test_the_last_line_compares_what_is_held_out_before_and_after(task, before, after, expected):
    if isinstance(task, str):
        task = ScoredAnswers(pairs.OfPairs(Preference(loss_type=task)))
    log: dict[str, Any] = {"steps": [{"loss": 3.0}, {"loss": 1.0, **after}, {"loss": 0.0}]}
    log |= {} if before is None else {"before": before}
    assert learned(task, log, 2) == f"2 steps; {expected}"
