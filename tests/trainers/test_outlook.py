"""What a run says before it waits."""

from pathlib import Path

import pytest

from liger_jax.trainers import outlook
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings

FEW = "update{} in all: pass more --epochs, or a smaller --batch"


@pytest.mark.parametrize(
    "steps, options, expected",
    [(1, {}, ["1 " + FEW.format("")]), (9, {}, ["9 " + FEW.format("s")]), (10, {}, []), (1, {"steps": 1}, [])],
)
def test_a_run_of_few_updates_says_so_unless_it_was_asked_for_so_few_steps(steps, options, expected):
    settings = Settings.of(FinetuneOptions, model="m", data="d", out="runs/a", **options)
    first, where, *rest = outlook.lines(settings, steps, Path("runs/a/model"))
    assert rest == expected and where == f"result: {Path('runs/a/model')}"
    assert first.startswith("rate: 1.0e-05 at its peak, schedule cosine; held-out data is scored before step 1, after")


def test_updates_of_a_step_count_and_no_reward_is_held_out():
    settings = Settings.of(GrpoOptions, model="m", data="d", reward="a:b", lora=8)
    steps, rate = outlook.lines(settings, 5, updates=2)
    assert steps == "steps: 5, each with 2 updates" and "rate: 1.0e-05" in rate and "nothing is held out: " in rate
    assert list(outlook.lines(settings, 4, updates=2))[-1] == "8 " + FEW.format("s")
