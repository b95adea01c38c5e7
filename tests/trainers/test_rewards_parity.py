"""TRL's trainer calls the same functions with the same completions, and makes the same numbers and figures of them."""

import asyncio
import collections
import importlib
import importlib.util
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from liger_jax.data.prompt_rows import Line
from liger_jax.trainers.rewards import Reward, Rewards

HAS_TRL = all(importlib.util.find_spec(name) for name in ("torch", "trl"))
pytestmark = [pytest.mark.parity, pytest.mark.skipif(not HAS_TRL, reason="torch or trl is not installed")]


def solved(prompts, completions, completion_ids, answer, log_extra, log_metric, **kwargs):
    """The form that TRL's documentation has."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    rewards = [None if want is None else float(want in text) for text, want in zip(texts, answer, strict=True)]
    log_extra("found", [text[:1] for text in texts])
    log_metric("right", sum(each or 0 for each in rewards) / len(rewards))
    CALLS.append(json.dumps([prompts, completions, completion_ids, answer, sorted(kwargs.keys() - {"trainer_state"})]))
    return rewards


async def sizes(completions, **kwargs):
    return [len(str(each)) / 100 for each in completions]


CALLS = []


@pytest.mark.parametrize("is_chat", [False, True])
def test_functions_are_called_as_by_trl(is_chat):
    trl = importlib.import_module("trl.trainer.grpo_trainer")
    rewards = importlib.import_module("trl.rewards")
    prompt = lambda text: [{"role": "user", "content": text}] if is_chat else text
    rows = [
        {"prompt": prompt("one"), "answer": "4", "level": 3, "completion": "x"},
        {"prompt": prompt("two"), "answer": None, "level": 1, "completion": "y"},
    ]
    inputs, texts = [row for row in rows for _ in range(2)], ["it is 4", "5", "<think>\na\n</think>\nb", ""]
    ids = [[5, 6, 7, 7, 7, 7], [1], [2, 2, 2, 2], [0]]
    functions = [solved, sizes, rewards.get_repetition_penalty_reward(2), rewards.get_soft_overlong_punishment(6, 3)]
    functions += [rewards.think_format_reward] if is_chat else []
    names = [getattr(each, "__name__", type(each).__name__) for each in functions]

    completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in texts]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    state = SimpleNamespace(global_step=0)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True), args=SimpleNamespace(report_to=[]),
        state=state,
        reward_funcs=functions, reward_func_names=names, reward_processing_classes=[None] * len(functions),
        environments=None, async_loop=loop, _pending_extra_logs=collections.defaultdict(list),
        _pending_metrics=collections.defaultdict(list),
    )  # fmt: skip
    for name in ("_log_completion_extra", "_log_metric"):
        setattr(trainer, name, getattr(trl.GRPOTrainer, name).__get__(trainer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "gather", lambda x: x)
        theirs = trl.GRPOTrainer._calculate_rewards(
            trainer, inputs, [row["prompt"] for row in inputs], completions, ids
        )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

    lines = [Line(f"line {i}", np.array([3], np.int32), row) for i, row in enumerate(rows)]
    ours = Rewards([], lines)
    ours.functions = [Reward(name, each) for name, each in zip(names, functions, strict=True)]
    for each in ours.functions:
        each.check(lines)
    found = ours.of("in step 1", [line for line in lines for _ in range(2)], texts, ids)
    np.testing.assert_allclose(found.numbers, theirs.numpy().T, rtol=1e-6)
    assert CALLS[-1] == CALLS[-2]
    assert found.extras == trainer._pending_extra_logs
    assert found.metrics == {name: np.mean(values) for name, values in trainer._pending_metrics.items()}
