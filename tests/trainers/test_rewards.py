"""Reward functions: TRL's call, what they may return, and what ends a run with a sentence that names the function."""

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
import types
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.data.prompt_rows import Line, PromptRows
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.trainers import resume
from liger_jax.trainers.completions_file import CompletionsFile
from liger_jax.trainers.grpo_options import REWARD_CALL, GrpoOptions
from liger_jax.trainers.log import Log
from liger_jax.trainers.options import Settings
from liger_jax.trainers.rewards import Reward, Rewards
from liger_jax.trainers.rollouts import Completion, Rollouts
from liger_jax.training import Checkpoints
from liger_jax.user_errors import UserError
from tests.trainers._runs import figures_of

CHAT = [{"role": "user", "content": "two"}]
LINES = [
    Line("line 1", np.array([3, 4], np.int32), {"prompt": "one", "answer": "aaaa", "tags": ["x"], "completions": 0}),
    Line("line 2", np.array([5], np.int32), {"prompt": CHAT, "answer": None, "tags": [], "completions": 0}),
]
TEXTS, IDS = ["aaaa", "no"], [[7, 2], [8]]


def of(*functions, lines=LINES, seconds=30.0, weight=1.0):
    """What functions make of two completions in step 3."""
    rewards = Rewards([], lines, seconds)
    rewards.functions = [Reward(each.__name__, each, weight) for each in functions]
    for each in rewards.functions:
        each.check(lines)
    return rewards.of("in step 3", lines, TEXTS, IDS)


def refused(message, *functions, **options):
    with pytest.raises(UserError, match=f"^{message}"):
        of(*functions, **options)


# --- the call ---------------------------------------------------------------------------------------------------------


def test_a_function_is_called_with_lists_over_the_batch_by_the_names_that_it_has():
    def named(completions, answer, prompts, *, completion_ids=None, half=0.5):
        assert prompts == ["one", CHAT] and answer == ["aaaa", None] and half == 0.5
        assert completions == ["aaaa", [{"role": "assistant", "content": "no"}]]  # a chat's are messages
        assert completion_ids == [[7, 2], [8]]
        return [1, 0.5]

    def all_of_them(**fields):
        names = {"prompts", "completions", "completion_ids", "answer", "tags", "log_extra", "log_metric"}
        assert set(fields) == names and fields["tags"] == [["x"], []]
        return [0, 0]

    class Called:
        __name__ = "called"

        def __call__(self, prompts, completions, **columns):
            return [len(columns), len(prompts)]

    np.testing.assert_array_equal(of(named, all_of_them, Called()).numbers, [[1, 0.5], [0, 0], [5, 2]])


def test_what_a_function_changes_is_its_own_copy():
    def changes(prompts, completions, tags, answer):
        found = [len(each) for each in tags]
        for each in (*tags, prompts[1], completions[1], prompts, completions, answer):
            each.clear()
        return found

    before = json.dumps([line.fields for line in LINES])
    np.testing.assert_array_equal(of(changes, changes).numbers, [[1, 0]] * 2)
    assert json.dumps([line.fields for line in LINES]) == before


def test_none_is_nan_and_numbers_are_of_any_kind():
    kinds = [(1, True), [Fraction(1, 2), np.int8(3)], np.array([1, 2]), jnp.ones(2), (each for each in (None, 4.0))]
    expected = [[1, 1], [0.5, 3], [1, 2], [1, 1], [np.nan, 4]]
    for kind, numbers in zip(kinds, expected, strict=True):

        def f(completions, kind=kind):
            return kind

        np.testing.assert_array_equal(of(f).numbers, [numbers])


def test_async_functions_wait_together_and_keep_their_loop():
    loops = []

    async def slow(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        return [1.0, None]

    async def also(completions, answer):
        return await slow(completions)

    def plain(completions):
        return [2.0, 2.0]

    rewards = Rewards([], LINES)
    rewards.functions = [Reward(each.__name__, each) for each in (slow, plain, also)]
    start = time.monotonic()
    found = [rewards.of("in step 3", LINES, TEXTS, IDS).numbers for _ in range(2)]
    assert time.monotonic() - start < 0.7 and len(set(loops)) == 1
    np.testing.assert_array_equal(found, [[[1, np.nan], [2, 2], [1, np.nan]]] * 2)

    async def fails(completions):
        raise KeyError("gone")

    async def hangs(completions):
        await asyncio.sleep(1e6)

    refused(
        r"The reward fails has failed in step 3 with KeyError: 'gone' at test_rewards.py:\d+. Correct it.", fails, slow
    )
    refused("The reward hangs has not returned in step 3 within --reward-timeout=0.2 s", hangs, seconds=0.2)


def test_async_functions_are_awaited_in_a_notebook_whose_own_loop_runs():
    async def waits(completions):
        await asyncio.sleep(0)
        return [1.0, 2.0]

    async def cell():
        return of(waits).numbers

    np.testing.assert_array_equal(asyncio.run(cell()), [[1.0, 2.0]])


def test_metrics_are_means_and_columns_have_a_value_for_each_completion():
    def logs(completions, log_metric, log_extra):
        log_metric("accuracy", np.float32(0.5))
        log_metric("accuracy", 1.5)
        log_metric("accuracy", np.nan)
        log_extra("seen", [np.int32(1), {1, 2}])
        return [0.0, 0.0]

    def too(completions, log_extra):
        log_extra("seen", (float("nan"), "b"))
        return [1.0, 0.0]

    found = of(logs, too)
    assert found.metrics == {"accuracy": 1.0}
    assert found.extras == {"seen": [1, "{1, 2}"], "too/seen": ["nan", "b"]}

    for what, message in (
        (lambda metric, extra: metric("loss", 1.0), "logs a metric 'loss', but the run has a figure so named"),
        (lambda metric, extra: metric("own", "much"), "logs 'much' as 'own', and must log a number"),
        (lambda metric, extra: extra("own", itertools.count()), r"logs \[0, 1, 2\] as 'own' for 2 completions"),
    ):

        def f(completions, log_metric, log_extra, what=what):
            what(log_metric, log_extra)
            return [0.0, 0.0]

        refused(f"The reward f {message}", f)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["returned", "message"],
    [
        (None, "None in step 3 for 2 completions. It must return a list"),
        (["1", "0"], "'1' in step 3 for a completion of line 1. It must return a finite number or None for each"),
        ("10", "'10' in step 3 for 2 completions"),
        ({0: 1.0, 1: 0.5}, "{0: 1.0, 1: 0.5} in step 3"),
        ({1.0, 0.5}, "{"),
        ([1.0], r"1 values in step 3 for 2 completions: \[1.0\]"),
        (itertools.count(), "more than 2 values in step 3 for 2 completions"),
        ([1.0, np.nan], "nan in step 3 for a completion of line 2"),
        ([1.0, 1e39], r"1e\+39 in step 3 for a completion of line 2. .* at most 1e\+15 in size with its weight"),
        ([-np.inf, 0.0], "-inf in step 3 for a completion of line 1"),
        ([1.0, 10**400], "1000.* … 0*0 in step 3 for a completion of line 2"),
        ([1j, 1.0], "1j in step 3"),
        (np.ones((2, 1)), r"array\(\[1.\]\) in step 3"),
    ],
)
def test_what_is_no_number_for_each_completion_is_refused(returned, message):
    def f(completions):
        return returned

    refused(f"The reward f has returned {message.replace('{', '[{]')}", f)


def test_a_weight_counts_for_the_size_of_a_reward():
    def f(completions):
        return [1e10, 0.0]

    refused(r"The reward f has returned 10000000000.0 .* with its weight", f, weight=1e6)
    np.testing.assert_array_equal(of(f, weight=1e-3).numbers, [[1e10, 0.0]])


def exits(completions):
    sys.exit(0)


def loops(completions):
    while True:
        with_exceptions_caught()


def with_exceptions_caught():
    try:
        time.sleep(0.01)
    except Exception:
        pass


def sleeps(completions):
    time.sleep(1e6)


def backtracks(completions):
    return re.match(r"(a+)+$", "a" * 50 + "b")


def never_yields(completions):
    while True:
        pass
    yield 1.0


def has_a_timer_of_its_own(completions):
    def over(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(10)
    except TimeoutError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(1e6)


def test_a_function_that_exits_does_not_end_the_program():
    refused(
        r"The reward exits has called sys.exit\(0\) in step 3 at test_rewards.py:\d+. It must return numbers", exits
    )


@pytest.mark.skipif(not hasattr(signal, "SIGURG"), reason="needs signals of POSIX")
@pytest.mark.parametrize("function", [loops, sleeps, backtracks, never_yields, has_a_timer_of_its_own])
def test_a_function_that_hangs_ends_in_time(function):
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGURG)
    refused(f"The reward {function.__name__} has not returned in step 3 within", function, seconds=0.3)
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGURG)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_current_folder_stays_and_a_word_says_so(tmp_path, monkeypatch, capsys):
    def moves(completions):
        os.chdir("/")
        return [0.0, 0.0]

    monkeypatch.chdir(tmp_path)
    of(moves)
    assert os.getcwd() == str(tmp_path)
    assert (
        capsys.readouterr().out
        == f"the reward moves has left the current folder for /; the run goes back to {tmp_path}\n"
    )


def test_parameters_are_looked_at_before_anything_is_computed():
    def unused():
        pytest.fail("is called")

    def without(prompts):
        unused()

    def by_place(completions, /):
        unused()

    def state(completions, trainer_state):
        unused()

    def of_a_line(prompt, completions):
        unused()

    def unknown(completions, solution):
        unused()

    refused("The reward without must have a parameter completions or completion_ids, a list.", without)
    refused("The reward by_place takes 'completions' as a positional-only argument", by_place)
    refused("The reward state needs 'trainer_state', .* default: trainer_state=None", state)
    refused("The reward of_a_line needs 'prompt', which rewards do not get here. Take prompts, a list", of_a_line)
    refused("line 1: the reward unknown needs 'solution', and the line's fields are answer, tags. Rename", unknown)


def test_a_field_that_some_lines_lack_is_refused_where_it_is_named_and_told_elsewhere(capsys):
    lines = [LINES[0], Line("line 2", LINES[1].tokens, {"prompt": "two", "tags": []})]

    def needs(completions, answer):
        pytest.fail("is called")

    def may_have(completions, answer=()):
        pytest.fail("is called")

    def takes_all(completions, **fields):
        assert "answer" not in fields and fields["tags"] == [["x"], []]
        return [0.0, 0.0]

    for function in (needs, may_have):
        refused(
            f"line 2: the reward {function.__name__} needs 'answer', .* null where there is no value",
            function,
            lines=lines,
        )
    of(takes_all, lines=lines)


# --- where functions come from ----------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Writes a module into the current folder, which an installed command does not look into by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield lambda name, text: (tmp_path / f"{name}.py").write_text(text)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_may_import_its_neighbours_when_it_is_called(beside):
    beside("its_neighbour", "def score(text):\n    return len(text)\n")
    late = (
        "def late(completions):\n    from its_neighbour import score\n    return [score(each) for each in completions]"
    )
    beside("lazy_rewards", f"import tempfile\n{late}\n")
    path = list(sys.path)
    rewards = Rewards(["lazy_rewards:late=0.5"], LINES)
    assert rewards.weights == [0.5] and rewards.tried(LINES).numbers.tolist() == [[17, 1]]
    assert sys.path == path and set(rewards.code()) == {"lazy_rewards.py", "its_neighbour.py"}


@pytest.mark.parametrize(
    ["reward", "message"],
    [
        ("mine", "--reward=mine must name a function as module:function"),
        ("mine:gone", "--reward=mine:gone: mine has no function gone. Its functions are: f."),
        ("mine.py:f", "--reward=mine.py:f must name a module, and mine.py is a file. Pass --reward mine:f."),
        (
            "broken:f",
            "--reward=broken:f: broken cannot be imported: ZeroDivisionError: division by zero at broken.py:2.",
        ),
        ("ends:f", "--reward=ends:f: ends cannot be imported: SystemExit: 0 at ends.py:2."),
        ("hangs:f", "--reward=hangs:f: hangs is not imported within --reward-timeout=0.3 seconds."),
        ("no_such_module:f", "--reward=.*: no_such_module cannot be imported: ModuleNotFoundError"),
        ("mine:f=much", "--reward=.* what comes after mine:f= must be a number"),
        (
            "random:f",
            r"--reward=random:f: Python's own module random of .*random.py is imported already, and was taken in place "
            r"of .*random.py.",
        ),
        ("random:choice", "--reward=random:choice: Python's own module random .* Rename yours, and pass its new name."),
        ("numpy:mean", "--reward=numpy:mean: the module numpy of .*__init__.py is imported already"),
    ],
)
def test_a_function_that_is_not_there_is_refused(reward, message, beside):
    for name, text in {
        "mine": "def f(completions):\n    pass\n", "random": "def f(completions):\n    pass\n", "broken": "\n1 / 0\n",
        "numpy": "", "ends": "import sys\nsys.exit(0)\n", "hangs": "import time\ntime.sleep(1e6)\n",
    }.items():  # fmt: skip
        beside(name, text)
    with pytest.raises(UserError, match=f"^{message}"):
        Rewards([reward], LINES, 0.3)
    with pytest.raises(UserError, match="two functions 'f'"):
        Rewards(["mine:f", "mine:f=2"], LINES)


SCORER = """
class Scorer:
    def of_object(self, completions):
        return [1.0 for _ in completions]

    @staticmethod
    def static(completions):
        return [2.0 for _ in completions]

    @classmethod
    def of_class(cls, completions):
        return [3.0 for _ in completions]

    __call__ = of_object

scorer = Scorer()
"""


def test_methods_and_objects_that_are_called_are_rewards_and_a_class_is_none(beside):
    beside("scored", SCORER)
    given = [f"scored:{each}" for each in ("Scorer.static", "Scorer.of_class", "scorer.of_object", "scorer=4")]
    assert Rewards(given, LINES).tried(LINES).numbers[:, 0].tolist() == [2, 3, 1, 1]
    for name, problem in {
        "Scorer": "is a class, .*scored:scorer",
        "Scorer.of_object": ".* scored:scorer.of_object",
    }.items():
        with pytest.raises(UserError, match=rf"scored.{name} {problem}\.$"):
            Rewards([f"scored:{name}"], LINES)
    with pytest.raises(UserError, match="scored has no function Scorer.gone"):
        Rewards(["scored:Scorer.gone"], LINES)


# --- in a run ---------------------------------------------------------------------------------------------------------


class OneText(Tokenizer):
    """One that knows one text."""

    def __init__(self):
        pass

    def text(self, tokens, special=True):
        return "a prompt"


def rollouts(folder, *functions, samples=0, advantages="grpo", weights=(1.0, 1.0)):
    """The steps of a run with two groups of two completions."""
    settings = Settings.of(GrpoOptions,
        model="m", data="d", reward=[f"{__name__}:{each}={w:g}" for each, w in zip(functions, weights, strict=False)],
        group=2, batch=4, micro_batches=1, prompt_length=4, completion_length=4, samples=samples, out=str(folder),
        advantages=advantages,
    )  # fmt: skip
    return Rollouts(settings, PromptRows(LINES, 4, 2, 0, [("d", 1.0, 2)]), OneText())


def right(completions, answer):
    """1 for the answer, and `None` where there is none."""
    return [None if want is None else float(text == want) for text, want in zip(completions, answer, strict=True)]


def long(completions, log_metric, log_extra):
    """Applies to texts."""
    sizes = [len(each) if isinstance(each, str) else None for each in completions]
    log_metric("longest", max(each or 0 for each in sizes))
    log_extra("size", sizes)
    return sizes


def equal(completions, **columns):
    return [0.25 for _ in completions]


def fails(completions, answer):
    return [answer.strip() for _ in completions]


COMPLETIONS = [Completion(np.array([9], np.int32), text, False) for text in ("aaaa", "bb", "c", "d")]


@pytest.mark.parametrize("advantages", ["grpo", "rloo", "reinforce"])
def test_where_no_function_applies_a_completion_is_left_out_of_its_group(tmp_path, advantages):
    found = rollouts(tmp_path, "right", "long", advantages=advantages, weights=(2.0, 0.5), samples=4)
    scores = found._scores(0, LINES, COMPLETIONS)
    np.testing.assert_array_equal(scores.numbers, [[1, 0, np.nan, np.nan], [4, 2, np.nan, np.nan]])
    total, figures = found._rewarded(scores)
    np.testing.assert_array_equal(total, [[4, 1], [np.nan, np.nan]])
    expected = np.array({"rloo": [3, -3, 0, 0]}.get(advantages, [*np.array([1.5, -1.5]) / (4.5**0.5 + 1e-4), 0, 0]))
    np.testing.assert_allclose(found._advantages(total), expected, rtol=1e-6)
    assert figures["reward"] == 2.5 and figures["rewards/right/mean"] == 0.5 and figures["longest"] == 4
    assert figures["reward_std"] == pytest.approx(4.5**0.5) and figures["frac_reward_zero_std"] == 0.5
    records = found._records(LINES, COMPLETIONS, total, scores.extras)
    assert [(each["reward"], each["size"]) for each in records] == [(4, 4), (1, 2), (None, None), (None, None)]
    CompletionsFile(tmp_path).add(1, records)
    assert found.columns[-1] == "longest" and "rewards/long/std" in found.columns
    own = found._records(LINES, COMPLETIONS, total, {"step": [7] * 4, "reward": [8] * 4})
    assert own[0]["log_extra/step"] == 7 and own[0]["log_extra/reward"] == 8 and own[0]["reward"] == 4
    assert "step" not in own[0], "a step's lines are found by the run's number"


def test_rewards_are_tried_before_the_run(tmp_path, capsys):
    with pytest.raises(
        UserError,
        match=r"^The reward fails has failed on two made-up completions, .* AttributeError: "
        r"'list' .* at test_rewards.py:\d+. Correct it. A field of the data is a list .* completion\[0\]\[.content.\]",
    ):
        rollouts(tmp_path, "fails")
    rollouts(tmp_path, "long")
    assert "rewards log columns (size), which --samples writes into a file" in capsys.readouterr().out


def test_equal_rewards_of_the_first_step_and_of_several_steps_are_told(tmp_path, capsys):
    found = rollouts(tmp_path, "equal", "right")
    capsys.readouterr()
    for step in range(11):
        found._look_at_equals(step, np.array([[0.25] * 4, [0, 1, np.nan, 1]]), np.full((2, 2), 0.25))
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("the reward equal gives all 4 completions of the first step 0.25: either the task is too")
    assert "compares a text with a list" in told[0] and len(told) == 3
    for line, number in zip(told[1:], (5, 10), strict=True):
        assert line.startswith(
            f"no group of completions had rewards that differ in the last {number} steps, so nothing"
        )
    found._look_at_equals(0, np.array([[np.nan] * 4, [0, 1, 0, 1]]), np.array([[0, 1], [0, 1]]))
    told = capsys.readouterr().out
    assert told.startswith("the reward equal answers all 4 completions of the first step with None, so that")
    found._look_at_equals(12, np.zeros((2, 4)), np.array([[0, 1], [1, 1]]))
    found._look_at_equals(13, np.zeros((2, 4)), np.full((2, 2), np.nan))
    assert not capsys.readouterr().out


def test_changed_code_of_rewards_is_told_when_a_run_goes_on(tmp_path, beside, capsys, monkeypatch):
    found, log = rollouts(tmp_path, "equal"), {"steps": []}
    monkeypatch.setattr(found._rewards, "code", lambda: {"mine.py": "1a"})
    found.goes_on(log)
    log = json.loads(json.dumps(log)) | {"steps": [{}, {}]}
    capsys.readouterr()
    found.goes_on(log)
    assert not capsys.readouterr().out
    monkeypatch.setattr(found._rewards, "code", lambda: {"mine.py": "2b", "new.py": "3c"})
    found.goes_on(log)
    assert capsys.readouterr().out.startswith("mine.py changed since step 2 was saved: from here on completions")
    assert log["reward_code"] == {"mine.py": "2b", "new.py": "3c"}


def test_the_table_gets_a_column_for_a_figure_that_comes_later(tmp_path):
    with Log(("csv",), tmp_path, ("step", "loss"), []) as log:
        log.write({"step": 1, "loss": 0.5})
        log.write({"step": 2, "loss": 0.25, "own": 3.0})
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "own": 3.0}]
    assert figures_of(tmp_path) == rows
    with Log(("csv",), tmp_path, ("step", "loss"), rows) as log:  # of a run that goes on
        log.write({"step": 3, "loss": 0.125, "own": 4.0, "new": 1.0})
    assert figures_of(tmp_path) == [*rows, {"step": 3, "loss": 0.125, "own": 4.0, "new": 1.0}]


def test_a_folder_that_was_begun_with_the_old_call_is_refused(tmp_path, unchecked_types):
    settings = Settings.of(
        GrpoOptions, model="m", data="d", reward="r:f", group=2, batch=4, micro_batches=1, out=str(tmp_path)
    )
    run = types.SimpleNamespace(settings=settings, source=types.SimpleNamespace(folder=tmp_path))
    run.devices = types.SimpleNamespace(sizes={})
    old = {name: value for name, value in settings.of_the_run().items() if name != REWARD_CALL}
    Checkpoints(tmp_path / "checkpoints", old | {"steps": 3}).save(2, [jnp.ones(2)], {"steps": [{}, {}]})
    with pytest.raises(UserError, match="rewards were called once for each prompt, .* pass --fresh to"):
        resume.checkpoints_of(run, {"steps": 3})
    run.settings = settings.changed(fresh=True)
    assert resume.checkpoints_of(run, {"steps": 3}).latest_step is None
