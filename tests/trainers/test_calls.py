"""Runs that a program starts: with its own rows, models and callbacks, and the numbers of the commands."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import io
import itertools
import json
import math
import pickle
import re
import signal
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax import _options, trainers
from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.lora import add_lora, load_adapters
from liger_jax.trainers import arguments, own_mesh, own_model
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings, options_of
from liger_jax.training.waiting import Compiling
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.ops._oracle import first
from tests.trainers._runs import figures_of

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
CHAT = "--lora 4 --pack --length 64 --batch 4 --micro-batches 2 --steps 6 --every 4 --learning-rate 0.05".split()
OPTIONS = dict(
    adapters=trainers.LoRA(4), pack=True, length=64, batch=4, micro_batches=2, steps=6, every=4, learning_rate=0.05
)
TIMES = ("tokens_per_second", "memory_gib")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(30))
    return folder


@pytest.fixture
def rows():
    """The conversations as a program has them."""
    return [json.loads(line) for line in _tiny.chats(30).splitlines()]


@pytest.fixture(scope="module")
def command(source, tmp_path_factory):
    """The folder of the command's run."""
    out = tmp_path_factory.mktemp("runs") / "command"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["finetune", f"--model={source}", f"--data={source}/../chats.jsonl", f"--out={out}", *CHAT]) == 0
    return out


def finetune(*args, **options):
    """A run with the options of `CHAT`."""
    return trainers.finetune(*args, **OPTIONS | options)


def short(completions, **_):
    """Rewards short completions."""
    print("--fresh is mine")
    return [-len(text) / 10 for text in completions]


PAIRS = "--pack --length 64 --batch 4 --steps 2 --learning-rate 0.01".split()
SAMPLED = "--group 2 --batch 4 --micro-batches 1 --prompt-length 8 --completion-length 4 --steps 2".split()
OF_PAIRS = dict(pack=True, length=64, batch=4, steps=2, learning_rate=0.01)
METHODS = {
    "dpo": (_tiny.pairs(8), [*PAIRS, "--loss=ipo", "--beta=0.2"], dict(OF_PAIRS, loss="ipo", beta=0.2)),
    "kto": (_tiny.answers(8), [*PAIRS, "--loss=kto"], dict(OF_PAIRS, loss="kto")),
    "grpo": (
        "\n".join(json.dumps({"prompt": _tiny.text(2, i)}) for i in range(4)),
        [*SAMPLED, f"--reward={__name__}:short=0.5"],
        dict(group=2, batch=4, micro_batches=1, prompt_length=8, completion_length=4, steps=2, rewards=[short],
             reward_weights=[0.5]),
    ),
    "distill": (_tiny.chats(8), [*PAIRS, "--divergence=reverse_kl"], dict(OF_PAIRS, divergence="reverse_kl")),
}  # fmt: skip


def arrays(model):
    """All of a model's parameters."""
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def assert_equal(model, other):
    for one, another in zip(arrays(model), arrays(other), strict=True):
        np.testing.assert_array_equal(one, another)


def assert_is_of(result, out, **options):
    """The result is that of the command's run, to the last bit."""
    assert len(figures_of(out)) == len(result.metrics["loss"])
    for figures in figures_of(out):
        i = int(figures["step"]) - 1
        assert {name: result.metrics[name][i] for name in figures if name not in TIMES} == {
            name: value for name, value in figures.items() if name not in TIMES
        }
    written = out / "adapters" if (out / "adapters").is_dir() else out / "model"
    assert_equal(result.model, AutoModelForCausalLM.from_pretrained(written, **options))


def zeroed(step, metrics, model):
    """A callback that changes all that it is given, of which the run must see nothing."""
    metrics.clear()
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))


def test_a_call_trains_as_the_command_does_and_leaves_nothing(source, rows, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, seen = AutoModelForCausalLM.from_pretrained(source), []
    before, ids = jax.tree.map(jnp.copy, model), jnp.ones((1, 8), jnp.int32)
    loss_of = nnx.jit(lambda model: model(ids, labels=ids).loss)

    def callback(step, metrics, trained):
        print("--steps are mine")
        seen.append((step, metrics["loss"], float(loss_of(trained))))
        zeroed(step, metrics, trained)

    first = finetune(model, iter(rows), tokenizer=source, callbacks=[callback])
    assert_is_of(first, command)
    assert_equal(model, before)
    assert [(step, loss) for step, loss, _ in seen] == list(enumerate(first.metrics["loss"], 1))
    assert len({loss for *_, loss in seen}) == 6 and np.isnan(first.metrics["eval_loss"]).tolist() == [True] * 3 + [
        False, True, False,
    ]  # fmt: skip
    assert (first.step, first.folder, first.interrupted) == (6, None, False)
    assert [*tmp_path.iterdir()] == []
    printed = capsys.readouterr().out
    assert printed.count("--steps are mine\n") == 6 and "--" not in printed.replace("--steps are mine", "")
    assert str(tmp_path) not in printed  # the folder that is removed


def test_a_callback_or_ctrl_c_ends_a_run_which_the_same_call_resumes(source, rows, command, tmp_path):
    with pytest.raises(TypeError, match=r"A callback returned 'no', and must return True to end the run"):
        finetune(source, rows, out=tmp_path, callbacks=[lambda *_: "no"])
    assert (tmp_path / "checkpoints" / "1").is_dir()
    callbacks = (f for f in [lambda step, metrics, model: jnp.asarray(step == 2)])
    ended = finetune(source, rows, out=tmp_path, callbacks=callbacks)
    assert (ended.step, ended.interrupted, ended.folder) == (2, False, tmp_path / "adapters")
    assert_equal(ended.model, AutoModelForCausalLM.from_pretrained(ended.folder))

    def stop(step, metrics, model):
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    stopped = finetune(source, rows, out=tmp_path, callbacks=[stop])
    assert (stopped.step, stopped.interrupted, stopped.folder) == (4, True, None)
    assert len(arrays(stopped.model)) == len(arrays(ended.model)) and len(stopped.metrics["loss"]) == 4
    mesh = jax.make_mesh((jax.device_count(),), ("mine",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):  # neither this nor the runs before it change anything
        whole = finetune(str(source), rows, out=tmp_path)
        assert jax.sharding.get_mesh() == mesh
    assert_is_of(whole, command)
    assert whole.best_step in (4, 6) and whole.folder == tmp_path / "adapters"
    finished = finetune(source, rows, out=tmp_path)  # nothing is left to train
    assert_is_of(finished, command)


def test_a_run_in_another_thread_is_refused_and_a_callback_that_fails_says_what_is_lost(source, rows):
    def starts(step, metrics, model):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(finetune, source, rows).result()

    with pytest.raises(ValueError, match="^A run goes on in another thread, and ") as raised:
        finetune(source, rows, steps=1, callbacks=starts)
    assert raised.value.__notes__ == ["The run has no out, so that nothing of its 1 step is kept."]


@pytest.mark.full
def test_what_a_callback_raises_says_where_the_same_call_goes_on(source, rows, tmp_path):
    def fails(step, metrics, model):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="^mine") as raised:
        finetune(source, rows, steps=2, callbacks=fails, out=tmp_path)
    assert raised.value.__notes__ == ["Step 1 is saved in out, and the same call resumes from there."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()] == ["1"]


@pytest.mark.parametrize("name", first(2, ["grpo", "distill", "dpo", "kto"]))
def test_each_method_traces_the_step_of_its_command(name, source, tmp_path, monkeypatch):
    method, steps = {"kto": "dpo"}.get(name, name), []

    def traced(self, program, *types):
        text = re.sub(r"@(\w+?)_\d+\b", r"@\1", program.lower(*types).as_text())  # JAX numbers them as they come
        text = re.sub(r'"[^"]*\\[0-9A-F]{2}[^"]*"', '""', text)  # a Mosaic GPU kernel has its number in the process
        steps.append({each.strip(" }\n") for each in text.split("func.func")})
        raise UserError("it is traced")

    monkeypatch.setattr(Compiling, "start", traced)
    text, options, fields = METHODS[name]
    (data := tmp_path / "rows.jsonl").write_text(text)
    if name == "distill":
        options, fields = [*options, f"--teacher={source}"], fields | dict(teacher=source)
    assert main([method, f"--model={source}", f"--data={data}", f"--out={tmp_path / 'run'}", *options]) == 2
    with pytest.raises(ValueError, match="it is traced"):
        getattr(trainers, method)(source, [json.loads(line) for line in text.splitlines()], **fields)
    assert steps[0] == steps[1] and len(steps[0]) > 9


@pytest.mark.full  # by default their steps are compared above, and a run's numbers are finetune's
@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_that_of_its_command(name, source, tmp_path, capsys):
    method = {"kto": "dpo"}.get(name, name)
    text, options, fields = METHODS[name]
    (data := tmp_path / "rows.jsonl").write_text(text)
    if name == "distill":
        options = [*options, f"--teacher={source}"]
        fields = fields | dict(teacher=AutoModelForCausalLM.from_pretrained(source))
    assert main([method, f"--model={source}", f"--data={data}", f"--out={tmp_path / 'run'}", *options]) == 0
    rows = [json.loads(line) for line in text.splitlines()]
    result = getattr(trainers, method)(source, rows, **fields)
    assert_is_of(result, tmp_path / "run", scan_layers=method != "grpo")
    assert len(result.metrics["loss"]) == 2
    assert name != "grpo" or capsys.readouterr().out.count("--fresh is mine\n") == 6


@pytest.mark.full
def test_a_model_on_several_devices_is_called_on_their_mesh(source, rows):
    result = finetune(source, rows, mesh="fsdp=2")
    ids = jnp.ones((2, 8), jnp.int32)
    with jax.set_mesh(result.mesh):
        assert np.isfinite(result.model(ids, labels=ids).loss) and result.mesh.size == 2


@pytest.mark.full
def test_a_dataset_of_hugging_faces_is_rows(source, rows, command):
    datasets = pytest.importorskip("datasets")
    assert_is_of(finetune(source, datasets.Dataset.from_list(rows)), command)


class Mine(nnx.Module):
    """A model of the user's own, around one of ours, so that its run is known."""

    def __init__(self, model):
        self.inner = model

    def hidden_states(self, input_ids, segment_ids, positions):
        return self.inner.hidden_states(input_ids, segment_ids=segment_ids, positions=positions)

    @property
    def head(self):
        return self.inner.head


class Unpacked(nnx.Module):
    """One whose rows are whole documents."""

    def __init__(self, model):
        self.inner, self.head = model, model.head

    def hidden_states(self, input_ids):
        return self.inner.hidden_states(input_ids)


@pytest.mark.full
def test_a_model_of_the_users_own_trains_as_ours(source, rows, tmp_path):
    options = dict(adapters=None, tokenizer=source)
    ours = finetune(AutoModelForCausalLM.from_pretrained(source), rows, **options)
    mine, ended = Mine(AutoModelForCausalLM.from_pretrained(source)), []
    before = jax.tree.map(jnp.copy, mine)
    finetune(mine, rows, **options, out=tmp_path, callbacks=[lambda step, *_: ended.append(step) or step == 4])
    result = finetune(mine, rows, **options, out=tmp_path)  # goes on from there
    assert ended == [1, 2, 3, 4] and result.best_step in (4, 6) and result.folder is None
    assert set(result.metrics) == set(ours.metrics)
    for name in set(ours.metrics).difference(TIMES):
        np.testing.assert_allclose(result.metrics[name], ours.metrics[name], rtol=1e-4, atol=1e-6)
    for one, another in zip(arrays(result.model), arrays(ours.model), strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-3, atol=1e-3)
    assert_equal(mine, before)


class Segmented(nnx.Module):
    """One that asks for segments, though its rows are whole documents."""

    def __init__(self, model):
        self.inner, self.head = model, model.head

    def hidden_states(self, input_ids, segment_ids):
        return self.inner.hidden_states(input_ids, segment_ids=segment_ids)


def test_documents_share_rows_of_the_users_own_model_if_it_says_so(source, rows, capsys):
    options = dict(adapters=None, tokenizer=source, pack=False, length=128, steps=2, callbacks=zeroed)
    options |= dict(micro_batches=1, eval_share=0.0)  # one program each
    ours, mine, unpacked = (
        finetune(each(AutoModelForCausalLM.from_pretrained(source)), rows, **options)
        for each in (lambda model: model, Mine, Segmented)
    )
    printed = capsys.readouterr().out
    assert printed.count("rows: each document has its own row of 128 places; they share rows if the model's") == 1
    np.testing.assert_allclose(mine.metrics["loss"], ours.metrics["loss"], rtol=1e-3)
    # Its head is not tied. What documents see of each other changes the loss by 1e-4; other devices round products.
    near = 1e-5 if jax.default_backend() == "cpu" else 1e-3
    np.testing.assert_allclose(unpacked.metrics["loss"][0], ours.metrics["loss"][0], rtol=near)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(adapters=trainers.LoRA(4)), "adapters is for the models of liger_jax.models: call "
         "models.lora.add_lora on your own, and its adapters alone are trained."),
        (dict(mesh="tensor=2"), "mesh=tensor=2: a model of your own is split over data and fsdp alone, since how "
         "tensor would split it is not known. Give the devices to fsdp."),
        pytest.param(
            dict(mesh="fsdp=4"), "mesh='fsdp=4' splits the batch into 4 shards, which do not divide the 2 rows that "
            "are computed at once. The nearest number that does is 2; or change the batch, or its micro-batches.",
            marks=pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates"),
        ),
        (dict(), "pack=True puts several documents into a row, and the model's hidden_states takes no segment_ids, by "
         "which none would attend to another. Add the parameter, or leave pack=True out."),
    ],
)  # fmt: skip
def test_what_a_model_of_the_users_own_cannot_do_is_refused(options, words, source, rows):
    mine = Unpacked(AutoModelForCausalLM.from_pretrained(source))
    options = dict(pack="mesh" not in options) | options
    with pytest.raises(ValueError) as raised:
        finetune(mine, rows, **dict(adapters=None, tokenizer=source) | options)
    assert str(raised.value) == words


class Layered(nnx.Module):
    """One with parameters that devices divide along the first axis, along the second, and not at all."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed, self.norm = nnx.Embed(320, 16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(16, 31, rngs=rngs), nnx.Linear(31, 16, rngs=rngs)

    def hidden_states(self, input_ids, segment_ids, positions):
        x = self.embed(input_ids)
        return self.norm(x + self.narrow(jnp.tanh(self.wide(x))))

    @property
    def head(self):
        return self.embed.embedding[...]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
def test_loss_and_gradients_of_the_users_own_model_on_a_mesh_are_those_of_one_device():
    rng = np.random.default_rng(0)
    batch = dict(input_ids=rng.integers(0, 320, (4, 16)), segment_ids=np.repeat([[1, 2]], 8, 1) + np.zeros((4, 1), int))
    batch |= dict(labels=batch["input_ids"], positions=np.zeros((4, 16), int))
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    devices, results = own_mesh.chosen("data=2,fsdp=2", 4), []
    for of_run in (own_mesh.chosen(None, 4), devices):
        graph, params = nnx.split(own_model.Whole(Layered(), of_run.layout))
        of_params = lambda params, batch, graph=graph: nnx.merge(graph, params)(**batch).loss
        with of_run.context():
            params = of_run.placed(params)
            results.append(jax.jit(jax.value_and_grad(of_params))(params, of_run.place(batch)))
            gradients = jax.tree.leaves(results[-1][1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *results)
    assert own_mesh.chosen("auto", 4).line.startswith("devices: fsdp=4 of ")
    split = [[*x.sharding.spec] for x in jax.tree.leaves(params)]
    assert split == [["fsdp"], ["fsdp"], [None, "fsdp"], ["fsdp"], [], ["fsdp"]]
    assert {x.shape: x.addressable_shards[0].data.shape for x in gradients}[320, 16] == (160, 16)


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
def test_a_model_of_the_users_own_trains_on_a_mesh_and_goes_on_on_another(source, rows, tmp_path):
    options = dict(adapters=None, tokenizer=source, batch=8)
    one, mine = finetune(Layered(), rows, **options), Layered()
    before, seen = jax.tree.map(jnp.copy, mine), []

    def watch(step, metrics, model):
        ids = jnp.ones((4, 8), jnp.int32)
        seen.append(float(model.hidden_states(ids, ids, ids).sum()))
        return step == 3

    finetune(mine, rows, **options, mesh="fsdp=4", out=tmp_path, callbacks=watch)
    result = finetune(mine, rows, **options, mesh="data=2,fsdp=2", out=tmp_path)
    assert len(seen) == 3 and np.isfinite(seen).all() and result.mesh.size == 4
    assert_equal(mine, before)
    for name in set(one.metrics).difference(TIMES):
        np.testing.assert_allclose(result.metrics[name], one.metrics[name], rtol=1e-4, atol=1e-6)
    for ours, its in zip(arrays(result.model), arrays(one.model), strict=True):
        np.testing.assert_allclose(ours, its, rtol=1e-3, atol=1e-4)


def test_annotations_of_the_users_own_model_are_heeded():
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        init = nnx.with_partitioning(nnx.initializers.zeros, (None, "fsdp"))
        own = nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
    assert own_mesh.specs(nnx.state(own), {"fsdp": 2}) == [P("fsdp"), P(None, "fsdp")]
    own.kernel.set_metadata(out_sharding=("embed", None))
    with pytest.raises(
        ValueError, match=r"^--mesh: the model's kernel.* is annotated with the axis 'embed', and a run"
    ):
        own_mesh.specs(nnx.state(own), {"fsdp": 2})


class Small(nnx.Module):
    """One that is wrong in some way."""

    def __init__(self, wrong):
        self.embed = nnx.Embed(320, 8, rngs=nnx.Rngs(0))
        self.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(2))
        self.wrong = wrong
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def hidden_states(self, input_ids):
        x = self.embed(input_ids)
        if self.wrong == "counter":
            self.calls[...] += 1
        if self.wrong in ("noise", "norm"):
            return getattr(self, self.wrong)(x)
        return x @ self.embed.embedding[...].T if self.wrong == "logits" else (x, None) if self.wrong == "pair" else x

    @property
    def head(self):
        return self.embed if self.wrong == "module" else self.embed.embedding[...]


class Masked(nnx.Module):
    head = None

    def hidden_states(self, input_ids, mask):
        return mask


@pytest.mark.parametrize(
    ("model", "words"),
    [
        *[(Small(name), "A run keeps no state from step to step, and the model's hidden_states changes its own state, "
           "such as dropout's random numbers or the averages of nnx.BatchNorm. Call model.eval() before.")
          for name in ("noise", "norm")],
        (Small("counter"), "A run keeps no state from step to step, and the model's hidden_states changes its calls, "
         "also after model.eval(). Change that outside of hidden_states."),
        (Small("logits"), "The model's hidden_states returns (1, 8, 320) for input_ids of (1, 8), and its head is "
         "(320, 8). They must be (batch, length, width), after the last norm and before the head, and "),
        (Small("pair"), "The model's hidden_states returns tuple for input_ids of (1, 8), and its head is (320, 8)."),
        (Small("module"), "The model's head is Embed, and must be an array of (vocabulary, width)"),
        (Masked(), "The model's hidden_states needs mask, and is called with input_ids, segment_ids and positions"),
    ],
    ids=["noise", "norm", "counter", "logits", "pair", "module", "masked"],
)  # fmt: skip
def test_a_model_of_the_users_own_that_no_run_could_train_is_refused(model, words, source, rows):
    with pytest.raises(ValueError) as raised:
        finetune(model, rows, adapters=None, pack=False, tokenizer=source)
    assert str(raised.value).startswith(words)


class Headed(nnx.Module):
    """A module whose head is a layer's kernel, which is not called."""

    def __init__(self):
        self.embed, self.up = nnx.Embed(320, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.lm_head = nnx.Linear(8, 320, use_bias=False, rngs=nnx.Rngs(2))

    def hidden_states(self, input_ids):
        return self.up(self.embed(input_ids))

    @property
    def head(self):
        return self.lm_head.kernel[...].T


class Jitted(Headed):
    @nnx.jit
    def hidden_states(self, input_ids):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().hidden_states(input_ids)


class Biased(Headed):
    def __init__(self):
        super().__init__()
        self.lm_head = nnx.Linear(8, 320, rngs=nnx.Rngs(2))


class WithBias(Biased):
    def hidden_states(self, input_ids):
        return jnp.pad(super().hidden_states(input_ids), ((0, 0), (0, 0), (0, 1)), constant_values=1.0)

    @property
    def head(self):
        layer: Any = self.lm_head
        return jnp.append(layer.kernel[...], layer.bias[...][None], axis=0).T


def test_a_bias_of_the_head_that_the_loss_leaves_out_is_refused():
    with pytest.raises(ValueError, match=r"^Neither hidden_states nor head reads lm_head.bias, so .*use_bias=False"):
        own_model._check_read(Biased())
    for model in (WithBias(), Headed()):
        own_model._check_read(model)


class Seeing(nnx.Module):
    """One whose tokens see what they ought not to, or not."""

    def __init__(self, sees):
        self.embed, self.sees = nnx.Embed(320, 8, rngs=nnx.Rngs(0)), sees

    def hidden_states(self, input_ids, segment_ids):
        x = self.embed(input_ids)
        alike = segment_ids[:, :, None] == segment_ids[:, None] if self.sees != "documents" else True
        mask = alike & (jnp.tri(x.shape[1], dtype=bool) if self.sees != "later" else True)
        x = jnp.einsum("bts,bsd->btd", jnp.broadcast_to(mask, (*x.shape[:2], x.shape[1])) / x.shape[1], x)
        return x - x[::-1] if self.sees == "rows" else x


@pytest.mark.parametrize(
    ("sees", "words"),
    [("later", "tokens after it, or on other rows"), ("rows", "tokens after it, or on other rows"),
     ("documents", "another document of its row. Mask where segment_ids"), ("", None)],
)  # fmt: skip
def test_a_token_of_the_users_own_model_sees_its_document_up_to_itself(sees, words):
    with (
        contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=f"of a token depend on {words}")
    ):
        own_model._check_causal(Seeing(sees), 320)


class Attending(nnx.Module):
    """One whose attention has this mask."""

    def __init__(self, mask, gate=1.0, multiple=1):
        self.embed, self.gate = nnx.Embed(320, 8, rngs=nnx.Rngs(0)), nnx.Param(jnp.array(gate))
        self.mask, self.multiple = mask, multiple

    def hidden_states(self, input_ids):
        assert input_ids.shape[1] % self.multiple == 0
        x, i = self.embed(input_ids), jnp.arange(input_ids.shape[1])
        mask = self.mask(i[:, None], i, input_ids[:, None])
        scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", x, x), -1e9)
        return x + self.gate[...] * jax.nn.softmax(scores) @ x

    @property
    def head(self):
        return self.embed.embedding


def causal(i, j, ids):
    return i >= j


@pytest.mark.parametrize(
    ("model", "is_causal"),
    [
        (Attending(lambda i, j, ids: (i >= j) | (i // 4 == j // 4)), False),  # chunks of the half of a row
        (Attending(lambda i, j, ids: (i >= j) | (j < 2)), False),  # a prefix
        (Attending(lambda i, j, ids: (i >= j) | (j == 7)), False),  # the last token
        (Attending(lambda i, j, ids: j >= 0, gate=0.0), False),  # a branch that is zero at first
        (Attending(lambda i, j, ids: j >= 0, multiple=64), False),  # no rows of 8
        (Attending(causal), True),
        (Attending(causal, gate=0.0), True),
        (Attending(causal, multiple=64), True),
        (Attending(lambda i, j, ids: (i >= j) & (ids != 0)), True),  # a row that begins with what pads sees all of it
    ],
)
def test_all_that_sees_later_tokens_is_refused_and_nothing_else(model, is_causal):
    settings = Settings.of(FinetuneOptions, model="m", data="d", length=256)
    words = "of a token depend on tokens after it"
    with contextlib.nullcontext() if is_causal else pytest.raises(ValueError, match=words):
        own_model._check(settings, model)


def test_a_parameter_that_is_no_float_is_named():
    own: Any = Headed()
    own.count = nnx.Param(jnp.array([3]))
    with pytest.raises(ValueError, match=r"^The model's count is int32 of shape \(1,\), and a trained parameter"):
        own_model._check_trained(nnx.state(own, nnx.Param))


class WithAdapter(Headed):
    @property
    def head(self):
        layer: Any = self.lm_head
        return (layer.kernel[...] + layer.lora_a[...] @ layer.lora_b[...]).T


@pytest.mark.parametrize(
    ["model", "targets", "is_trained"],
    [
        (Headed, ["lm_head"], False), (Headed, ["up", "lm_head"], False), (Headed, ["up"], True),
        (Jitted, ["lm_head"], False), (Jitted, ["up"], True), (WithAdapter, ["lm_head"], True),
    ],
)  # fmt: skip
def test_an_adapter_of_a_head_that_no_gradient_reaches_is_refused(model, targets, is_trained, source):
    own = add_lora(model(), 2, alpha=4, targets=targets, rngs=nnx.Rngs(3))
    words = "Neither hidden_states nor head reads the adapters of lm_head, so that they would not be trained. Leave the"
    with contextlib.nullcontext() if is_trained else pytest.raises(ValueError, match=words):
        own_model._check_read(own)


@pytest.mark.parametrize("leaf", [jnp.zeros((3, 4), jnp.float16), jnp.zeros((0, 4))])
def test_a_parameter_that_cannot_be_trained_is_refused_before_the_run(leaf, source, rows):
    model: Any = Headed()
    model.extra = nnx.Param(leaf)
    with pytest.raises(
        ValueError, match=r"The model's extra is float(16|32) of shape \(., 4\), and a trained parameter"
    ):
        trainers.finetune(model, rows, tokenizer=source, length=16, batch=2, steps=1)


def test_a_generator_that_ends_too_early_is_refused(source, rows):
    with pytest.raises(ValueError, match=r"^rows is an iterator that .* Pass fewer steps, or rows that can be read"):
        finetune(source, iter([{"text": _tiny.text(20)}]), stream=True, eval_data=rows[:4])


def test_a_generator_without_end_is_streamed_and_one_that_was_read_before_resumes_no_run(source, rows, tmp_path):
    texts = lambda: ({"text": _tiny.text(20, i)} for i in itertools.count())
    options = dict(stream=True, eval_data=rows[:4], out=tmp_path / "run")
    endless = texts()
    begun = finetune(source, endless, callbacks=[lambda step, metrics, model: step == 2], **options)
    assert len(begun.metrics["loss"]) == 2
    with pytest.raises(ValueError, match=r"holds another run: stream='its first step has .*' became '.*'"):
        finetune(source, endless, **options)
    assert finetune(source, texts(), **options).step == 6


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(batch=5), ValueError, "micro_batches=2 must divide batch=5."),
        (dict(bacth=4), TypeError, "finetune: bacth is no option. Did you mean batch?"),
        (dict(output_dir="a"), TypeError, "finetune: output_dir is no option. Did you mean out?"),
        (dict(train_dataset=[]), TypeError, "finetune: train_dataset is no option. Did you mean rows?"),
        (dict(target_modules=[]), TypeError,
         "finetune: target_modules belongs to the adapters: pass adapters=trainers.LoRA(…)."),
        (dict(lr=4), TypeError, "finetune: lr is no option. Did you mean learning_rate?"),
        (dict(per_device_train_batch_size=4), TypeError, "finetune: per_device_train_batch_size is no option. It is "
         "batch, the whole step's rows over all devices and micro-batches."),
        (dict(callbacks=[lambda step, metrics: None]), TypeError, None),
        (dict(batch="4"), TypeError, "batch='4' must be an int."),
        (dict(schedule=abs), TypeError, "schedule=<built-in function abs> must be a text. An optimizer or a schedule "
         "of your own goes into training.make_step."),
        (dict(remat="1"), ValueError, "remat='1' must be one of auto, none, full, dots, offload, offload_attention, or "
         "a number, not its text: remat=1."),
        (dict(lora=4), TypeError, "finetune: lora belongs to the adapters: pass adapters=trainers.LoRA(…)."),
        (dict(adapters=trainers.LoRA(0)), ValueError, "adapters=LoRA(0) must be at least 1."),
        (dict(adapters=None, merge=True), ValueError,
         "merge=True is for adapters: pass adapters, such as adapters=LoRA(16), as well."),
        (dict(length=1000), ValueError, "length=1000 is more than the 512 positions of {model}. Pass length=512, or "
         "ask for positions that it has not seen: rope_scaling='linear'|'dynamic'|'yarn'|'llama3'."),
        (dict(eval_data=[{"text": "one"}], eval_share=0.1), ValueError,
         "eval_share=0.1 and eval_data both say what is scored. Pass one of them."),
        (dict(rows=[{"text": "one"}, "two"]), TypeError,
         "rows holds files and dict. Pass files, or an iterable of dicts."),
        (dict(rows=iter([{"text": "one"}, "two"])), ValueError,
         "rows, row 2, holds a text, and must hold an object, with text or messages. Pass {{'text': …}} for it."),
        (dict(rows=["one two", "three"]), ValueError,
         "rows: no file is named 'one two'. If it is a text to train on, pass dicts, such as [{{'text': each}} for "
         "each in texts]."),
        (dict(rows={"train": [], "test": []}), TypeError,
         "rows is dict, with several splits. Pass one of them: rows['train']."),
        (dict(rows=None), TypeError, "rows is None, and must be files, or an iterable of dicts."),
        (dict(rows=iter([])), ValueError,
         "rows has no text. It gives its rows once: make it anew for each run, or pass a list."),
        (dict(adapters=trainers.LoRA(4, alpha=0.0)), ValueError, "alpha=0.0 must be a finite number above 0."),
        (dict(tokenizer=3), TypeError, "tokenizer is int, and must be a checkpoint's folder or id. One of transformers "
         "is written into a folder by its save_pretrained."),
        (dict(rows={"text": "one"}), TypeError,
         "rows is dict, and must be files, or an iterable of dicts. Pass [rows] for one row."),
        (dict(rows=[{"chosen": "a", "rejected": "b", "text": "c"}]), ValueError,
         "rows, row 1: the row is a pair of answers, chosen and rejected, and it is unclear what finetune should train "
         "on; trainers.dpo trains on both. Choose one: format='text', or column='chosen'."),
        (dict(model=trainers.Result(None, {}, 1, None, None, False)), TypeError,
         "model is the result of a run. Pass its model, or its folder."),
        (dict(tokenizer="x"), TypeError,
         "tokenizer is for a model in memory, and a checkpoint has its own. Leave it out."),
        (dict(model=3), TypeError, 
         "model is int, and must be a folder, an id, a model of liger_jax.models, or an NNX module with a method "
         "hidden_states(input_ids) and a head."),
        (dict(distributed=""), TypeError,
         "finetune: distributed is an option of the command alone: liger-jax finetune."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_words_of_python(options, error, words, source, rows):
    options = dict(model=source, rows=rows) | options
    with pytest.raises(error) as raised:
        finetune(options.pop("model"), options.pop("rows"), **options)
    if words is None:
        assert "A callback is called with (step, metrics, model), and <function" in str(raised.value)
    else:
        assert str(raised.value) == words.format(model=source)
        assert not isinstance(raised.value.__cause__, UserError)  # which would say it twice


def test_trls_name_of_the_rewards_is_answered(source):
    with pytest.raises(TypeError, match=r"grpo: reward_funcs is no option\. It is rewards, which takes functions"):
        trainers.grpo(source, [], reward_funcs=[short])
    with pytest.raises(TypeError, match="rewards=None must be functions"):
        trainers.grpo(source, [])


def test_each_reward_has_a_weight():
    texts, functions = arguments.rewards_of([short, len], [1.0, 0.5])
    assert texts[1].endswith("=0.5") and [*functions.values()] == [short, len]
    with pytest.raises(ValueError, match="^reward_weights has 1 number for 2 rewards. Pass one for each.$"):
        arguments.rewards_of([short, len], [1.0])
    with pytest.raises(ValueError, match="^reward_weights holds nan, and must hold finite numbers.$"):
        arguments.rewards_of([short, len], [1.0, math.nan])


@pytest.mark.parametrize("given", [-1, "nonsense"], ids=str)
def test_every_option_is_refused_by_its_name_in_python(given, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = {"finetune": {}, "dpo": {}, "grpo": dict(rewards=[short]), "distill": dict(teacher="/none")}
    methods = (FinetuneOptions, PairOptions, GrpoOptions, DistillOptions)
    for (name, needed), method in zip(own.items(), methods, strict=True):
        others = (*arguments.GIVEN, *arguments.OF_COMMANDS, *trainers.LoRA().options())
        fields = [field for field in options_of(method).values() if field.name not in others]
        for keyword in map(_options.python_name, fields):
            with pytest.raises((ValueError, TypeError)) as raised:
                getattr(trainers, name)("/none", [{"text": "one"}], **needed, **{keyword: given})
            words = str(raised.value)  # "/none": the value may be, and the model is looked for
            assert "--" not in words and (keyword in words or "/none" in words), (keyword, words)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "wrong", [dict(micro_batches=3), dict(rows=[{"text": " "}]), dict(length=1000), dict(tokenizer="/none")], ids=str
)
def test_a_run_that_is_refused_leaves_no_copy_of_its_model(wrong, source, rows, tmp_path):
    wrong = dict(rows=rows, tokenizer=source) | wrong
    with pytest.raises(ValueError) as raised:
        finetune(AutoModelForCausalLM.from_pretrained(source), wrong.pop("rows"), out=tmp_path / "run", **wrong)
    assert [*tmp_path.iterdir()] == [] and "given-" not in str(raised.value) and "--" not in str(raised.value)


def test_a_model_in_memory_needs_a_tokenizer_and_no_adapters(source, rows, command):
    with pytest.raises(TypeError, match="model is in memory, and has no tokenizer: pass tokenizer"):
        finetune(AutoModelForCausalLM.from_pretrained(source), rows)
    adapted = load_adapters(AutoModelForCausalLM.from_pretrained(source), command / "adapters")
    with pytest.raises(ValueError, match="model has adapters already"):
        finetune(adapted, rows, tokenizer=source)


@pytest.mark.parametrize(
    ["name", "hint"],
    [
        ("r", "Did you mean rank?"),
        ("lora_r", "Did you mean rank?"),
        ("lora_alpha", "Did you mean alpha?"),
        ("target_modules", "Did you mean targets?"),
        ("use_dora", "Did you mean dora?"),
        ("dropot", "Did you mean dropout?"),
        (
            "modules_to_save",
            "No command has it: in Python add_lora takes patterns of ranks and layers, train_more whole",
        ),
        ("task_type", "There are rank, alpha, targets, experts, dropout, rslora and dora."),
    ],
)
def test_a_name_that_lora_has_not_is_refused_with_the_one_that_was_meant(name, hint):
    with pytest.raises(TypeError, match=rf"^LoRA: {name} is no argument\. {re.escape(hint)}"):
        trainers.LoRA(**{name: 8})


def test_adapters_are_copied_as_they_are():
    adapters = trainers.LoRA(8, alpha=3.0)
    assert adapters == copy.deepcopy(adapters) == pickle.loads(pickle.dumps(adapters))
    assert dataclasses.replace(adapters, alpha=None) == trainers.LoRA(8)
