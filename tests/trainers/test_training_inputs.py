"""The options of learning rate and optimizer, which all commands that train take alike."""

import jax.numpy as jnp
import pytest

from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.recipe import Recipe
from liger_jax.user_errors import UserError


def rates(steps, **options):
    rate = Settings.of(FinetuneOptions, model="model", data="data", **options).recipe.rate(2.0, steps)
    return [round(float(rate(step)), 4) for step in range(steps)]


def test_schedules_have_the_shapes_of_their_names():
    assert rates(4, schedule="constant", warmup=0.0) == [2.0] * 4
    assert rates(4, schedule="linear", warmup=0.0) == [2.0, 1.5, 1.0, 0.5]
    assert rates(4, warmup=0.0) == [2.0, 1.7364, 1.1, 0.4636]  # a cosine, down to a tenth
    assert rates(6, schedule="linear", warmup=3.0) == [0.6667, 1.3333, 2.0, 1.5, 1.0, 0.5]  # the peak is reached


@pytest.mark.parametrize("steps", [7, 49, 100, 997])
def test_warmup_is_a_share_of_the_steps_or_their_number(steps):
    for number in (1, 3, steps):
        found = rates(steps, schedule="constant", warmup=float(number))
        assert found.index(2.0) == number - 1 and found[0] == round(2.0 / number, 4)
    assert rates(steps, schedule="constant", warmup=0.5).index(2.0) == -(-steps // 2) - 1


def test_weight_decay_and_clip_reach_the_optimizer():
    def update(scale, **options):
        optimizer = Recipe(**options).optimizer_of(1.0)
        params = {"kernel": jnp.ones((2, 2))}
        grads = {"kernel": jnp.full((2, 2), scale)}
        state = optimizer.init(params)
        for factor in (1.0, 0.1):  # Adam's first step does not depend on the gradient's size
            updates, state = optimizer.update({"kernel": factor * grads["kernel"]}, state, params)
        return float(updates["kernel"][0, 0])

    clipped, free = update(100.0), update(100.0, clip=0.0)
    assert abs(clipped - free) > 0.1 and abs(update(0.1) - update(0.1, clip=0.0)) < 1e-6
    decays = [update(0.1, weight_decay=decay) for decay in (0.0, 0.5)]
    assert decays[0] - decays[1] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    ["options", "sentence"],
    [
        (dict(warmup=-0.1), "--warmup=-0.1 must be a finite number, at least 0"),
        (dict(warmup=2.5), "--warmup=2.5 must be a share of the steps below 1, or a whole number of steps"),
        (dict(warmup=11.0), "--warmup=11 steps are more than the 10 of the run"),
        (dict(clip=float("nan")), "--clip=nan must be a finite number"),
        (dict(weight_decay=float("inf")), "--weight-decay=inf must be a finite number"),
        (dict(schedule="step"), "--schedule=step must be one of cosine, linear, constant"),
        (dict(samples=2, eval_share=0.0), "--samples is for data that is held out, and --eval-share=0 holds out none"),
        (dict(patience=2, eval_share=0.0), "--patience is for data that is held out"),
        (dict(patience=0), "--patience=0 must be at least 1"),
        (dict(log=("csv", "wandbs")), "'wandbs' must be one of csv, tensorboard, wandb"),
    ],
)
def test_what_is_out_of_range_is_one_sentence(options, sentence):
    with pytest.raises(UserError) as refused:
        rates(10, **options)
    assert sentence in str(refused.value)
