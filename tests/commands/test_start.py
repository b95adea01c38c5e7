"""What a start of a command compiles: few programs, each of them once."""

import collections
import gc
import importlib
import threading

import jax
import pytest

from liger_jax import _collector, losses
from liger_jax.commands import main
from liger_jax.planner import cards
from liger_jax.trainers import start
from liger_jax.training.waiting import Compiling
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
def programs(platform):
    """The names of the programs that are compiled, or read from a cache, as in a process that begins."""
    if platform != "cpu":
        pytest.skip("the counts are those of a CPU's programs")
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


@pytest.mark.full  # by default grpo's start shows it
def test_finetune_compiles_few_programs(source, programs, tmp_path):
    assert started(source, tmp_path, "finetune", "--data=chats.jsonl", "--lora=4", "--pack", "--length=64") == 0
    assert of_name(programs, "step", "sums") == [1, 1] and len(programs) <= 15, programs


def test_grpo_compiles_few_programs_and_traces_its_loss_once(source, programs, tmp_path, monkeypatch):
    policy_loss, searches, compiled, lowered = losses.policy_loss, [], [], Compiling.lowered

    def noted(self, program):
        name = program.as_text().partition("module @jit_")[2].split()[0]
        compiled.append((name, self))
        return lowered(self, program)

    traced = lambda *args, **named: searches.append(gc.isenabled()) or policy_loss(*args, **named)
    monkeypatch.setattr(losses, "policy_loss", traced)
    monkeypatch.setattr(Compiling, "lowered", noted)
    sampling = "--group=2 --prompt-length=16 --completion-length=8".split()
    assert started(source, tmp_path, "grpo", "--data=prompts.jsonl", "--reward=start_rewards:letters", *sampling) == 0
    assert of_name(programs, "step", "sums", "_begin", "_decode") == [1, 1, 1, 1], programs
    assert len(programs) <= 18 and searches == [False], programs  # traced once, while Python's collector is paused
    names, (of_step, *of_prompts) = zip(*compiled, strict=True)
    assert names == ("step", "_begin", "_decode", "sums")  # the longest first
    assert set(of_prompts) == {of_prompts[0]} != {of_step}  # programs with common products one after the other


def test_the_collector_is_as_before_after_a_pause():
    gc.enable()
    gc.unfreeze()  # what other packages froze would stay so
    with pytest.raises(KeyError), _collector.paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    with _collector.paused():
        made = [[]]
        with _collector.paused():
            pass
        assert not gc.isenabled()
    # What was made meanwhile is old, so that the search of the youngest passes it over, and nothing stays frozen.
    assert gc.isenabled() and not gc.get_freeze_count()
    assert any(each is made for each in gc.get_objects(generation=2))


@pytest.mark.parametrize("used", [True, False])
def test_kernels_packages_are_imported_while_devices_start(monkeypatch, used):
    imported, is_imported, is_started, in_time = [], threading.Event(), threading.Event(), []

    def devices():
        in_time.append(not used or is_imported.wait(10))
        is_started.set()

    monkeypatch.setattr(cards, "are_used", lambda: used)
    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or is_imported.set())
    start._start_devices()
    assert imported == ["jax.experimental.pallas.mosaic_gpu"] * used  # no other device needs it
    assert is_started.wait(10) and in_time == [True]
