"""`liger-jax grpo` on a tiny checkpoint: it learns what is rewarded, goes on, and refuses in one sentence."""

import contextlib
import itertools
import json
import math
import re
import signal
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax import losses
from liger_jax.commands import main
from liger_jax.data import prompt_rows, sources
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.trainers import finish
from liger_jax.trainers.adapters import PIECES, STEP
from liger_jax.trainers.completions_file import CompletionsFile
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.policy import DIFFERENCE, TASK
from liger_jax.trainers.rollouts import OLD, Completion, Rollouts
from liger_jax.training import Checkpoints, make_step, row_sizes
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.trainers._runs import figures_of

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
SHORT = "--group 4 --batch 16 --micro-batches 4 --prompt-length 16 --completion-length 8".split()
REWARDS = '''
def letters(completions, letter):
    """The share of a text's characters that the line names."""
    return [text.count(each) / max(1, len(text)) for text, each in zip(completions, letter, strict=True)]
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with prompts and rewards beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "prompts.jsonl").write_text(_tiny.prompts(10))
    (folder.parent / "tiny_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        yield folder


def grpo(source, out, *options, reward="tiny_rewards:letters"):
    """The exit code of a run."""
    data = f"--data={source.parent / 'prompts.jsonl'}"
    return main(["grpo", f"--model={source}", data, f"--reward={reward}", f"--out={out}", *SHORT, *options])


LEARNS = "--steps 30 --learning-rate 0.03 --schedule constant --samples 5".split()


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("grpo") / "out"
    assert grpo(source, out, *LEARNS) == 0
    return out


def test_what_is_rewarded_becomes_more(trained):
    rewards = [each["reward"] for each in figures_of(trained)]
    assert len(rewards) == 30 and np.mean(rewards[:5]) < 0.2 and np.mean(rewards[-5:]) > 0.5, rewards


def test_figures_have_the_names_of_trl_and_true_values(trained):
    first = figures_of(trained)[0]
    assert first["rewards/letters/mean"] == pytest.approx(first["reward"])
    assert 0 < first["reward_std"] < 1 and first["frac_reward_zero_std"] < 1
    assert 1 <= first["completions/min_length"] <= first["completions/mean_length"] <= 8
    assert 0 <= first["completions/clipped_ratio"] <= 1
    assert first["clip_ratio/low_mean"] == first["clip_ratio/high_mean"] == 0  # one update for each rollout


def test_samples_are_the_first_completions_of_each_step_with_their_rewards(trained):
    lines = [json.loads(line) for line in (trained / "completions.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [step for step in range(1, 31) for _ in range(5)]
    assert len({each["line"] for each in lines[:4]}) == 1 and len({each["line"] for each in lines}) == 10
    for each in lines:
        text = each["completion"]
        assert each["reward"] == pytest.approx(text.count("e") / max(1, len(text)))
        assert each["prompt"] and "prompts.jsonl, line" in each["line"] and each["is_cut"] in (True, False)


@contextlib.contextmanager
def ctrl_c_before_step(number):
    lines_of = prompt_rows.PromptRows.lines_of

    def stopping(self, step):
        if step == number:
            signal.raise_signal(signal.SIGINT)
        return lines_of(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_rows.PromptRows, "lines_of", stopping)
        yield


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_bit_by_bit(trained, source, tmp_path):
    with ctrl_c_before_step(5):
        assert grpo(source, tmp_path, *LEARNS) == 128 + signal.SIGINT
    assert len(figures_of(tmp_path)) < 30
    assert grpo(source, tmp_path, *LEARNS) == 0
    whole, resumed = (load_file(out / "model" / "model.safetensors") for out in (trained, tmp_path))
    assert whole.keys() == resumed.keys() and whole
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    names = ("loss", "reward", "completions/mean_length")
    for one, other in zip(figures_of(trained), figures_of(tmp_path), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]


@pytest.mark.full
def test_adapters_stay_near_the_reference_that_they_are_off_for(source, tmp_path):
    options = "--steps 12 --learning-rate 0.5 --schedule constant --lora 4 --advantages rloo --loss-type grpo".split()
    assert grpo(source, tmp_path / "free", *options) == 0
    assert grpo(source, tmp_path / "near", *options, "--beta", "10") == 0
    free, near = (figures_of(tmp_path / name) for name in ("free", "near"))
    assert "kl" not in free[0] and near[0]["kl"] == pytest.approx(0, abs=1e-6) and near[-1]["kl"] > 0
    assert (tmp_path / "near" / "adapters" / "adapter_config.json").is_file()


def test_a_run_ends_with_its_first_and_its_last_rewards(tmp_path, capsys, unchecked_types):
    log = {"steps": [{"loss": 0.0, "reward": reward} for reward in (0.125, 0.5, 0.75)]}
    settings = types.SimpleNamespace(folder=types.SimpleNamespace(is_kept=True))
    run: Any = types.SimpleNamespace(task=TASK, out=tmp_path, settings=settings)
    finish.print_result(run, log, 3, tmp_path / "model", Checkpoints(tmp_path / "checkpoints", {}))
    printed = capsys.readouterr().out
    assert printed.startswith("3 steps; reward 0.125 → 0.750, of the first and the last step; model in ")
    rewards = [0.25, math.nan, 0.75, *[0.0] * 24, 0.5, 1.0, 1.5]
    log = {"steps": [{"loss": 0.0, "reward": reward} for reward in rewards]}
    assert finish.learned(TASK, log, 30) == "30 steps; reward 0.500 → 1.000, means of the first and the last 3 steps"


def test_a_run_in_which_no_completion_has_a_reward_is_refused(unchecked_types):
    run: Any = types.SimpleNamespace(task=TASK)
    finish.check_learned(run, [{"reward": math.nan}, {"reward": 0.5}])
    with pytest.raises(UserError, match="^No completion of the run has a reward"):
        finish.check_learned(run, [{"reward": math.nan}] * 2)


CALLS = itertools.count()  # of `late`: one before the run, and one in each step


def late(completions):
    if next(CALLS) == 3:
        raise AssertionError  # by `assert`, pytest would add words
    return [float(len(text)) for text in completions]


@pytest.mark.full
def test_a_reward_that_fails_ends_the_run_behind_the_steps_that_it_has_done(source, tmp_path, capfd):
    options = ["--steps=4", "--lora=4"]
    assert grpo(source, tmp_path, *options, reward=f"{__name__}:late") == 2
    told = capfd.readouterr().err
    assert re.search(
        r"late has failed in step 3 with AssertionError at test_grpo.py:\d+. Correct it. Step 2 is saved, and",
        told,
    )
    assert grpo(source, tmp_path, *options, reward=f"{__name__}:late") == 0
    assert [each["step"] for each in figures_of(tmp_path)] == [1, 2, 3, 4]


def test_some_completions_of_each_step_are_noted_and_a_run_that_goes_on_takes_the_later_ones_away(tmp_path):
    records = lambda *texts: [{"completion": text, "reward": 1.0} for text in texts]
    file = CompletionsFile(tmp_path)
    for step, texts in ((1, ["a", "b\u2028"]), (2, ["c\n\ud800"]), (3, ["d"])):
        file.add(step, records(*texts))
    with (tmp_path / "completions.jsonl").open("a") as torn:
        torn.write('{"step": 2, "comple')
    CompletionsFile(tmp_path).add(3, records("e"))
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().split("\n")[:-1]]
    seen = [(each["step"], each["completion"]) for each in lines]
    assert seen == [(1, "a"), (1, "b\u2028"), (2, "c\n\ud800"), (3, "e")]
    CompletionsFile(tmp_path).add(1, records("f"))  # the run has begun again
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 1
    (tmp_path / "completions.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(
        UserError, match="completions.jsonl was not written by a run, .* Move it, or pass another --out"
    ):
        CompletionsFile(tmp_path)


# --- the update -------------------------------------------------------------------------------------------------------


class NoTokenizer(Tokenizer):
    """One that is asked nothing."""

    def __init__(self):
        pass


CORRECTED = dict(importance_sampling="token_truncate", importance_max=1.2)


@pytest.mark.parametrize(
    "options",
    [{}, dict(loss_type="grpo", importance_level="sequence", mask_truncated=True, **CORRECTED)],
    ids=["plain", "corrected"],
)
def test_the_update_of_packed_parts_is_that_of_padded_rows(options, rng, tmp_path):
    settings = Settings.of(GrpoOptions,
        model="m", data="d", reward=f"{__name__}:ones", group=2, batch=12, micro_batches=3, prompt_length=4,
        completion_length=5, length=13, temperature=0.7, **options,
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config, scan_layers=False, rngs=nnx.Rngs(0))
    draw = lambda least, most: rng.integers(2, 31, rng.integers(least, most + 1)).astype(np.int32)
    lines = [prompt_rows.Line("", draw(1, 4), {}) for _ in range(6)]
    rollouts = Rollouts(settings, prompt_rows.PromptRows(lines, 12, 2, 0, [("d", 1.0, 6)]), NoTokenizer())
    drawn = [draw(1, 5) for _ in range(12)]
    by_sampler = [rng.normal(-3.5, 0.5, len(new)).astype(np.float32) for new in drawn]
    completions = [
        Completion(new, "", bool(i % 5 == 0), own if options else None)
        for i, (new, own) in enumerate(zip(drawn, by_sampler, strict=True))
    ]
    advantages = rng.normal(size=12).astype(np.float32)
    batch = rollouts._packed(lines, completions, advantages)
    assert not batch["segment_ids"][2::3].any()  # the last micro-batch is empty

    graph, params = nnx.split(model)
    options = dict(normalizer=TASK.normalizer(settings, None), has_aux=True, micro_batches=3)
    step = jax.jit(make_step(graph, optax.sgd(1.0), TASK.loss(settings, None), **options))
    (found, _), (loss, figures) = step((params, optax.sgd(1.0).init(params)), batch)

    tokens, mask, sampled = np.zeros((12, 9), np.int32), np.zeros((12, 9), bool), np.zeros((12, 9), np.float32)
    for i, (new, _, is_cut, _) in enumerate(completions):
        prompt = lines[i // 2].tokens
        tokens[i, : len(prompt) + len(new)] = np.concatenate([prompt, new])
        mask[i, len(prompt) - 1 : len(prompt) + len(new) - 1] = not (is_cut and settings.method.mask_truncated)
        sampled[i, len(prompt) - 1 : len(prompt) + len(new) - 1] = by_sampler[i]

    def plain(params):
        log_probs = nnx.merge(graph, params).log_probs(jnp.asarray(tokens), labels=jnp.asarray(tokens), temperature=0.7)
        options = dict(loss_type=settings.method.loss_type, importance_level=settings.method.importance_level)
        if settings.method.importance_sampling:
            ratio = jnp.exp(jax.lax.stop_gradient(log_probs.log_probs) - sampled)
            options["importance_ratio"] = jnp.minimum(ratio, 1.2)
        return losses.policy_loss(
            log_probs.log_probs, None, jnp.asarray(advantages), mask=jnp.asarray(mask), **options
        ).loss

    expected, grads = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    for own, before, grad in zip(*map(jax.tree.leaves, (found, params, grads)), strict=True):
        np.testing.assert_allclose(own, before - grad, rtol=1e-4, atol=1e-6)
    corrected = {DIFFERENCE} if settings.method.importance_sampling else set()
    assert set(figures) == {"clip_ratio/low_mean", "clip_ratio/high_mean"} | corrected
    if corrected:
        policy = nnx.merge(graph, params).log_probs(jnp.asarray(tokens), labels=jnp.asarray(tokens), temperature=0.7)
        np.testing.assert_allclose(figures[DIFFERENCE], np.abs(policy.log_probs - sampled)[mask].mean(), rtol=1e-5)


def test_completions_fill_the_fewest_rows_of_a_size_that_have_room(rng):
    settings = Settings.of(GrpoOptions,
        model="m", data="d", reward=f"{__name__}:ones", group=2, batch=8, micro_batches=1, prompt_length=4,
        completion_length=5, lora=2, lora_dropout=0.1,
    )  # fmt: skip
    of = lambda steps, shards=1: [size.num_rows for size in TASK.sampling.sizes(settings, steps, shards)]
    assert of(1) == [8] and of(10**9) == [2, 4, 6, 8] and of(10**9, shards=4) == [4, 8]
    lines = [prompt_rows.Line("", np.array([3, 4], np.int32), {}) for _ in range(4)]
    data = prompt_rows.PromptRows(lines, 8, 2, 0, [("d", 1.0, 4)])
    whole = Rollouts(settings, data, NoTokenizer())
    few = Rollouts(settings, data, NoTokenizer(), sizes=TASK.sampling.sizes(settings, 10**9, 1))
    assert [batch["input_ids"].shape for batch, _ in few.examples] == [(rows, 9) for rows in (2, 4, 6, 8)]
    advantages = rng.normal(size=8).astype(np.float32)
    for length, rows in ((1, 4), (2, 4), (3, 8)):  # three, two and one in a row
        drawn = [Completion(rng.integers(2, 31, length).astype(np.int32), "", False) for _ in range(8)]
        ours, theirs = (each._packed(lines, drawn, advantages) for each in (few, whole))
        assert len(ours["input_ids"]) == rows and ours.keys() == theirs.keys()
        for name, column in theirs.items():
            np.testing.assert_array_equal(ours[name], column[:rows] if np.ndim(column) else column, err_msg=name)
        assert not theirs["segment_ids"][rows:].any() and (theirs["labels"][rows:] == -100).all()


@pytest.mark.full
def test_a_run_in_rows_of_few_sizes_learns_what_one_in_all_rows_learns(source, tmp_path, capsys, monkeypatch):
    options = "--micro-batches=1 --steps=4 --updates=2 --learning-rate=0.03 --schedule=constant".split()
    assert grpo(source, tmp_path / "whole", *options) == 0
    assert "with 2 updates, in rows × places of 16 × 24\n" in capsys.readouterr().out
    monkeypatch.setattr(row_sizes, "of_a_program", lambda: 1e-9)
    assert grpo(source, tmp_path / "few", *options) == 0
    assert "with 2 updates, in rows × places of 4 × 24 or 8 × 24 or 12 × 24 or 16 × 24\n" in capsys.readouterr().out
    for ours, theirs in zip(figures_of(tmp_path / "few"), figures_of(tmp_path / "whole"), strict=True):
        for name in ours.keys() - {"tokens_per_second", "memory_gib"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("updates", [1, 2])
def test_the_sampler_s_log_probabilities_are_those_of_the_policy_that_it_is(updates, source, tmp_path):
    options = f"--steps 2 --temperature 0.7 --top-p 0.8 --updates {updates} --importance-sampling sequence_mask".split()
    assert grpo(source, tmp_path, *options) == 0
    assert all(each[DIFFERENCE] < 1e-4 for each in figures_of(tmp_path)) and len(figures_of(tmp_path)) == 2


def test_each_update_of_a_step_has_the_log_probabilities_of_the_policy_that_sampled(rng, monkeypatch):
    settings = Settings.of(GrpoOptions,
        model="m", data="d", reward=f"{__name__}:ones", group=2, batch=4, micro_batches=2, prompt_length=4,
        completion_length=5, updates=3, temperature=0.7, lora=2, lora_dropout=0.1,
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    graph, params = nnx.split(LlamaForCausalLM(config, scan_layers=False, rngs=nnx.Rngs(0)))
    lines = [prompt_rows.Line("", np.array([3, 4], np.int32), {}) for _ in range(2)]
    data = prompt_rows.PromptRows(lines, 4, 2, 0, [("d", 1.0, 2)])
    rollouts, seen = Rollouts(settings, data, NoTokenizer()), []
    draw = lambda: rng.integers(2, 31, rng.integers(1, 6)).astype(np.int32)
    sampled = [Completion(draw(), "", False) for _ in range(4)]
    monkeypatch.setattr(rollouts, "_sampled", lambda model, rows: sampled)

    def update(state, batch, frozen):
        seen.append(batch)
        halved = jax.tree.map(lambda x: x / 2, state[0])
        return (halved, state[1]), (jnp.float32(len(seen)), {"clip_ratio/low_mean": jnp.float32(2 * len(seen))})

    rows = {"number": np.int32(0)}
    state, (loss, figures) = rollouts.step((graph, graph), update, (params, None), rows, nnx.State({}))
    assert len(seen) == 3 and loss == 2.0 and figures["clip_ratio/low_mean"] == 4.0
    np.testing.assert_allclose(jax.tree.leaves(state[0])[0] * 8, jax.tree.leaves(params)[0], rtol=1e-6)
    assert set(seen[0]) == set(rollouts.examples[0][0])
    assert len({int(batch[STEP]) for batch in seen}) == 3  # each update drops others
    for number, each in enumerate(sampled):
        at = (seen[0][PIECES] == number) & (seen[0]["segment_ids"] > 0)
        np.testing.assert_array_equal(seen[0]["input_ids"][at], [3, 4, *each.tokens])
    named = {name: jnp.asarray(seen[0][name]) for name in ("input_ids", "labels", "segment_ids", "positions")}
    log_probs = nnx.jit(lambda model, named: model.log_probs(**named, temperature=0.7).log_probs)
    expected = log_probs(nnx.merge(graph, params), named)
    for batch in seen:
        np.testing.assert_allclose(batch[OLD], expected, rtol=1e-5, atol=1e-6)
    far = {name: jnp.asarray(x) for name, x in seen[0].items()}
    far[OLD] = expected + 0.3  # every ratio is e^-0.3, below 1 - 0.2
    loss = TASK.loss(settings, None)
    advantages = jnp.asarray(rng.choice([-1.0, 1.0], (4, 1)), jnp.float32)
    far["advantages"] = jnp.where(far["segment_ids"] > 0, advantages, 0)
    told = nnx.jit(lambda policy, batch: loss(policy, batch, (1.0, 1.0))[1])(nnx.merge(graph, params), far)
    worse = (losses.shifted_labels(named["labels"], named["segment_ids"]) != -100) & (advantages < 0)
    np.testing.assert_allclose(told["clip_ratio/low_mean"], jnp.sum(worse), rtol=1e-5)


@pytest.mark.full
def test_several_updates_learn_and_are_clipped(source, tmp_path):
    options = "--steps 12 --learning-rate 0.03 --schedule constant --updates 3".split()
    assert grpo(source, tmp_path, *options) == 0
    figures = figures_of(tmp_path)
    assert max(each["clip_ratio/low_mean"] + each["clip_ratio/high_mean"] for each in figures) > 0
    assert np.mean([each["reward"] for each in figures[-3:]]) > np.mean([each["reward"] for each in figures[:3]])


def ones(completions):
    return [1.0 for _ in completions]


# --- prompts and rewards ----------------------------------------------------------------------------------------------


def test_an_epoch_has_each_line_and_whole_steps_and_weights_count():
    lines = [prompt_rows.Line(str(i), np.ones(1 + i, np.int32), {}) for i in range(7)]
    data = prompt_rows.PromptRows(lines, batch=6, group=2, seed=3, sources=[("a", 2.0, 3), ("b", 1.0, 4)])
    assert data.num_in_epoch == 4 * 6 and data.length == 16  # 10 visits in steps of 3 prompts
    epochs = [[line.where for step in range(4 * e, 4 * e + 4) for line in data.lines_of(step)] for e in range(2)]
    for epoch in epochs:
        counts = np.bincount(np.array(epoch, int), minlength=7)
        assert len(epoch) == 12 and (counts[:3] >= 2).all() and (counts >= 1).all()
    assert epochs[0] != epochs[1]
    rows = data.batches()(0)
    first = data.lines_of(0)[0].tokens
    assert rows["input_ids"].shape == (6, 16) and rows["attention_mask"][0].sum() == len(first)
    np.testing.assert_array_equal(rows["labels"][1], [*[-100] * (16 - len(first)), *first])


@pytest.mark.parametrize(
    ["options", "message"],
    [
        (["--group", "1"], "--group=1 must be at least 2"),
        (["--patience", "2"], "--patience=2 is for held-out data, and this command holds none out: .* out."),
        (["--updates", "0"], "--updates=0 must be at least 1"),
        (["--group", "5"], "--batch=16 completions must be a multiple of --group=5"),
        (["--temperature", "0"], "--temperature=0.0 must be a finite number above 0"),
        (["--top-p", "1e-39"], "--top-p=1e-39 must be above 0 as a float32, and at most 1"),
        (["--importance-max", "2"], "--importance-max=2.0 is for --importance-sampling: pass that, or leave it out"),
        (["--beta", "0.1"], "--beta=0.1 needs a reference, .*--lora 16"),
        (["--length", "20"], "--length=20 is less than --prompt-length=16 and --completion-length=8 together"),
        (
            ["--prompt-length", "3"],
            r"prompts.jsonl, line \d+ has \d tokens, and --prompt-length=3 .* --prompt-length \d",
        ),
        (["--loss-type", "vespo", "--importance-level", "sequence"], "--importance-level='sequence' does not go with"),
    ],
)
def test_what_does_not_go_is_refused_in_one_sentence(options, message, source, tmp_path, capfd):
    assert grpo(source, tmp_path / "out", *options, "--steps", "1") == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("liger-jax grpo:")]
    assert len(told) == 1 and re.search(message, told[0]), told


def test_lines_without_a_prompt_are_refused(source, tmp_path, capsys):
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "one"}\n{"question": "two"}\n')
    options = [f"--model={source}", f"--data={tmp_path / 'wrong.jsonl'}", "--reward=tiny_rewards:letters", *SHORT]
    assert main(["grpo", *options, f"--out={tmp_path / 'out'}"]) == 2
    assert "wrong.jsonl, line 2, must hold an object with a prompt" in (told := capsys.readouterr().err)
    assert "It has ['question']." in told


def test_a_prompt_that_is_null_is_told(source, tmp_path, capsys):
    (tmp_path / "null.jsonl").write_text('{"prompt": null}')
    assert grpo(source, tmp_path / "out", f"--data={tmp_path / 'null.jsonl'}") == 2
    assert "It has ['prompt']. 'prompt' is null, which counts as absent." in capsys.readouterr().err


def test_prompts_of_unknown_roles_are_told(source, tmp_path, capsys):
    lines = [json.dumps({"messages": [{"role": "human", "content": text}]}) for text in ("one", "one two three four")]
    (tmp_path / "roles.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer(source, 320, [])
    named = {"--data": sources.data_sources([str(tmp_path / "roles.jsonl")])}
    prompt_rows.prepared(None, 2, 0, 2, 64, tokenizer, named)
    assert capsys.readouterr().out.startswith("role 'human' in 2 rows (first: ")


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
@pytest.mark.parametrize(
    ["mesh", "message"],
    [
        ("fsdp=2,tensor=2", "and 4 does not divide 2, the greatest common divisor of a step's prompts and of a "),
        ("sequence=2", "the rows of liger-jax grpo stay whole. Give the devices to fsdp or tensor."),
        ("data=4", "splits the batch into 4 shards, which do not divide 2, the greatest common divisor of a step's"),
    ],
)
def test_devices_that_do_not_divide_prompts_or_share_rows_are_refused(mesh, message, source, tmp_path, capsys):
    assert grpo(source, tmp_path, f"--mesh={mesh}", "--batch=8", "--micro-batches=2") == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
@pytest.mark.parametrize("mesh", ["fsdp=2", "data=2", "tensor=2", "fsdp=2,tensor=2"])
def test_a_mesh_trains_as_one_device_does(mesh, source, tmp_path):
    for name, devices in (("one", "fsdp=1"), ("several", mesh)):
        assert grpo(source, tmp_path / name, "--steps=3", "--updates=2", f"--mesh={devices}") == 0
    one, several = (figures_of(tmp_path / name) for name in ("one", "several"))
    for name in ("reward", "loss", "completions/mean_length"):
        np.testing.assert_allclose([row[name] for row in several], [row[name] for row in one], rtol=1e-3, atol=1e-5)
