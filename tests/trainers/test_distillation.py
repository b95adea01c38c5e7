"""`liger-jax distill` on tiny checkpoints: that its loss is the divergence, that it learns, and what it refuses."""

import importlib
import importlib.util
import inspect
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax import losses
from liger_jax.commands import main
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.data.training_rows import prepared
from liger_jax.models import AutoModelForCausalLM, KernelOptions
from liger_jax.models.auto import FAMILIES
from liger_jax.models.core.memory import values_in_forward
from liger_jax.models.hugging_face.source import find
from liger_jax.planner.architectures import architecture_of
from liger_jax.planner.devices import GIB
from liger_jax.trainers import decided_run, distillation, memory, stored_top_k
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.memory import TeacherMemory
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import TEACHER
from liger_jax.trainers.teacher import Teacher
from liger_jax.trainers.teacher import found as find_teacher
from liger_jax.training.meshes import Devices
from liger_jax.training.rows import INPUTS, batched
from tests import _tiny
from tests.trainers._runs import figures_of

SMALL = "--length 64 --batch 4 --steps 6 --every 3 --eval-share 0.2 --learning-rate 0.02".split()
VOCAB, K = 29, 5  # entries that both models have, and those that are stored


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A student's folder, with a teacher of another width and more padding in its head, and conversations beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    sharp(_tiny.checkpoint(folder.parent / "teacher", vocab_size=336, width=32))
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(24))
    return folder


def sharp(folder):
    """Gives a model with random weights probabilities that differ by much."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] *= 20
    save_file(tensors, path, {"format": "pt"})
    return folder


def run(source, out, *options, teacher=None):
    data = f"--data={source.parent / 'chats.jsonl'}"
    asked = [f"--model={source}", f"--teacher={teacher or source.parent / 'teacher'}", data, f"--out={out}"]
    return main(["distill", *asked, *SMALL, *options])


# --- the loss ---------------------------------------------------------------------------------------------------------


def model_of(rng, width, vocab_size):
    """A model whose hidden states are these, whatever the tokens."""
    hidden, head = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 12, width), (vocab_size, width)))
    config = types.SimpleNamespace(logit_scale=1.0, final_logit_softcapping=None)
    states = lambda input_ids, segment_ids, positions: hidden
    return types.SimpleNamespace(hidden_states=states, head=head, config=config, kernels=KernelOptions())


@pytest.fixture
def models(rng):
    """A student and its teacher. Their heads have padding, and the teacher's logits a softcap."""
    student = model_of(rng, 8, VOCAB + 3)
    student.teacher = model_of(rng, 16, VOCAB)
    student.teacher.config = types.SimpleNamespace(logit_scale=0.5, final_logit_softcapping=3.0)
    return student


@pytest.fixture
def batch(rng):
    """Three rows of two segments and an empty end, in which some labels do not count."""
    ids = np.repeat([[1, 2, 0]], [5, 5, 2], axis=1).repeat(3, axis=0).astype(np.int32)
    tokens = rng.integers(0, VOCAB, ids.shape).astype(np.int32)
    labels = np.where((ids == 0) | (rng.random(ids.shape) < 0.3), -100, tokens)
    return jax.tree.map(jnp.asarray, {"input_ids": tokens, "labels": labels, "segment_ids": ids, "positions": ids * 0})


def exact(models, batch, temperature):
    """(tokens, V) logits of student and teacher over the temperature, and the labels' log-probabilities, in float64.

    The labels' are at temperature 1.
    """
    targets = np.asarray(losses.shifted_labels(batch["labels"], batch["segment_ids"]))
    where, found = targets != -100, []
    for model in (models, models.teacher):
        z = np.asarray(model.hidden_states(0, 0, 0), np.float64) @ np.asarray(model.head, np.float64)[:VOCAB].T
        cap = model.config.final_logit_softcapping
        found.append((z if cap is None else cap * np.tanh(z / cap))[where] * model.config.logit_scale)
    of_labels = np.take_along_axis(log_softmax(found[0]), targets[where][:, None], 1)[:, 0]
    return found[0] / temperature, found[1] / temperature, of_labels


def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


def cosine(x, y):
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def of_probabilities(divergence):
    return lambda student, teacher: divergence(log_softmax(student), log_softmax(teacher))


ORACLES = {
    "forward_kl": of_probabilities(lambda s, t: kl(t, s)),
    "reverse_kl": of_probabilities(kl),
    "jsd": of_probabilities(
        lambda s, t: 0.3 * kl(t, m := np.logaddexp(s + np.log(0.7), t + np.log(0.3))) + 0.7 * kl(s, m)
    ),
    "tvd": of_probabilities(lambda s, t: 0.5 * np.abs(np.exp(s) - np.exp(t)).sum(-1)),
    "cosine": lambda s, t: 1 - cosine(s, t),
}


@pytest.mark.parametrize("name", ORACLES)
def test_the_loss_is_the_mean_divergence_of_scored_tokens(name, models, batch):
    temperature = 1.0 if name == "cosine" else 2.0
    options = dict(divergence=name, temperature=temperature, hard_weight=0.25)
    options |= {"beta": 0.3} if name == "jsd" else {}
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t", **options)
    loss, _ = distillation.loss_of(settings.method, VOCAB)(models, batch)
    student, teacher, of_labels = exact(models, batch, temperature)
    expected = 0.75 * ORACLES[name](student, teacher) - 0.25 * of_labels
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


@pytest.mark.parametrize("tail", ["bucket", "ignore"])
def test_stored_tokens_give_the_divergence_of_what_is_stored(tail, models, batch):
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t", temperature=2.0, top_k=K, tail=tail)
    rows = {name: batch[name] for name in INPUTS}
    stored = dict(zip(stored_top_k.COLUMNS, stored_top_k.top_k(models.teacher, rows, K, 2.0, VOCAB), strict=True))
    student, teacher = map(log_softmax, exact(models, batch, 2.0)[:2])
    where = np.asarray(losses.shifted_labels(batch["labels"], batch["segment_ids"])) != -100
    largest = np.argsort(-teacher, axis=1)[:, :K]
    np.testing.assert_array_equal(np.asarray(stored["token_ids"])[where], largest)
    s, t = (np.take_along_axis(x, largest, 1) for x in (student, teacher))
    np.testing.assert_allclose(np.asarray(stored["log_probs"])[where], t, rtol=1e-5)
    expected = kl(t, s)
    if tail == "bucket":
        rest = [np.log(1 - np.exp(x).sum(-1)) for x in (t, s)]
        expected += np.exp(rest[0]) * (rest[0] - rest[1])
    del models.teacher  # it is not needed
    loss, _ = distillation.loss_of(settings.method, VOCAB)(models, {**batch, **stored})
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


# --- stored rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_columns_have_at_each_scored_place_what_was_written_for_it(packed, source, tmp_path, monkeypatch):
    """The "teacher" here says of a token its number, its position and its row's sum."""
    settings = Settings.of(DistillOptions,
        model=str(source), data=str(source.parent / "chats.jsonl"), teacher=str(source.parent / "teacher"), length=64,
        pack=packed, eval_share=0.2, top_k=2, out=str(tmp_path), batch=4,
    )  # fmt: skip
    teacher = find_teacher(settings, find(source), architecture_of(find(source)))
    data = prepared(
        settings.rows, settings.recipe.batch, settings.recipe.seed, Tokenizer(source, 320, []), tmp_path / "tokens"
    )
    some = stored_top_k.add_columns(settings, data)
    assert not data.rows["token_ids"][[0, 1]].any()  # before they are filled

    def said(rows):
        sums = np.broadcast_to(rows["input_ids"].sum(axis=1, keepdims=True), rows["input_ids"].shape)
        ids = np.stack([rows["input_ids"], sums], axis=-1).astype(np.int32)
        return ids, -ids.astype(np.float32)

    def contents(some, *_):
        for stored in some:
            for number, part in enumerate(batched(stored.laid, 4)):
                numbers = np.arange(number * 4, min(number * 4 + 4, stored.laid.num_rows))
                scored = stored_top_k.scored_places(stored.laid, numbers)
                yield stored_top_k._entries(2, said(part), [(i, np.flatnonzero(each)) for i, each in enumerate(scored)])

    monkeypatch.setattr(stored_top_k, "_contents", contents)
    stored_top_k.fill(some, teacher, settings, data, None, {"rows": "these"})
    order, rows = np.zeros(0, int), {}
    for laid in data.laid:
        order = np.random.default_rng(0).permutation(laid.num_rows)
        rows = {name: laid[name][order] for name in laid}
        labels, ids = rows["labels"], rows.get("segment_ids")
        where = np.asarray(losses.shifted_labels(labels, None if ids is None else ids)) != -100
        assert where.any()
        for name, expected in zip(stored_top_k.COLUMNS, said(rows), strict=True):
            np.testing.assert_array_equal(rows[name], np.where(where[..., None], expected, 0))
    again = stored_top_k.add_columns(settings, data)
    monkeypatch.setattr(stored_top_k, "_contents", None)  # a later start does not ask the teacher
    stored_top_k.fill(again, teacher, settings, data, None, {"rows": "these"})
    np.testing.assert_array_equal(data.laid[-1]["log_probs"][order], rows["log_probs"])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_student_comes_nearer_to_its_teacher_which_is_neither_trained_nor_written(source, tmp_path, capsys):
    before = (source.parent / "teacher" / "model.safetensors").read_bytes()
    assert run(source, tmp_path) == 0
    figures = figures_of(tmp_path)
    assert figures[-1]["loss"] < 0.9 * figures[0]["loss"]
    assert figures[-1]["eval_divergence"] < figures[2]["eval_divergence"]
    assert figures[-1]["eval_loss"] == pytest.approx(figures[-1]["eval_divergence"])
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(load_file(source / "model.safetensors"))
    assert (source.parent / "teacher" / "model.safetensors").read_bytes() == before
    capsys.readouterr()
    config = f"--config={tmp_path / 'settings.toml'}"
    assert main(["distill", config]) == 0
    printed, told = capsys.readouterr()
    assert "finished: " in printed and "not read" not in told
    shutil.copytree(source.parent / "teacher", tmp_path / "other")
    values = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(values | {"rope_theta": 1e5}))
    moved = (tmp_path / "settings.toml").read_text().replace(str(source.parent / "teacher"), str(tmp_path / "other"))
    (tmp_path / "moved.toml").write_text(moved)
    assert main(["distill", f"--config={tmp_path / 'moved.toml'}"]) == 2
    error = capsys.readouterr().err
    assert "holds another run: teacher=" in error and "teacher's config.json=" in error


@pytest.mark.full
def test_a_damaged_file_of_stored_tokens_is_made_again(source, tmp_path, capsys):
    whole, path = tmp_path / "whole", tmp_path / "run" / "teacher.bin"
    options = ("--pack", "--top-k=16", "--hard-weight=0.2")
    assert run(source, whole, *options) == 0
    figures = figures_of(whole)
    assert figures[-1]["loss"] < figures[0]["loss"]
    shutil.copytree(whole, tmp_path / "run")
    before = path.read_bytes()
    path.write_bytes(bytes(len(before)))
    capsys.readouterr()
    more = (*options, "--steps=8")
    assert run(source, whole, *more) == 0 and "the teacher reads" not in capsys.readouterr().out
    assert run(source, tmp_path / "run", *more) == 0
    assert "teacher.bin is damaged, and is made anew" in capsys.readouterr().out and path.read_bytes() == before
    results = [load_file(folder / "model" / "model.safetensors") for folder in (whole, tmp_path / "run")]
    for name in results[0]:
        np.testing.assert_array_equal(results[0][name], results[1][name], err_msg=name)


@pytest.mark.full
def test_all_tokens_stored_are_a_teacher_in_each_step(source, tmp_path):
    for name, options in (("stored", ["--top-k=320"]), ("live", [])):
        assert run(source, tmp_path / name, "--pack", "--temperature=2", *options) == 0
    stored, live = (figures_of(tmp_path / name) for name in ("stored", "live"))
    for name in ("loss", "eval_loss"):
        expected = [row[name] for row in live if name in row]
        np.testing.assert_allclose([row[name] for row in stored if name in row], expected, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", ["--divergence=jsd --micro-batches=2", "--lora-dropout=0.1 --samples=1", "--top-k=9"]
)
def test_adapters_learn_from_a_teacher(source, tmp_path, options):
    options = [*options.split(), "--lora=4", "--pack", "--learning-rate=0.02", "--steps=12"]
    assert run(source, tmp_path, *options) == 0
    figures = figures_of(tmp_path)
    scores = [row["eval_divergence"] for row in figures if "eval_divergence" in row]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    assert (tmp_path / "adapters").is_dir() and not (tmp_path / "model").exists()


@pytest.mark.full
def test_a_teacher_in_four_bits_has_almost_the_same_probabilities(source, tmp_path):
    teacher = sharp(_tiny.checkpoint(tmp_path / "teacher", width=64))
    student = ["--quantize=nf4", "--lora=2"]
    wide = _tiny.checkpoint(tmp_path / "student", width=64)
    shutil.copy(source.parent / "chats.jsonl", tmp_path)
    for name, options in (("dense", []), ("nf4", ["--teacher-quantize=nf4", *student])):
        assert run(wide, tmp_path / name, *options, teacher=teacher) == 0
    dense, nf4 = (figures_of(tmp_path / name) for name in ("dense", "nf4"))
    assert nf4[0]["loss"] == pytest.approx(dense[0]["loss"], rel=0.2) and nf4[0]["loss"] != dense[0]["loss"]
    assert nf4[-1]["eval_divergence"] < nf4[2]["eval_divergence"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--temperature=0"], "--temperature=0.0 must be a finite number above 0 that float32 can represent."),
        (["--hard-weight=1"], "with 1 there would be no teacher, as in liger-jax finetune"),
        (["--temperature=2", "--divergence=cosine"], "--temperature=2.0 changes no angle between logits"),
        (["--beta=0.3"], "--beta=0.3 goes with --divergence jsd. Leave it out."),
        (["--divergence=jsd", "--beta=1"], "must be in (0, 1); its limits are --divergence forward_kl and reverse_kl"),
        (["--tail=ignore"], "--tail=ignore goes with --top-k. Leave it out."),
        (["--top-k=0"], "--top-k=0 must be at least 1."),
        (["--top-k=400"], "--top-k=400 is more than the 320 entries of the vocabulary."),
        (["--top-k=4", "--divergence=tvd"], "--divergence=tvd needs all of the teacher's probabilities"),
        (["--length=600"], "--length=600 is more than the 512 positions of"),
        (["--quantize=nf4"], "--quantize is for adapters: pass --lora"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_that_do_not_go_together_are_one_sentence(options, message, source, tmp_path, capsys):
    assert run(source, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("liger-jax distill: ") and error.count("\n") == 1


def renamed(folder):
    """Exchanges two tokens of a tokenizer."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(values))


def of_a_run(folder):
    """Makes a folder that of a run, with its result in it."""
    folder.rename(inner := folder.with_name("inner"))
    folder.mkdir()
    inner.rename(folder / "model")


def shortened(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 32}))


@pytest.mark.parametrize(
    "change, message",
    [
        (renamed, "has another vocabulary: the token 'a' has the id"),
        (shortened, "--length=64 is more than the 32 positions of --teacher="),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds adapters. Pass a whole model"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (shutil.rmtree, "no such folder"),
        (of_a_run, "teacher is the folder of a run. Its result is "),
    ],
    ids=["vocabulary", "positions", "adapters", "no tokenizer", "nothing", "run"],
)
def test_a_teacher_that_is_none_is_one_sentence(change, message, source, tmp_path, capsys):
    teacher = shutil.copytree(source.parent / "teacher", tmp_path / "teacher")
    change(teacher)
    assert run(source, tmp_path / "out", teacher=teacher) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("liger-jax distill: ") and error.count("\n") == 1


@pytest.mark.parametrize("whose", ["--model", "--teacher"])
def test_a_model_without_weights_is_refused_before_it_is_traced(whose, source, tmp_path, capsys):
    folder = shutil.copytree(source, tmp_path / "no_weights")
    (folder / "model.safetensors").unlink()
    models = {"--model": source, "--teacher": source.parent / "teacher", whose: folder}
    data = f"--data={source.parent / 'chats.jsonl'}"
    assert main(["distill", *(f"{flag}={path}" for flag, path in models.items()), data, f"--out={tmp_path / 'o'}"]) == 2
    told = capsys.readouterr()
    assert f"{whose}: {folder} has neither model.safetensors nor" in told.err and "save_pretrained" in told.err
    assert "tracing" not in told.out + told.err and told.err.count("\n") == 1


def test_a_teacher_that_is_the_student_is_told(source, capsys):
    options = dict(model=str(source), data="d", teacher=f"{source}/.", length=64)
    for told, more in (("is --model itself: their probabilities", {}), ("", dict(lora=4, quantize="int8"))):
        find_teacher(Settings.of(DistillOptions, **options, **more), find(source), architecture_of(find(source)))
        assert told in capsys.readouterr().out or not told
    find_teacher(Settings.of(DistillOptions, **options, hard_weight=0.5), find(source), architecture_of(find(source)))
    assert capsys.readouterr().out == ""


def test_the_planner_counts_the_teacher(source, monkeypatch, capsys):
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t", length=64, batch=4)
    found, sizes = architecture_of(find(source)), dict(data=1, fsdp=1, tensor=1, sequence=1)
    check = lambda **of_teacher: memory.fitted(settings, found, "float32", "float32", "float32", sizes, **of_teacher)
    capacity = memory.devices.here().capacity_bytes
    of = lambda size, stays=True: dict(teacher=TeacherMemory(lambda parts: size, stays))
    check(**of(GIB))
    assert re.search(r"the run needs 1\.\d GiB, 1\.0 GiB of them for the teacher, by the", capsys.readouterr().out)
    with pytest.raises(ValueError, match="The run needs .* for the teacher, by the planner's estimate, and "):
        check(**of(capacity - 2**18))
    for stays in (True, False):
        with pytest.raises(ValueError, match="The teacher needs .* Pass --teacher-quantize nf4, or a smaller teacher."):
            check(**of(capacity + 1, stays))
    check(**of(capacity // 2, stays=False))
    assert "teacher" not in capsys.readouterr().out
    for stays in (True, False):  # a teacher needs less beside a micro-batch
        parted = check(teacher=TeacherMemory(lambda parts: capacity // parts + GIB, stays))
        assert parted.recipe.micro_batches == 2


def test_a_device_s_part_of_the_teacher_s_tokens_is_counted():
    """Each axis of the batch splits them, that of experts among these."""
    seen, sizes = [], dict(data=2, fsdp=1, expert=4, tensor=8, sequence=1)
    teacher = types.SimpleNamespace(num_bytes=lambda dtype, devices, tokens: seen.append(tokens), stays=True)
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t", length=64, batch=32)
    task, devices = types.SimpleNamespace(teacher=teacher, sampling=None), types.SimpleNamespace(sizes=sizes)
    inspect.unwrap(decided_run._teacher_memory)(settings, task, "float32", devices).num_bytes(2)
    assert seen == [32 * 64 // (2 * 4) // 2]


@pytest.mark.parametrize("experts", [{}, dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)])
def test_what_a_teacher_holds_for_its_tokens_is_what_its_compiled_program_does(experts, tmp_path, platform):
    """In float32, as a CPU's products are, and on short rows, of which attention holds little. A GPU may hold less."""
    family = FAMILIES["qwen3_moe" if experts else "qwen3"]
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    config = family.config_type(vocab_size=512, num_key_value_heads=2, head_dim=16, **sizes, **experts)
    family(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    teacher = Teacher(source := find(tmp_path), architecture_of(source), None, vocab_size=512, stays=True)
    graph, state = nnx.split(nnx.eval_shape(lambda: teacher.new("float32", None)))
    states = jax.jit(lambda state, ids: nnx.merge(graph, state).hidden_states(ids))

    def held(tokens):
        compiled = states.lower(state, jax.ShapeDtypeStruct((tokens // 8, 8), jnp.int32)).compile()
        sizes = compiled.memory_analysis()
        return sizes.temp_size_in_bytes + sizes.output_size_in_bytes

    planned = lambda tokens: teacher.num_bytes("float32", Devices(), tokens)
    more = lambda held: held(2**15) - held(2**14)
    assert 1 <= more(planned) / more(held) < (1.2 if platform == "cpu" else 1.5)


def test_a_teacher_s_experts_are_counted_as_devices_share_them():
    """Rows of half more than an even share, the tokens of all devices and their sums."""
    config = FAMILIES["qwen3_moe"].config_type(hidden_size=64, num_experts_per_tok=4, moe_intermediate_size=32)
    rows = 4 * (3 * 32 + 2 * 64)
    assert values_in_forward(config) == 3 * 64 + rows
    assert values_in_forward(config, expert=8) == 3 * 64 + 1.5 * rows + 2 * 8 * 64


# --- several devices, and transformers --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices, which a CPU simulates")
@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2", "sequence=2"])
@pytest.mark.parametrize("options", [[], ["--top-k=9", "--hard-weight=0.5"]], ids=["live", "stored"])
def test_a_mesh_trains_as_one_device_does(mesh, options, source, tmp_path):
    for name, devices in (("one", "fsdp=1"), ("several", mesh)):
        assert run(source, tmp_path / name, "--pack", f"--mesh={devices}", *options) == 0
    one, several = (figures_of(tmp_path / name) for name in ("one", "several"))
    for name in ("loss", "eval_divergence"):
        expected = [row[name] for row in one if name in row]
        np.testing.assert_allclose([row[name] for row in several if name in row], expected, rtol=2e-3)


@pytest.mark.parity
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is absent")
def test_transformers_gives_the_same_divergence_from_what_a_run_leaves(source, tmp_path):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    assert run(source, tmp_path) == 0
    read = lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(_tiny.text(20), return_tensors="pt")
    with torch.no_grad():
        logits = [
            read(each)(tokens["input_ids"]).logits[..., :320]
            for each in (tmp_path / "model", source.parent / "teacher")
        ]
        log_probs = [torch.log_softmax(each.double(), -1) for each in logits]
        expected = torch.nn.functional.kl_div(*log_probs, log_target=True, reduction="none").sum(-1).mean()
    ids = jnp.asarray(tokens["input_ids"].numpy())
    student, teacher = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "model", source.parent / "teacher"))
    setattr(student, TEACHER, teacher)
    batch = {"input_ids": ids, "labels": jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]}
    settings = Settings.of(DistillOptions, model="m", data="d", teacher="t")
    whole = {name: jnp.pad(x, ((0, 0), (0, 1))) for name, x in batch.items()}  # so that each token has a next one
    found, _ = distillation.loss_of(settings.method, 320)(student, whole)
    np.testing.assert_allclose(found, expected.item(), rtol=1e-3)
