"""Runs whose documents share rows learn what those with a padded row for each document learn."""

import dataclasses
import json
import re
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax import losses
from liger_jax.commands import main
from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.step_rows import Laying
from liger_jax.data.training_rows import TrainingRows
from liger_jax.models import KernelOptions, OlmoeConfig, OlmoeForCausalLM
from liger_jax.ops import DynamicRope, LongRope
from liger_jax.planner import devices
from liger_jax.planner.estimate import estimate as memory_estimate
from liger_jax.trainers import LoRA, finetune, memory, reference_log_probs, run_data, step_sizes
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.training import meshes, row_sizes
from tests import _tiny
from tests.data.test_step_rows import Tokens
from tests.trainers._runs import figures_of

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
FINETUNE = "finetune --lora 4 --lora-dropout 0.3 --length 128 --batch 8 --micro-batches 2 --steps 4"
DPO = "dpo --lora 4 --length 128 --batch 4 --steps 3 --eval-share 0.2"
KTO = "dpo --loss kto --lora 4 --length 128 --batch 4 --steps 3 --eval-share 0.2"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    _tiny.checkpoint(folder.parent / "teacher", vocab_size=336, width=32)
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(30))
    (folder.parent / "pairs.jsonl").write_text(_tiny.pairs(24))
    (folder.parent / "answers.jsonl").write_text(_tiny.answers(24))
    return folder


def run(source, out, command, *options):
    name, *given = command.split()
    files = {"dpo": "answers.jsonl" if "kto" in given else "pairs.jsonl"}
    data = source.parent / files.get(name, "chats.jsonl")
    more = [f"--teacher={source.parent / 'teacher'}"] if name == "distill" else []
    given = [f"--model={source}", f"--data={data}", f"--out={out}", "--learning-rate=0.02", *more, *given, *options]
    assert main([name, *given]) == 0
    return figures_of(out)


@pytest.mark.parametrize(
    "command",
    [
        # By default test_calls.py compares a run in shared rows with one whose documents have rows of their own.
        pytest.param(FINETUNE, marks=pytest.mark.full),
        pytest.param(f"{FINETUNE} --mesh data=2", marks=pytest.mark.full),
        pytest.param(f"{FINETUNE} --mesh fsdp=2", marks=pytest.mark.full),
        pytest.param(f"{FINETUNE} --mesh sequence=2", marks=pytest.mark.full),
        pytest.param(DPO, marks=pytest.mark.full),
        pytest.param("dpo --length 128 --batch 4 --micro-batches 2 --steps 3 --eval-share 0.2", marks=pytest.mark.full),
        pytest.param(f"{DPO} --mesh data=2", marks=pytest.mark.full),
        pytest.param(
            "dpo --lora 4 --lora-dropout 0.3 --length 128 --batch 8 --micro-batches 2 --steps 3 --mesh fsdp=2",
            marks=pytest.mark.full,
        ),
        pytest.param(f"{DPO} --loss aot", marks=pytest.mark.full),
        pytest.param(f"{DPO} --loss aot --mesh data=2", marks=pytest.mark.full),
        pytest.param(f"{DPO} --loss apo_zero", marks=pytest.mark.full),
        pytest.param(KTO, marks=pytest.mark.full),
        pytest.param(f"{KTO} --mesh data=2", marks=pytest.mark.full),
        pytest.param("distill --length 128 --batch 8 --steps 3 --mesh fsdp=2", marks=pytest.mark.full),
        pytest.param("distill --length 128 --batch 8 --steps 3 --top-k 9 --mesh data=2", marks=pytest.mark.full),
        pytest.param("distill --length 128 --batch 8 --steps 3", marks=pytest.mark.full),
        pytest.param("distill --length 128 --batch 8 --steps 3 --top-k 9 --lora 2", marks=pytest.mark.full),
    ],
)
def test_documents_that_share_rows_teach_what_padded_rows_teach(command, source, tmp_path, capsys, monkeypatch):
    found = run(source, tmp_path / "laid", command)
    line = next(x for x in capsys.readouterr().out.split("\n") if x.startswith("steps: "))
    monkeypatch.setattr(step_sizes, "_began_padded", lambda settings: True)
    expected = run(source, tmp_path / "padded", command)
    padded = next(x for x in capsys.readouterr().out.split("\n") if x.startswith("steps: "))
    share = lambda text: float(text.rsplit(", ", 1)[1].split("%")[0])
    assert share(line) < share(padded)
    speed = ("tokens_per_second", "memory_gib")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - set(speed):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(), ("--mesh=expert=2",)])
def test_routers_losses_are_those_of_padded_rows_in_one_micro_batch(mesh, source, tmp_path, monkeypatch):
    mixture = tmp_path / "data" / "mixture"
    shutil.copytree(source.parent, mixture.parent)
    shutil.copytree(source, mixture)
    config = OlmoeConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5, output_router_logits=True,
        max_position_embeddings=512,
    )  # fmt: skip
    eos = json.loads((source / "config.json").read_text())["eos_token_id"]
    (mixture / "model.safetensors").unlink()
    OlmoeForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(mixture, config_fields={"eos_token_id": eos})
    command = "finetune --length 128 --batch 8 --micro-batches 1 --steps 3"
    found = run(mixture, tmp_path / "laid", command, *mesh)
    monkeypatch.setattr(step_sizes, "_began_padded", lambda settings: True)
    assert found[0]["loss"] > np.log(320) + 0.3  # the routers' is in it
    for ours, theirs in zip(found, run(mixture, tmp_path / "padded", command, *mesh), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)


@pytest.mark.full
def test_a_stream_in_shared_rows_teaches_what_padded_rows_teach(source, tmp_path, capsys, monkeypatch):
    rows = [{"text": _tiny.text(3 + 7 * i % 50, i)} for i in range(60)]
    options = dict(stream=True, eval_data=rows[:9], adapters=LoRA(4, dropout=0.3), length=128, batch=8, steps=5)
    train = lambda out: finetune(str(source), rows[9:], out=out, micro_batches=2, learning_rate=0.02, **options)
    found = train(tmp_path / "laid").metrics
    assert "steps: 5 of 8 pieces, in rows × places of 2 · " in capsys.readouterr().out
    monkeypatch.setattr(step_sizes, "_began_padded", lambda settings: True)
    expected = train(tmp_path / "padded").metrics
    assert "steps: 5 of 8 pieces, in rows × places of 2 · 4 × 128" in capsys.readouterr().out
    for name in ("loss", "eval_loss", "token_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.full
def test_a_stream_of_before_keeps_its_padded_rows(source, tmp_path, capsys, monkeypatch):
    rows = [{"text": _tiny.text(3 + 7 * i % 50, i)} for i in range(60)]
    options = dict(stream=True, eval_data=rows[:9], adapters=LoRA(4), length=128, batch=8, micro_batches=2)
    train = lambda out, steps: finetune(str(source), rows[9:], out=out, steps=steps, learning_rate=0.02, **options)
    with monkeypatch.context() as patch:
        patch.setattr(step_sizes, "_began_padded", lambda settings: True)
        expected = train(tmp_path / "whole", 5).metrics
        train(tmp_path / "run", 3)
    capsys.readouterr()
    found = train(tmp_path / "run", 5).metrics
    printed = capsys.readouterr().out
    assert "resumed at step 3" in printed and "rows: each document has its own row of 128 places" in printed
    assert "steps: 5 of 8 pieces, in rows × places of 2 · 4 × 128" in printed
    assert found["eval_loss"][-1] == pytest.approx(
        expected["eval_loss"][-1], rel=1e-2
    )  # the schedule was that of 3 steps


@pytest.mark.full
def test_last_steps_of_epochs_in_fewer_rows_teach_what_padded_rows_teach(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(row_sizes, "of_a_program", lambda: 1e-9)
    command = "finetune --lora 4 --lora-dropout 0.3 --length 24 --batch 8 --micro-batches 2 --epochs 2"
    found = run(source, tmp_path / "laid", command)
    assert re.search(r" in rows × places of 2 · 4 × 24 .* and [12] · [1-3] × 24 \(2 steps\)", capsys.readouterr().out)
    monkeypatch.setattr(step_sizes, "_began_padded", lambda settings: True)
    for ours, theirs in zip(found, run(source, tmp_path / "padded", command), strict=True):
        for name in ours.keys() - {"tokens_per_second", "memory_gib"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("scaling", [DynamicRope(2.0, 64), LongRope((1.0,) * 8, (2.0,) * 8, 2.0, 64)])
def test_rows_say_where_documents_begin_where_the_largest_position_counts(scaling):
    config = types.SimpleNamespace(rope_scaling=scaling)
    assert [step_sizes.reads_largest_position(config, length) for length in (64, 65)] == [False, True]
    assert not step_sizes.reads_largest_position(types.SimpleNamespace(rope_scaling=None), 65)


def test_rows_fit_the_teacher_too_and_those_of_before_stay(tmp_path, monkeypatch):
    of = lambda longest, scaling=None: types.SimpleNamespace(
        longest_sequence=longest, rope_scaling=scaling, hidden_size=8, num_recurrent_layers=0
    )
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t", length=80, out=str(tmp_path))
    teacher = types.SimpleNamespace(config=of(96, DynamicRope(2.0, 64)))
    laying = lambda: step_sizes.laying(settings, of(4096), teacher, meshes.Devices())
    found = laying()
    assert (found.longest, found.in_segments, found.padded) == (96, True, False)
    monkeypatch.setattr(step_sizes, "_began_padded", lambda settings: True)
    assert not laying().in_segments


class Summing(nnx.Module):
    """A model whose log-probability of a token is its id."""

    kernels = KernelOptions()  # of one device

    def log_probs(self, input_ids, labels, segment_ids, positions):
        labels = losses.shifted_labels(labels, segment_ids)
        return types.SimpleNamespace(log_probs=jnp.where(labels != -100, labels, 0).astype(jnp.float32))


def test_references_are_of_their_answers_however_many_share_a_row(tmp_path, rng):
    """Pairs that are held out share rows, and those that are trained on are too long for it."""
    tokens = Tokens([*rng.integers(60, 65, 8), *rng.integers(2, 9, 8)], together=2)
    laid, held_out = (LaidRows(tokens, [some], 128, False) for some in (np.arange(8), np.arange(8, 16)))
    settings = Settings.of(PairOptions, model="m", data="d", length=128, batch=4, out=str(tmp_path))
    data = TrainingRows(laid, held_out, None, "").laid_in_steps(4, 0, 1.0, 1, Laying(batch=4, growth=1.0))
    assert data.in_steps.sizes[0].rows == 4 and data.num_segments == 2
    reference_log_probs.add_columns(settings, data)
    reference_log_probs.fill(settings, data, Summing(), {})
    for rows in (laid, held_out):
        of_piece = lambda piece: sum(x for x in tokens.arrays(piece)[1][1:].tolist() if x != -100)
        expected = [of_piece(piece) for piece in rows.pieces.tolist()]
        np.testing.assert_allclose(rows.beside[reference_log_probs.NAME].ravel(), expected, rtol=1e-6)


@pytest.mark.full
def test_a_folder_of_before_keeps_its_rows_and_a_new_run_says_what_changed(source, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(step_sizes, "_began_padded", lambda settings: True)
        run(source, tmp_path, FINETUNE)
    capsys.readouterr()
    run(source, tmp_path, FINETUNE.replace("--steps 4", "--steps 5"))
    printed = capsys.readouterr().out
    assert "resumed at step 4" in printed and "rows: each document has its own row of 128 places" in printed
    run(source, tmp_path, FINETUNE, "--fresh")
    printed = capsys.readouterr().out
    assert "rows: documents share rows now" in printed and "resumed" not in printed


def test_the_largest_size_of_a_run_is_that_of_its_step_with_most_tokens():
    tokens = Tokens([*[60] * 8, *[100, 120] * 2, *[5] * 8])
    laid = LaidRows(tokens, [np.arange(20)], 128, False)
    settings = Settings.of(FinetuneOptions, model="m", data="d", length=128, batch=4, steps=20, eval_share=0.0)
    laying = Laying(batch=4, program=0.0)
    size = run_data.largest_size(TrainingRows(laid, None, None, ""), settings, laying)
    in_steps = TrainingRows(laid, None, None, "").laid_in_steps(*settings.recipe.order, 20, laying).in_steps
    assert size == max(map(in_steps.size_of, range(20)), key=lambda size: size.places)


@pytest.mark.full
def test_a_batch_is_judged_by_the_largest_rows_of_its_steps(source, tmp_path, capsys, monkeypatch):
    needed = []
    of = lambda size: dataclasses.replace(devices.target("l4"), memory_bytes=size, capacity_bytes=size)
    monkeypatch.setattr(devices, "here", lambda: of(2**34))
    monkeypatch.setattr(memory, "estimate", lambda run: needed.append(memory_estimate(run)) or needed[-1])
    options = "finetune --length 128 --batch 8 --micro-batches 1 --remat full --steps 2".split()
    run(source, tmp_path / "fits", " ".join(options))
    assert "memory: the run needs at most " in capsys.readouterr().out
    size = needed[0].total - 1  # rows of the whole length do not fit
    monkeypatch.setattr(devices, "here", lambda: of(size))
    run(source, tmp_path / "judged", " ".join(options))
    printed = capsys.readouterr().out
    counted = re.search(r"memory: the run needs [\d.]+ GiB in rows × places of (\d+ × [\d,]+) by", printed)[1]
    assert f"in rows × places of {counted} (" in printed or f" and {counted} (" in printed


@pytest.mark.full
def test_chats_that_fill_one_row_are_computed_alone(source, tmp_path, capsys):
    packed = "finetune --pack --length 512 --steps 2 --eval-share 0.1"
    whole, few = (run(source, tmp_path / str(n), packed, f"--batch={n}") for n in (4, 16))
    printed = capsys.readouterr().out.split("steps: ")
    assert "in rows × places of 4 × 512 (2 steps)" in printed[-1] and "few tokens" not in printed[-1]
    for ours, theirs in zip(few, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.mark.parametrize("takes_segments", [True, False])
def test_a_folder_of_before_says_why_its_documents_share_no_rows(takes_segments, tmp_path, monkeypatch):
    monkeypatch.setattr(step_sizes, "_has_padded", lambda settings: True)
    settings = Settings.of(FinetuneOptions, model="m", data="d", length=64, batch=2, out=str(tmp_path))
    laying = step_sizes.laying_of(settings, 8, whole=True, takes_segments=takes_segments)
    tokens = Tokens([9] * 8)
    tokens.meta["kind"] = "piece"
    data = TrainingRows(LaidRows(tokens, [np.arange(8)], 64, False), None, None, "")
    data = data.laid_in_steps(2, 0, 1.0, 4, laying)
    first, *_ = step_sizes.lines(settings, data, 4, laying, takes_segments)
    assert laying.padded and first.startswith("rows: each document has its own row of 64 places")
    assert ("--fresh" in first, "takes segment_ids and positions" in first) == (takes_segments, not takes_segments)


@pytest.mark.parametrize(["batch", "steps", "advice"], [(2, None, "--batch 16 --learning-rate 2.8e-05 trains"),
    (2, 99, "--batch 16 --learning-rate 2.8e-05 --steps 13 trains"), (2, 3, ""),
    (128, None, ""), (999, None, "")])  # fmt: skip
def test_a_larger_batch_is_named_where_a_step_has_few_tokens(batch, steps, advice, tmp_path):
    tokens = Tokens(np.full(200, 50))
    laid, laying = LaidRows(tokens, [np.arange(200)], 256, False), Laying(batch=batch)
    tokens.meta["kind"] = "piece"
    settings = Settings.of(
        FinetuneOptions, model="m", data="d", length=256, batch=batch, steps=steps, out=str(tmp_path)
    )
    number = settings.recipe.num_steps(200)
    data = TrainingRows(laid, None, None, "").laid_in_steps(*settings.recipe.order, number, laying)
    first, *more = step_sizes.lines(settings, data, number, laying)
    epochs = "1 epoch" if steps is None else f"{steps / 100:.3g} epochs"
    assert first.startswith(f"steps: {number} of {min(batch, 200)} pieces, {epochs}; ")
    assert (advice in more[0]) if advice else not more
