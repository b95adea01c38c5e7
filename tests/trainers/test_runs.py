"""Runs of every command that trains: what they survive, and what they refuse with a sentence. A command is a line."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face import source
from liger_jax.trainers import result, resume
from liger_jax.training import cosine_schedule_with_warmup, lock, waiting
from tests import _tiny
from tests.models._hugging_face import GOLDEN

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
SMALL = "--lora 2 --length 64 --batch 2 --steps 2 --every 1 --eval-share 0 --learning-rate 0.03".split()
COMMANDS = {"finetune": SMALL, "dpo": SMALL, "distill": SMALL}  # by name, with the options of a run of two steps
DATA = {"finetune": _tiny.chats, "dpo": _tiny.pairs, "distill": _tiny.chats}
WEIGHTS = "model.safetensors"


class Command:
    """A command, on a tiny model and its data in a folder."""

    def __init__(self, name, folder):
        self.name, self.folder, self.model = name, folder, _tiny.checkpoint(folder / "model")
        (folder / "rows.jsonl").write_text(DATA[name](12))
        self.beside = [f"--data={folder / 'rows.jsonl'}"]
        if name == "distill":
            self.beside.append(f"--teacher={_tiny.checkpoint(folder / 'teacher', width=32)}")

    def arguments(self, out, *options, model=None):
        of_run = f"--model={model or self.model}", *self.beside, f"--out={out}"
        return [self.name, *of_run, *COMMANDS[self.name], *options]

    def __call__(self, out, *options, model=None):
        return main(self.arguments(out, *options, model=model))

    def error(self, capsys, out, *options, model=None):
        """The one sentence of a command that is refused."""
        capsys.readouterr()
        assert self(out, *options, model=model) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"liger-jax {self.name}: ") and error.count("\n") == 1, error
        return error


@pytest.fixture(
    scope="module", params=["finetune", *(pytest.param(name, marks=pytest.mark.full) for name in ("dpo", "distill"))]
)
def command(request, tmp_path_factory):
    return Command(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def finished_run(command):
    """The folder of a run that came to its end, and has read all of its weights."""
    assert command(command.folder / "out", "--verify") == 0
    return command.folder / "out"


@pytest.fixture
def finished(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "out")


def files_in(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


# --- a run that is finished -------------------------------------------------------------------------------------------


def test_the_command_of_a_finished_run_says_so_and_changes_nothing(command, finished, capsys, monkeypatch):
    before = files_in(finished)
    assert command(finished) == 0
    assert f"finished: {finished / 'adapters'} is there since step 2, the last one" in capsys.readouterr().out
    assert files_in(finished) == before
    monkeypatch.chdir(command.folder.parent)
    folder = f"./{command.folder.name}"  # the last --data counts
    assert command(finished, f"--data={folder}/rows.jsonl", model=f"{folder}/model") == 0
    assert "finished: " in capsys.readouterr().out


def test_adapters_are_merged_once(command, finished, capsys):
    assert command(finished, "--merge") == 0
    before = files_in(finished)
    assert command(finished, "--merge") == command(finished) == 0 and files_in(finished) == before
    error = command.error(capsys, finished, "--merge", model=finished / "model")
    assert f"written to {finished / 'model'}, which is --model itself. Pass another --out." in error
    linked = finished.parent / "linked"
    linked.mkdir()
    for path in (finished / "model").iterdir():  # as in the cache of a hub: the folder differs, and the files do not
        (linked / path.name).symlink_to(path)
    assert "which is --model itself" in command.error(capsys, finished, "--merge", model=linked)
    assert files_in(finished) == before


def test_more_steps_or_epochs_go_on_from_a_finished_run(command, finished, capsys):
    """The learning rate follows the longer schedule from then on, and the line says so."""
    log = lambda: (finished / "log.csv").read_text().splitlines()
    two = log()
    capsys.readouterr()
    assert command(finished, "--steps=4") == 0
    said = capsys.readouterr().out
    assert "resumed at step 2" in said and "4 steps; " in said
    last, then = (float(line.split(",")[two[0].split(",").index("learning_rate")]) for line in log()[2:4])
    rule = "goes on from step 2 to 4, where it was to end at 2: the learning rate follows the schedule of 4 steps from"
    assert f"{rule} here on, with {then:.1e} after {last:.1e}" in said
    assert then == pytest.approx(float(cosine_schedule_with_warmup(0.03, 4)(2))) and log()[:3] == two
    assert command(finished, "--steps=4") == 0 and "finished: " in capsys.readouterr().out
    assert "steps=4 became 3. Pass --fresh to start over" in command.error(capsys, finished, "--steps=3")


def test_a_longer_run_says_which_result_it_has_left_as_it_was(command, finished, capsys):
    assert command(finished, "--merge") == 0
    capsys.readouterr()
    older = "is of an earlier step: the same command with"
    assert command(finished, "--steps=4") == 0
    assert f"{finished / 'model'} {older} --merge writes that of step 4 there" in capsys.readouterr().out
    assert [place.name for place in result.places(finished)] == ["adapters", "model"]  # for `liger-jax chat`
    assert command(finished, "--steps=4", "--merge") == 0 and older not in capsys.readouterr().out
    assert [place.name for place in result.places(finished)] == ["model", "adapters"]
    assert command(finished, "--steps=5", "--merge") == 0
    assert f"{finished / 'adapters'} {older} --no-merge writes that of step 5 there" in capsys.readouterr().out


def test_a_run_of_part_of_an_epoch_says_which_rows_its_longer_run_leaves_out():
    before = {"steps": 3, "epochs": 1.3, "batch": 8}
    lines = functools.partial(resume.longer_run, before, steps=4, last_rate=0.1, rate=lambda step: 0.2, rows=10)
    assert lines(done=3)[1:] == ["5 rows left out, once: the epoch was cut off within a batch"]
    assert lines(done=2)[1:] == [] and lines(done=0) == [] and lines(done=3, steps=3) == []


def test_a_result_is_trained_on_in_a_new_folder(command, finished, tmp_path, capsys):
    assert command(finished, "--merge") == 0
    assert command(tmp_path / "second", model=finished / "model") == 0
    assert (tmp_path / "second" / "adapters").is_dir()
    capsys.readouterr()
    error = command.error(capsys, tmp_path / "third", model=finished)
    assert f"{finished} is the folder of a run. Its result is {finished / 'model'}: pass that." in error


def test_dropout_that_is_not_applied_is_said(command, tmp_path, capsys):
    model = shutil.copytree(command.model, tmp_path / "model")
    values = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (model / "config.json").write_text(json.dumps(values))
    assert (
        main(
            [
                command.name,
                f"--model={model}",
                *command.beside[1:],
                f"--data={tmp_path / 'none.txt'}",
                f"--out={tmp_path / 'out'}",
                "--length=64",
            ]
        )
        == 2
    )
    assert "attention_dropout=0.1 of config.json is not applied" in capsys.readouterr().out


def test_what_is_trained_is_said_and_rows_are_as_long_as_the_model_takes(command, tmp_path, capsys):
    none = [f"--data={tmp_path / 'none.txt'}", f"--out={tmp_path / 'out'}"]
    start = [command.name, f"--model={command.model}", *command.beside[1:], *none]
    assert main(start) == main([*start, "--lora=32"]) == 2
    said = capsys.readouterr().out
    assert len(re.findall("length: rows of 512 tokens, the most that .* takes, and not of 2,048\n", said)) == 2
    told = r"trained: all ([\d,]+) parameters\n(?s:.*)trained: ([\d,]+) of ([\d,]+) parameters, \d"
    whole, adapters, both = (int(number.replace(",", "")) for number in re.search(told, said).groups())
    assert both == whole + adapters > whole > 0
    assert "--lora 32 is more than the model's width, and rank 16 can hold any change already\n" in said
    assert main([*start, "--length=513"]) == 2
    assert "--length=513 is more than the 512 positions" in capsys.readouterr().err


def test_what_narrow_or_misspelt_models_need_is_a_sentence(command, tmp_path, capsys):
    error = command.error(capsys, tmp_path / "out", "--quantize=nf4")
    assert "into blocks of 64, which do not divide the widths of" in error and error.endswith("Leave it out.\n")
    error = command.error(capsys, tmp_path / "out", model=command.folder / "modle")
    assert error.endswith(f"no such folder: '{command.folder / 'modle'}'. Did you mean '{command.model}'?\n")


@pytest.fixture
def nf4_checkpoint(command, tmp_path):
    model = shutil.copytree(GOLDEN / "llama_nf4", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(command.model / name, model)
    tensors = load_file(model / WEIGHTS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.tile(tensors[name], (12, 1))[:320]
    save_file(tensors, model / WEIGHTS)
    values = json.loads((model / "config.json").read_text()) | {"vocab_size": 320}
    (model / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.full  # such checkpoints are read by models/test_checkpoint.py, and trained on by models/test_quantized.py
def test_an_nf4_checkpoint_is_trained_with_adapters(command, nf4_checkpoint, tmp_path):
    with pytest.warns(UserWarning, match="become dense, since not all layers"):
        assert command(tmp_path / "out", "--merge", model=nf4_checkpoint) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(merged))} == {"bfloat16"}


def test_an_nf4_checkpoint_without_adapters_is_refused(command, nf4_checkpoint, tmp_path, capsys):
    other = [f"--model={nf4_checkpoint}", *command.beside, f"--out={tmp_path / 'other'}"]
    assert main([command.name, *other]) == 2
    assert "are nf4, and stay as they are. Pass --lora, such as --lora 16." in capsys.readouterr().err


def test_a_result_that_is_gone_is_written_again(command, finished):
    before = (finished / "adapters" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(finished / "adapters")
    assert command(finished) == 0
    assert (finished / "adapters" / "adapter_model.safetensors").read_bytes() == before


def test_the_result_of_a_kept_step_stands_beside_the_run_s(command, finished, capsys):
    before, options = files_in(finished / "checkpoints"), (finished / "settings.toml").read_text()
    assert command(finished, "--result-of=2", "--keep=7") == 0
    assert (finished / "settings.toml").read_text() == options
    assert f"the result of step 2 is in {finished / 'adapters-2'}" in capsys.readouterr().out
    for path in (finished / "adapters").iterdir():
        assert path.read_bytes() == (finished / "adapters-2" / path.name).read_bytes()
    assert files_in(finished / "checkpoints") == before
    with pytest.raises(FileNotFoundError, match="--result-of STEP makes a model of a checkpoint that is kept"):
        source.find(finished / "checkpoints" / "2").kept(())
    error = command.error(capsys, finished, "--result-of=1")
    assert "--result-of=1: this step's checkpoint is not kept; those of 2 are. --keep keeps more of them." in error
    error = command.error(capsys, finished, "--result-of=2", "--fresh")
    assert "exports a checkpoint of the existing run, which --fresh discards" in error


# --- what a run is made of --------------------------------------------------------------------------------------------


def negated(path):
    save_file({name: -x for name, x in load_file(path).items()}, path, {"format": "pt"})


def one_bit(path):
    """Changes what is between the blocks that are read every time."""
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    tensors = load_file(path)
    large = max(tensors.values(), key=lambda x: x.nbytes)
    assert large.nbytes > 3 * 4096
    at = bytes(content).index(np.ascontiguousarray(large).tobytes(), length) + 5000
    content[at] ^= 1
    path.write_bytes(content)


def other_template(path):
    path.write_text(path.read_text().replace("message.content +", "message.content + ' ' +"))


def spaced(path):
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ["name", "change", "options"],
    [
        (WEIGHTS, negated, []),
        (WEIGHTS, one_bit, ["--verify"]),
        ("tokenizer_config.json", other_template, []),
        ("tokenizer.json", spaced, []),
        ("config.json", spaced, []),
    ],
    ids=["weights", "one bit of the weights", "template", "tokenizer", "config"],
)
def test_a_model_that_has_changed_is_named(command, finished, tmp_path, capsys, name, change, options):
    before = files_in(finished)
    original = (command.model / name).read_bytes()
    try:  # the folder's name stays the same
        change(command.model / name)
        assert (command.model / name).read_bytes() != original
        error = command.error(capsys, finished, *options)
    finally:
        (command.model / name).write_bytes(original)
    assert re.search(rf"holds another run: .*{name}='\w+' became '\w+'.* Pass --fresh to start over", error)
    assert files_in(finished) == before


# --- damage and neighbours --------------------------------------------------------------------------------------------


def test_the_last_whole_checkpoint_is_offered(command, finished, capsys):
    shutil.rmtree(finished / "adapters")
    (finished / "checkpoints" / "999").mkdir()
    error = command.error(capsys, finished)
    newest = finished / "checkpoints" / "999"
    assert f"The checkpoint of step 2 is intact: move {newest} elsewhere to resume from it." in error
    assert "--fresh" not in error


def test_a_process_that_writes_to_the_same_folder_is_named(command, finished, capsys):
    before = files_in(finished)
    with lock.held(finished):
        error = command.error(capsys, finished, "--fresh")
    assert f"Another process writes to {finished}: process {os.getpid()} on " in error
    assert error.endswith("Wait for it, end it, or pass another --out.\n") and files_in(finished) == before


def test_room_on_the_disk_is_looked_for_before_training(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 4096}))
    error = command.error(capsys, tmp_path / "out")
    assert re.search(r"The disk of .* has 4\.0 KiB left, and 3 more checkpoints of .* and the result need", error)
    assert error.endswith("Make room, or pass another --out.\n")


# --- absurd values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["options", "message"],
    [
        (["--steps", str(10**20)], f"--steps={10**20} must be at least 1 and at most 2147483647."),
        (["--seed", str(2**70)], f"--seed={2**70} must be at least 0 and at most 4294967295."),
        (["--batch", str(10**30)], "--batch must be at least 1 and at most 2147483647."),
        (["--batch", str(-(10**4000))], "--batch must be at least 1."),
        (["--batch", str(2**30)], "rows of --length=64 are more than the 2,147,483,647 tokens that a step can have."),
        (["--lora", str(2**40)], "must be at least 1 and at most 65536."),
        (["--keep", "0"], "--keep=0 must be at least 1."),
        (["--lora-alpha", "1e39"], "--lora-alpha=1e+39 is more than a float32 holds."),
        (["--out", "o\0ut"], r"--out='o\x00ut' holds a null character, which file names cannot have."),
        (["--model", "o\0ut"], r"--model='o\x00ut' holds a null character, which file names cannot have."),
    ],
)
def test_absurd_values_are_sentences(command, tmp_path, capsys, options, message):
    assert message in command.error(capsys, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_absurd_epochs_are_a_sentence(command, tmp_path, capsys, monkeypatch):
    name, options = command.name, COMMANDS[command.name]
    at = options.index("--steps")
    monkeypatch.setitem(COMMANDS, name, [*options[:at], *options[at + 2 :]])
    assert "are more than 2,147,483,647 rows. Pass fewer." in command.error(capsys, tmp_path, "--epochs", "1e30")


def test_messages_are_bounded(command, tmp_path, capsys):
    assert len(command.error(capsys, tmp_path, "--subset", "x\0" + "y" * 10**6)) < 3000


# --- kills ------------------------------------------------------------------------------------------------------------

KINDS = {
    "adapters": ["--lora=2"],
    "all weights": [],
    "packed": ["--lora=2", "--pack"],
    "merged": ["--lora=2", "--merge"],
}
CHAINS = {
    "dpo": ("adapters", "packed"),
    "distill": ("all weights", "merged"),
}  # finetune has all


def check_kills(command, tmp_path, options, steps, export):
    """A run that was killed again and again ends with the bytes of one that was not disturbed."""
    base = f"--length=64 --batch=2 --steps={steps} --every=1 --eval-share=0.2 --learning-rate=0.03".split()
    arguments = [command.name, f"--model={command.model}", *command.beside, *base, *options]
    arguments += ["--mesh=fsdp=1"]  # several devices are simulated here
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    seed = np.random.default_rng().integers(2**31)
    program = [sys.executable, Path(__file__).with_name("_kills.py"), json.dumps(arguments), whole, killed]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in ("", *sys.path) if path)}
    done = subprocess.run(
        [*map(str, program), export, str(seed)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["last"] == 0, (told, seed, done.stderr[-3000:])
    assert set(told["codes"]) == {-signal.SIGKILL}, (told, seed)
    results = [folder / told["result"] for folder in (whole, killed)]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in results]
    assert contents[0] == contents[1], (told, seed)
    tables = [[row.split(",") for row in (f / "log.csv").read_text().splitlines()] for f in (whole, killed)]
    same = tables[0][0].index("learning_rate") + 1  # what comes after it is of the machine, or not of each step
    tables = [[row[:same] for row in table] for table in tables]
    assert tables[0] == tables[1] and len(tables[0]) == steps + 1, (told, seed)
    assert [path.name for path in (killed / "checkpoints").iterdir() if "tmp" in path.name] == [], (told, seed)
    print(told)
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the chain forks")
def test_a_run_that_is_killed_three_times_ends_with_the_same_bytes(command, tmp_path):
    check_kills(command, tmp_path, KINDS["all weights"], 5, "one")


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the chain forks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_kills_ends_with_the_same_bytes(command, tmp_path, kind):
    if kind not in CHAINS.get(command.name, KINDS):
        pytest.skip("another command has it: a run goes on by one code in all")
    told = check_kills(command, tmp_path, KINDS[kind], 12, "all")
    assert len(told["codes"]) >= 8


def test_a_checkpoint_that_is_read_while_the_step_is_compiled_says_so(capsys, unchecked_types):
    kept: Any = types.SimpleNamespace(latest_settings={}, latest_step=3, restore=lambda state: (state, {"steps": []}))
    inputs: Any = types.SimpleNamespace(steps=9, rate=float, data=types.SimpleNamespace(num_in_epoch=9))
    compiled = threading.Event()
    compiling = waiting.beside(compiled.wait)
    resume.restored(kept, None, inputs)
    compiled.set()
    compiling.result()
    while waiting.is_busy():  # a moment more than its result takes
        time.sleep(0.001)
    resume.restored(kept, None, inputs)
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("reading"))
    assert first.startswith("reading the checkpoint of step 3, while the step is compiled … ")
    assert second.startswith("reading the checkpoint of step 3 … ")
