"""The loop around a step: what it measures, when it saves, what stops it, and how it goes on."""

import contextlib
import io
import re
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.training import Checkpoints, Loop, NotFiniteError, OutOfHostMemoryError, OutOfMemoryError
from liger_jax.training.signals import SIGNALS


def step(state, batch):
    """Parameters count the steps; the loss is what the batch says."""
    params, moments = state
    return (params + 1, moments), (jnp.float32(batch[0, 0]), {"share": jnp.float32(0.5)})


def batch_of(number):
    return np.full((2, 4), number + 1)


def loop(**options):
    return Loop(**{"step": step, "batch_of": batch_of, "steps": 5, "progress": False, **options})


def start():
    return jnp.zeros(()), jnp.zeros(2)


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_each_step_has_its_figures(capsys):
    seen = []
    state, stopped_by = loop(rate=lambda step: 0.1 * step, write=seen.append).run(start())
    assert float(state[0]) == 5 and stopped_by == 0 and capsys.readouterr().out == ""
    assert [each["loss"] for each in seen] == [1, 2, 3, 4, 5] == [each["step"] for each in seen]
    assert seen[3]["share"] == 0.5 and seen[3]["learning_rate"] == pytest.approx(0.3)
    assert all(each["tokens_per_second"] > 0 and each["memory_gib"] >= 0 for each in seen)


def test_the_checkpoint_with_the_least_held_out_loss_stays_beside_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", {})
    scores = lambda params: {"eval_loss": abs(float(params) - 2)}
    loop(evaluate=scores, every=1, checkpoints=checkpoints).run(start())
    assert steps_in(tmp_path / "run") == [2, 5] and checkpoints.best == (2, 0.0)


def test_a_loss_that_is_no_longer_less_ends_the_loop_and_the_best_can_be_read(tmp_path):
    checkpoints, shown = Checkpoints(tmp_path / "run", {}), []
    options = dict(
        evaluate=lambda params: {"eval_loss": abs(float(params) - 2)},
        every=1,
        steps=9,
        checkpoints=checkpoints,
        show=lambda params, write: shown.append(float(params)),
    )
    log = {"steps": []}
    state, stopped_by = loop(patience=2, **options).run(start(), log)
    assert float(state[0]) == len(log["steps"]) == 4 and stopped_by == 0 and shown == [0, 1, 2, 3, 4]
    assert float(checkpoints.read(2, start())[0][0]) == 2
    state, _ = loop(patience=2, **options).run(state, log)  # is over as it begins
    assert float(state[0]) == 4
    state, _ = loop(patience=3, **options).run(state, log)
    assert float(state[0]) == 5
    state, _ = loop(**options).run(state, log)
    assert float(state[0]) == 9


def test_losses_that_are_not_finite_count_as_no_improvement():
    figures = [{"eval_loss": loss} for loss in (3.0, float("nan"), float("inf"))]
    assert not loop(patience=3).is_over(figures) and loop(patience=2).is_over(figures)
    assert not loop(patience=1).is_over([{"loss": 1.0}] * 4) and loop(patience=1).is_over([{"loss": 1.0}] * 5)


@pytest.fixture
def saves(monkeypatch):
    """Checkpoints whose saves are counted, and not written."""
    steps = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, state, log, score=None: steps.append(step))
    return steps


def test_scores_are_told_before_the_first_step_and_after_every_save(tmp_path, capsys, saves):
    scores = lambda params: {"eval_loss": float(params), "eval_perplexity": 2.0}
    log = {"steps": []}
    loop(evaluate=scores, every=2, checkpoints=Checkpoints(tmp_path / "run", {})).run(start(), log)
    told = re.findall(r"step (\d): held out: loss ([\d.]+), perplexity 2.00\n", capsys.readouterr().out)
    assert told == [("0", "0.000"), ("2", "2.000"), ("4", "4.000"), ("5", "5.000")]
    assert saves == [2, 4, 5] and [each["step"] for each in log["steps"] if "eval_loss" in each] == saves


@pytest.fixture
def handled_signals():
    """Signals with the handlers that Python begins with: whoever runs the tests may ignore SIGHUP, as nohup does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.usefixtures("handled_signals")
def test_a_run_that_a_signal_stops_is_saved_and_goes_on_to_the_same_end(tmp_path, number):
    def stopping(step):
        if step == 2:
            signal.raise_signal(number)
        return batch_of(step)

    before = signal.getsignal(number)
    checkpoints = Checkpoints(tmp_path / "run", {})
    state, stopped_by = loop(batch_of=stopping, checkpoints=checkpoints).run(start())
    assert stopped_by == number and signal.getsignal(number) is before
    assert float(state[0]) == 3 and steps_in(tmp_path / "run") == [3]
    again = Checkpoints(tmp_path / "run", {})
    found, log = again.restore(start()) or (None, {})
    state, stopped_by = loop(checkpoints=again).run(found, log)
    assert float(state[0]) == 5 and stopped_by == 0
    assert [each["loss"] for each in log["steps"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("where", ["batch_of", "after"])
def test_a_keyboard_interrupt_of_the_user_s_code_is_a_first_signal(tmp_path, where):
    def interrupted(*given):
        number = given[-1]["step"] if where == "after" else given[0] + 1
        if number == 3:
            raise KeyboardInterrupt
        return batch_of(given[0]) if where == "batch_of" else False

    state, stopped_by = loop(checkpoints=Checkpoints(tmp_path, {}), **{where: interrupted}).run(start())
    done = 3 if where == "after" else 2
    assert (float(state[0]), stopped_by) == (done, signal.SIGINT) and steps_in(tmp_path) == [done]


@pytest.mark.parametrize("where", ["batch", "step", "behind the update"])
def test_the_steps_before_one_that_fails_are_saved_while_their_state_is_there(tmp_path, where):
    updated = jax.jit(step, donate_argnums=0)

    def failing(number):
        if number == 2:
            raise KeyError("rows")
        return batch_of(number)

    def failing_step(state, batch):
        if batch[0, 0] == 3 and where == "step":
            raise KeyError("rewards")
        found = updated(state, batch)
        if batch[0, 0] == 3:
            raise KeyError("figures")
        return found

    checkpoints, log = Checkpoints(tmp_path / "run", {}), {"steps": []}
    options = dict(batch_of=failing) if where == "batch" else dict(step=failing_step)
    with pytest.raises(KeyError):
        loop(**options, checkpoints=checkpoints).run(start(), log)
    assert len(log["steps"]) == 2 and steps_in(tmp_path / "run") == ([] if where == "behind the update" else [2])
    if where != "behind the update":
        found, log = checkpoints.restore(start()) or (None, {})
        assert float(found[0]) == 2 and float(loop(checkpoints=checkpoints).run(found, log)[0][0]) == 5


def test_what_is_not_finite_is_not_saved_because_a_step_fails(tmp_path):
    def failing(number):
        if number == 2:
            raise KeyError("rows")
        return batch_of(number)

    check = lambda params, number: float("nan")
    with pytest.raises(KeyError):
        loop(batch_of=failing, check=check, checkpoints=Checkpoints(tmp_path / "run", {})).run(start())
    assert steps_in(tmp_path / "run") == []


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signal")
def test_a_closed_terminal_stops_nothing_under_nohup():
    def hung_up(step):
        signal.raise_signal(signal.SIGHUP)
        return batch_of(step)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        state, stopped_by = loop(batch_of=hung_up).run(start())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert float(state[0]) == 5 and stopped_by == 0


def test_a_signal_in_the_last_step_stops_nothing():
    def stopping(number):
        if number == 4:
            signal.raise_signal(signal.SIGINT)
        return batch_of(number)

    assert loop(batch_of=stopping).run(start())[1] == 0


def test_what_is_saved_has_a_finite_loss(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", {})
    check = lambda params, number: float("nan") if number == 4 else 1.0
    with pytest.raises(NotFiniteError, match=r"The loss is nan after step 4, .* The checkpoint of step 2 stays\. Try"):
        loop(check=check, every=2, checkpoints=checkpoints).run(start())
    assert steps_in(tmp_path / "run") == [2]
    with pytest.raises(
        NotFiniteError, match=r"^The loss is inf at step 1, before the first update, so training stops\. Look for"
    ):
        loop(batch_of=lambda number: np.full((1, 1), np.inf)).run(start())


def test_saves_follow_the_clock_if_asked(tmp_path, saves):
    checkpoints = Checkpoints(tmp_path / "run", {})
    loop(seconds=-1, checkpoints=checkpoints).run(start())
    loop(seconds=3600, checkpoints=checkpoints).run(start())
    assert saves == [1, 2, 3, 4, 5, 5]


def test_too_little_memory_is_a_sentence_and_other_errors_stay():
    def failing(message):
        def step(state, batch):
            raise jax.errors.JaxRuntimeError(message)

        return step

    with pytest.raises(OutOfMemoryError, match=r"^The device ran out of memory in step 1\. There is no checkpoint yet"):
        loop(step=failing("RESOURCE_EXHAUSTED: out of memory")).run(start())
    # As XLA has it, which was tried with too small a pool.
    of_host = "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 4.00GiB with allocator xla_gpu_host_bfc"
    with pytest.raises(OutOfHostMemoryError, match=r"^The host's pinned memory ran out in step 1\..*LIMIT_GB"):
        loop(step=failing(of_host)).run(start())
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        loop(step=failing("INTERNAL: a bug")).run(start())


def test_the_bar_shows_the_figures_that_it_is_told(capsys):
    with contextlib.redirect_stderr(io.StringIO()) as bar:
        loop(progress=True, shown=("loss", "share", "tokens_per_second", "memory_gib")).run(start())
    assert re.search(r"5/5 .*loss 5\.000, share 0\.500, [\d,]+ tokens/s, [\d.]+ GiB", bar.getvalue())


def test_small_figures_are_told_by_their_digits(tmp_path, capsys):
    scores = lambda params: {"eval_loss": 4.1234e-4, "eval_rewards/margins": -0.05, "eval_token_accuracy": 0.5}
    loop(evaluate=scores, steps=1).run(start())
    assert "held out: loss 0.000412, rewards/margins -0.05, token accuracy 0.500\n" in capsys.readouterr().out


def test_a_loop_runs_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(loop().run(start())[1]))
    thread.start()
    thread.join()
    assert found == [0]
