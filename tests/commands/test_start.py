"""What a start of a command compiles: few programs, each of them once."""

import collections

import jax
import pytest

from liger_jax import losses
from liger_jax.commands import main
from tests import _tiny

COMPILED = "/jax/core/compile/backend_compile_duration"
REWARDS = """
def letters(completions, letter):
    return [text.count(each) / 8 for text, each in zip(completions, letter, strict=True)]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations, prompts and rewards beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(12))
    (folder.parent / "prompts.jsonl").write_text(_tiny.prompts(4))
    (folder.parent / "start_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        yield folder


@pytest.fixture
def programs():
    """The names of the programs that are compiled, or read from a cache, as in a process that begins."""
    names: list[str] = []
    listen = lambda event, seconds, fun_name="", **_: names.append(fun_name) if event == COMPILED else None
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def started(source, out, *options):
    common = f"--model={source} --out={out} --batch 4 --micro-batches 2 --steps 2 --learning-rate 0.01".split()
    return main([*options[:1], *common, *options[1:]])


def of_name(programs, *names):
    """How many programs have each of these names."""
    count = collections.Counter(programs)
    return [count[f"jit({name})"] for name in names]


def test_finetune_compiles_few_programs(source, programs, tmp_path):
    assert started(source, tmp_path, "finetune", "--data=chats.jsonl", "--lora=4", "--pack", "--length=64") == 0
    assert of_name(programs, "step", "sums") == [1, 1] and len(programs) <= 15, programs


def test_grpo_compiles_few_programs_and_traces_its_loss_once(source, programs, tmp_path, monkeypatch):
    policy_loss, calls = losses.policy_loss, []
    monkeypatch.setattr(losses, "policy_loss", lambda *args, **named: calls.append(1) or policy_loss(*args, **named))
    sampling = "--group=2 --prompt-length=16 --completion-length=8".split()
    assert started(source, tmp_path, "grpo", "--data=prompts.jsonl", "--reward=start_rewards:letters", *sampling) == 0
    assert of_name(programs, "step", "sums", "_begin", "_decode") == [1, 1, 1, 1], programs
    assert len(programs) <= 18 and len(calls) == 1, programs
