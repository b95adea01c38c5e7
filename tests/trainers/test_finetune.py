"""`liger-jax finetune` on a tiny checkpoint: what it prints, how it goes on, and what it leaves."""

import contextlib
import dataclasses
import gc
import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax.commands import main
from liger_jax.data.step_rows import StepRows
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.lora import load_adapters, merge_lora
from liger_jax.planner import devices
from liger_jax.trainers import recipe, run_loop, text
from liger_jax.trainers.finetune_options import LOSS_TYPES, FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.training import Checkpoints, identity, loss_and_accuracy, make_step, pack, pad, rows, score_sums, scoring
from liger_jax.training.errors import CheckpointError
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.trainers._runs import figures_of

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
CHAT = "--lora 4 --pack --length 64 --batch 4 --micro-batches 2 --steps 6 --every 4 --learning-rate 0.05".split()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations and texts beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(30))
    texts = [json.dumps({"text": _tiny.text(6 + i % 11, i)}) for i in range(50)]
    (folder.parent / "texts.jsonl").write_text("\n".join(texts))
    return folder


def chat(source, out, *options):
    """The exit code of a run on conversations."""
    data = f"--data={source.parent / 'chats.jsonl'}"
    return main(["finetune", f"--model={source}", data, f"--out={out}", *CHAT, *options])


@contextlib.contextmanager
def ctrl_c_in_the_third_step():
    """Runs get the signal when they ask for the third step's batch."""
    rows_of = StepRows.rows_of

    def stopping(in_steps, step, *args):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return rows_of(in_steps, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRows, "rows_of", stopping)
        yield


@pytest.fixture(scope="module")
def interrupted(source, tmp_path_factory):
    """The folder of a run that Ctrl-C stopped in its third step, and the exit code."""
    out = tmp_path_factory.mktemp("runs") / "interrupted"
    with ctrl_c_in_the_third_step():
        code = chat(source, out)
    return out, code


def test_ctrl_c_saves_after_the_step_that_runs(interrupted):
    out, code = interrupted
    assert code == 128 + signal.SIGINT
    assert (out / "checkpoints" / "3").is_dir() and not (out / "adapters").exists()
    assert [figures["step"] for figures in figures_of(out)] == [1, 2, 3]


@pytest.mark.full
def test_ctrl_c_before_the_first_step_leaves_a_run_that_goes_on(source, tmp_path, monkeypatch):
    scoring = run_loop.scoring

    def stopping(*args):
        monkeypatch.setattr(run_loop, "scoring", scoring)
        score = scoring(*args)

        def at(params, parts):
            signal.raise_signal(signal.SIGINT)
            return score(params, parts)

        return at

    monkeypatch.setattr(run_loop, "scoring", stopping)
    assert chat(source, tmp_path) == 128 + signal.SIGINT and (tmp_path / "checkpoints" / "0").is_dir()
    assert chat(source, tmp_path) == 0 and len(figures_of(tmp_path)) == 6


@pytest.fixture(scope="module")
def resumed(source, interrupted, tmp_path_factory):
    """The folder of a run that went on from there to its end, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "end"
    shutil.copytree(interrupted[0], out)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        assert chat(source, out) == 0
    return out, printed.getvalue()


def test_a_resumed_run_says_its_step_and_ends_as_one_that_was_never_stopped(source, resumed, tmp_path, capsys):
    out, printed = resumed
    assert "resumed at step 3\n" in printed
    for what in (
        r"reading [\d.]+ KiB of weights",
        "adding adapters of rank 4, while the step is compiled",
        "tracing",
        "compiling",
    ):
        assert re.search(rf"^{what} … [\d.]+ s$", printed, re.MULTILINE)
    assert re.search(r"6/6 .*loss [\d.]+, token accuracy [\d.]+, [\d,]+ tokens/s, [\d.]+ GiB", printed)
    assert re.search(r"step 6: held out: loss [\d.]+, perplexity [\d.]+, token accuracy [\d.]+\n", printed)
    assert chat(source, tmp_path) == 0
    assert "resumed at" not in capsys.readouterr().out
    same = "step loss token_accuracy grad_norm learning_rate eval_loss eval_perplexity eval_token_accuracy".split()
    ours, others = (
        [{name: row[name] for name in same if name in row} for row in figures_of(folder)] for folder in (out, tmp_path)
    )
    assert ours == others and len(ours) == 6 and ours[-1]["loss"] < ours[0]["loss"]
    assert all(row["grad_norm"] > 0 for row in ours)
    adapters = [load_file(folder / "adapters" / "adapter_model.safetensors") for folder in (out, tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *adapters)


@pytest.mark.full
def test_a_run_that_goes_on_holds_no_second_state_while_its_own_is_read(source, tmp_path, monkeypatch):
    command = ["finetune", f"--model={source}", f"--data={source.parent / 'texts.jsonl'}", f"--out={tmp_path}"]
    command += "--length=64 --batch=4 --every=1 --eval-share=0".split()
    assert main([*command, "--steps=1"]) == 0
    held, restore = [], Checkpoints.restore

    def held_bytes():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    def restored(self, like):
        held.append(held_bytes() - before)
        return restore(self, like)

    monkeypatch.setattr(Checkpoints, "restore", restored)
    before = held_bytes()
    assert main([*command, "--steps=2"]) == 0
    weights = sum(x.nbytes for x in load_file(source / "model.safetensors").values())
    assert len(held) == 1 and held[0] < weights / 2


def test_a_run_leaves_adapters_with_all_that_a_chat_needs(source, resumed):
    folder = resumed[0] / "adapters"
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the latter holds the chat template
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    ids = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"] for token in ids if token["id"] in stops} == {"<|endoftext|>", "<|im_end|>"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source) and config["r"] == 4


@pytest.mark.full
def test_a_finished_run_is_merged_by_the_same_command(source, resumed, tmp_path):
    shutil.copytree(resumed[0], tmp_path / "run")
    assert chat(source, tmp_path / "run", "--merge") == 0
    adapted = load_adapters(AutoModelForCausalLM.from_pretrained(source), resumed[0] / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    weights = [nnx.to_pure_dict(nnx.state(model)) for model in (merge_lora(adapted), merged)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), *weights)


def test_a_loss_that_is_nan_stops_the_run_and_keeps_the_last_checkpoint(
    source, interrupted, tmp_path, capsys, monkeypatch
):
    out, weights = tmp_path / "run", source / "model.safetensors"
    shutil.copytree(interrupted[0], out)
    before, digests = weights.read_bytes(), identity.of_weights(source, [weights.name])
    monkeypatch.setattr(identity, "of_weights", lambda folder, names: digests)  # else the run is another one
    try:
        save_file({name: x * np.nan for name, x in load_file(weights).items()}, weights, {"format": "pt"})
        assert chat(source, out) == 2
    finally:
        weights.write_bytes(before)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("liger-jax finetune: The loss is nan at step 4, so training stops. The checkpoint of step 3")
    assert (out / "checkpoints" / "3").is_dir()


def test_the_result_is_of_the_last_step_and_a_better_one_is_told(source, tmp_path, capsys, monkeypatch):
    losses = iter(
        [5.0, 4.0, 9.0, 3.0, 9.0, 8.0, 9.0, 7.0, 9.0]
    )  # before step 1, and of held-out and own rows after each
    scores = lambda: {"eval_loss": next(losses), "eval_perplexity": 1.0, "eval_token_accuracy": 0.0}
    monkeypatch.setattr(run_loop, "scoring", lambda *args: lambda params, parts: scores())
    assert chat(source, tmp_path, "--every=1", "--steps=4") == 0
    there = tmp_path / "checkpoints" / "2"
    assert (
        "adapters is of step 4, the last one; by held-out loss the best is step 2, with 3.000, whose checkpoint stays "
        f"in {there}; the same command with --result-of 2 makes adapters-2 of it\n" in capsys.readouterr().out
    )
    assert sorted(path.name for path in there.parent.iterdir() if path.is_dir()) == ["2", "4"]


def test_a_checkpoint_of_another_run_is_refused(source, interrupted, capsys):
    assert chat(source, interrupted[0], "--learning-rate=0.01") == 2
    error = capsys.readouterr().err
    assert "holds another run: learning_rate=0.05 became 0.01. Pass --fresh" in error and error.count("\n") == 1


def test_a_run_goes_on_only_with_the_same_tokens_and_labels(source, interrupted, capsys):
    config = source / "tokenizer_config.json"
    before = config.read_text()
    try:  # the same documents under another template
        config.write_text(before.replace("message.content +", "message.content + '!' +"))
        assert config.read_text() != before and chat(source, interrupted[0]) == 2
    finally:
        config.write_text(before)
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("holds another run: rows='.*chat template make them: .*' became '.*'. Pass --fresh", error)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_that_fill_a_batch_weigh_nothing(source, packed):
    model = AutoModelForCausalLM.from_pretrained(source)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, size).astype(np.int32) for size in (16, 9, 14)]
    laid = (pack if packed else pad)(documents, 16)
    (filled,) = rows.batched(laid, 8)
    assert rows.num_rows(laid) == 3 and rows.num_rows(filled) == 8 and rows.num_tokens(filled) == 39
    graph, params = nnx.split(model)
    optimizer = optax.sgd(1.0)
    step = lambda **options: make_step(graph, optimizer, loss_and_accuracy, has_aux=True, **options)
    state = params, optimizer.init(params)
    expected, found = jax.jit(step())(state, laid), jax.jit(step(micro_batches=4))(state, filled)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


def test_dft_multiplies_a_token_s_loss_by_its_probability(source, rng):
    model = AutoModelForCausalLM.from_pretrained(source)
    batch = {name: jnp.asarray(rng.integers(0, 300, (4, 9)), jnp.int32) for name in ("input_ids", "labels")}
    by_type = [
        text.TASK.loss(Settings.of(FinetuneOptions, model="m", data="d", loss_type=kind), None) for kind in LOSS_TYPES
    ]

    @nnx.jit
    def found(model):
        return model.log_probs(**batch).log_probs, *(loss(model, batch, 40.0)[0] for loss in by_type)

    log_p, nll, dft = (np.asarray(x, np.float64) for x in found(model))
    np.testing.assert_allclose(nll, -np.sum(log_p) / 40, rtol=1e-5)
    np.testing.assert_allclose(dft, -np.sum(np.exp(log_p) * log_p) / 40, rtol=1e-5)


def test_a_run_of_before_there_was_a_choice_goes_on_by_nll():
    of_the_run = lambda **loss: Settings.of(FinetuneOptions, model="m", data="d", **loss).of_the_run()
    before = {name: value for name, value in of_the_run().items() if name != "loss_type"}
    identity.check_same(Path("run"), before, of_the_run())
    with pytest.raises(CheckpointError, match="loss_type='dft' is new"):
        identity.check_same(Path("run"), before, of_the_run(loss_type="dft"))


def test_text_is_learnt_by_all_weights_with_its_figures_for_tensorboard(source, tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    options = "--length 32 --batch 4 --epochs 1.1 --eval-share 0.1 --log csv,tensorboard --learning-rate 0.01".split()
    data = f"--data={source.parent / 'texts.jsonl'}"
    assert main(["finetune", f"--model={source}", data, f"--out={tmp_path}", *options]) == 0
    printed = capsys.readouterr().out  # of 45 rows, 12 steps and then 2 of a tenth of them
    assert (
        "memory: the run needs" in printed
        and "data: 50 documents in 50 pieces; 45 pieces with " in printed
        and "; 5 pieces held out" in printed
    )
    first, last = map(float, re.search(r"14 steps; held out: loss ([\d.]+) → ([\d.]+); model in", printed).groups())
    assert last < first - 1 and f"step 0: held out: loss {first:.3f}" in printed
    after = f"next: liger-jax generate --model {tmp_path / 'model'} --prompt 'Once upon a time'"  # the data is texts
    assert after in printed.splitlines()
    assert list((tmp_path / "tensorboard").glob("events.*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.kept.stops == AutoModelForCausalLM.from_pretrained(source).kept.stops != ()


@pytest.mark.full
def test_weights_in_bfloat16_have_the_same_bits_after_a_run_that_was_stopped(source, tmp_path):
    options = f"--data={source.parent / 'texts.jsonl'} --length 32 --batch 4 --steps 5 --param-dtype bfloat16".split()
    train = lambda out: main(["finetune", f"--model={source}", f"--out={tmp_path / out}", *options])
    with ctrl_c_in_the_third_step():
        assert train("stopped") == 128 + signal.SIGINT
    assert train("stopped") == train("whole") == 0
    stopped, whole = ((tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("stopped", "whole"))
    assert stopped == whole


def test_the_optimizer_is_the_one_that_is_asked_for(source, tmp_path, capsys, monkeypatch):
    def asked(name, rate, **options):
        raise UserError(f"asked for {name}")

    monkeypatch.setattr(recipe, "optimizer_named", asked)
    assert chat(source, tmp_path, "--optimizer", "adamw8bit") == 2
    assert "asked for adamw8bit" in capsys.readouterr().err


@pytest.mark.full
def test_moments_in_8_bits_are_those_of_a_run_that_was_stopped(source, tmp_path):
    """The tiny embedding of 320 × 16 numbers is the one parameter that is large enough for codes."""
    options = f"--data={source.parent / 'texts.jsonl'} --length 32 --batch 4 --steps 4 --optimizer adamw8bit".split()
    train = lambda out: main(["finetune", f"--model={source}", f"--out={tmp_path / out}", *options])
    with ctrl_c_in_the_third_step():
        assert train("stopped") == 128 + signal.SIGINT
    assert train("stopped") == train("whole") == 0
    stopped, whole = ((tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("stopped", "whole"))
    assert stopped == whole


def test_a_run_that_cannot_fit_is_refused_with_the_options_that_make_it_fit(source, tmp_path, capsys, monkeypatch):
    size = 3 * 2**20
    small = dataclasses.replace(devices.target("l4"), name="small", memory_bytes=size, capacity_bytes=size)
    monkeypatch.setattr(devices, "here", lambda: small)
    command = ["finetune", f"--model={source}", f"--data={tmp_path / 'none.jsonl'}", f"--out={tmp_path}"]
    command += "--length 512 --batch 8 --pack --remat none --dtype float32".split()  # whatever device is here
    assert main(command) == 2
    printed, error = capsys.readouterr()
    advised = re.search(r"The run needs .* It fits with (--.+): [\d.]+ GiB\.\n$", error)
    assert advised and not printed, (printed, error)
    assert main([*command, *advised[1].split()]) == 2
    printed, error = capsys.readouterr()
    assert "memory: the run needs" in printed and "none.jsonl" in error  # it fits, and looks for its data


@pytest.mark.parametrize("packed", [True, False])
def test_perplexity_counts_the_tokens_of_each_document_by_itself(source, packed):
    model = AutoModelForCausalLM.from_pretrained(source)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, size).astype(np.int32) for size in (3, 9, 14, 5, 2, 16)]
    scored = [np.where(rng.random(len(tokens)) < 0.7, tokens, -100) for tokens in documents]
    held_out = (pack if packed else pad)(documents, 16, labels=scored)
    graph, params, frozen = nnx.split(model, nnx.Param, ...)
    found = scoring(score_sums(graph), frozen)(params, list(rows.batched(held_out, 4)))

    padded = np.stack([np.pad(tokens, (0, 16 - len(tokens))) for tokens in documents])
    logits = np.asarray(jax.jit(lambda tokens: model(tokens).logits)(padded), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = [
        -log_probs[i, at - 1, label]
        for i, labels in enumerate(scored)
        for at, label in enumerate(labels)
        if at > 0 and label >= 0
    ]
    np.testing.assert_allclose(found["eval_perplexity"], np.exp(np.mean(losses)), rtol=1e-5)


@pytest.mark.full
def test_adapters_beside_quantised_weights_learn(source, tmp_path):
    wide = _tiny.checkpoint(tmp_path / "model", width=64)  # quantised blocks have 64 values
    shutil.copy(source.parent / "chats.jsonl", tmp_path)
    assert chat(wide, tmp_path / "run", "--quantize=nf4") == 0
    figures = figures_of(tmp_path / "run")
    assert figures[-1]["loss"] < figures[0]["loss"]


@pytest.mark.full
def test_weights_whose_loss_is_not_finite_are_never_saved(source, tmp_path, capsys):
    options = "--length 32 --batch 4 --steps 4 --every 1 --eval-share 0 --learning-rate 1e38".split()
    data = f"--data={source.parent / 'texts.jsonl'}"
    assert main(["finetune", f"--model={source}", data, f"--out={tmp_path}", *options]) == 2
    assert "after step 1, so training stops. There is no checkpoint yet." in capsys.readouterr().err


class Wandb:
    """What the package would be told."""

    def __init__(self):
        self.runs, self.figures, self.ended = [], [], 0

    def init(self, **options):
        self.runs.append(options)
        return self

    def log(self, figures, step):
        self.figures.append((step, figures))

    def finish(self):
        self.ended += 1


def test_a_run_stops_early_with_the_best_weights_and_shows_samples(source, tmp_path, capsys, monkeypatch):
    """By the options of its own file, which goes on with it, and begins another."""
    told, losses = Wandb(), iter([5.0, 4.0, 9.0, 3.0, 9.0, 8.0, 9.0, 7.0, 9.0])
    monkeypatch.setitem(sys.modules, "wandb", told)
    monkeypatch.setattr("liger_jax.trainers.log.check_wandb", lambda: None)
    monkeypatch.setenv("WANDB_PROJECT", "counting")
    monkeypatch.delenv("WANDB_NAME", raising=False)
    with monkeypatch.context() as patch:
        scores = lambda: {"eval_loss": next(losses), "eval_perplexity": 1.0, "eval_token_accuracy": 0.0}
        patch.setattr(run_loop, "scoring", lambda *args: lambda params, parts: scores())
        options = "--every=1 --patience=2 --samples=1 --log=csv,wandb --schedule=constant --warmup=0 --seed=3".split()
        assert chat(source, tmp_path / "run", *options) == 0
    printed = capsys.readouterr().out
    assert "stopped after step 4 of 6: step 2 had the least held-out loss, and is taken\n" in printed
    assert len(re.findall(r"^sample 1: user .* assistant ▸ ", printed, re.MULTILINE)) == 5, printed
    assert len({row["learning_rate"] for row in figures_of(tmp_path / "run")}) == 1
    assert [step for step, _ in told.figures] == [1, 2, 3, 4] and told.ended == 1
    assert told.runs[0]["config"]["patience"] == 2 and told.runs[0]["name"] == "run"
    assert told.runs[0]["project"] == "counting"

    config = f"--config={tmp_path / 'run' / 'settings.toml'}"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    assert main(["finetune", config]) == 0
    assert "is there since step 4, where --patience ended it; nothing is changed" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}

    other = ["--steps=2", "--log=csv", "--samples=0", f"--out={tmp_path / 'other'}"]
    assert main(["finetune", config, *other]) == 0
    ours, others = (load_file(tmp_path / out / "adapters" / "adapter_model.safetensors") for out in ("run", "other"))
    jax.tree.map(np.testing.assert_array_equal, ours, others)  # at a constant rate two steps are the same


def test_settings_of_no_run_are_not_replaced(source, tmp_path, capsys):
    (tmp_path / "settings.toml").write_text("steps = 3")
    assert chat(source, tmp_path) == 2
    assert "settings.toml was not written by a run, and would be overwritten" in capsys.readouterr().err


def test_wandb_that_is_not_installed_is_told_before_anything_is_read(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["finetune", "--model=none", "--data=none", f"--out={tmp_path}", "--log=wandb"]) == 2
    assert capsys.readouterr().err == "liger-jax finetune: --log=wandb needs the package wandb: pip install wandb.\n"


@pytest.mark.full
def test_a_mixture_of_formats_is_learnt_and_its_tokens_are_found_again(source, tmp_path, capsys):
    asked = [{"instruction": _tiny.text(2, i), "output": _tiny.text(3, i + 2)} for i in range(8)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = [{"prompt": _tiny.text(2, i), "completion": " " + _tiny.text(3, i + 2)} for i in range(8)]
    (tmp_path / "done.jsonl").write_text("\n".join(map(json.dumps, done)))
    data = ["--data", f"{tmp_path / 'asked.json'}=2", f"{tmp_path / 'done.jsonl'}=0.5"]
    data += ["--eval-data", str(source.parent / "chats.jsonl")]
    options = "--lora 4 --length 64 --batch 4 --epochs 2 --learning-rate 0.05".split()
    command = ["finetune", f"--model={source}", *data, f"--out={tmp_path / 'out'}", *options]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "an epoch has 20 rows" in printed and "10 steps; held out: loss" in printed and "tokenising" in printed
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "finished: " in printed and "tokenising" not in printed
