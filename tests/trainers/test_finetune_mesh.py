"""`liger-jax finetune` on several devices leaves what it leaves on one, and goes on from one mesh to another."""

import functools
import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM
from liger_jax.models.lora import load_adapters
from liger_jax.training import meshes
from tests import _tiny
from tests.trainers._runs import figures_of
from tests.trainers.test_finetune import ctrl_c_in_the_third_step

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates"),
    pytest.mark.usefixtures("each_program_is_compiled_once"),
]
KIND = jax.devices()[0].device_kind
OPTIONS = "--pack --length 32 --batch 4 --steps 4 --every 4 --learning-rate 0.05 --seed 1".split()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations beside it; a part of two has quantised blocks of 64 values."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model", width=128)
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(30))
    return folder


def train(source, out, *options):
    return main(["finetune", f"--model={source}", f"--data={source.parent / 'chats.jsonl'}", f"--out={out}", *OPTIONS,
                 *options])  # fmt: skip


def assert_alike(ours, others, name, near):
    """Figures and weights of two runs."""
    same = "loss token_accuracy learning_rate eval_loss eval_perplexity eval_token_accuracy".split()
    for one, other in zip(figures_of(ours), figures_of(others), strict=True):
        np.testing.assert_allclose(
            *[[row[name] for name in same if name in row] for row in (one, other)], rtol=near, err_msg=str(one)
        )
    found, expected = (load_file(folder / name) for folder in (ours, others))
    assert found.keys() == expected.keys()
    for key, truth in expected.items():
        # By norms: where a gradient is nearly 0, Adam takes its sign, which another order of additions may turn.
        # So it is with a bias of keys, which changes all scores of a query alike but for their rotation.
        bound = 4 * near if key.endswith("k_proj.bias") else near
        assert np.linalg.norm(found[key] - truth) <= bound * np.linalg.norm(truth), key
    files = [sorted(path.name for path in (folder / name).parent.iterdir()) for folder in (ours, others)]
    assert files[0] == files[1]


def test_adapters_of_a_run_that_changes_its_mesh_are_those_of_one_device(source, tmp_path, capsys):
    assert train(source, tmp_path / "one", "--lora=4") == 0
    assert "devices:" not in capsys.readouterr().out
    with ctrl_c_in_the_third_step():
        assert train(source, tmp_path / "mesh", "--lora=4", "--mesh=fsdp=2,tensor=2") == 128 + signal.SIGINT
    assert f"devices: fsdp=2,tensor=2 of 4 × {KIND}\n" in capsys.readouterr().out
    assert train(source, tmp_path / "mesh", "--lora=4", "--mesh=fsdp=2") == 0
    printed = capsys.readouterr().out
    assert f"devices: fsdp=2 of 4 × {KIND}; 2 are idle\n" in printed and "resumed at step 3\n" in printed
    assert_alike(tmp_path / "mesh", tmp_path / "one", "adapters/adapter_model.safetensors", 2e-3)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """The folder of a run on one device, by its checkpoint and options."""

    @functools.cache
    def run(source, *options):
        out = tmp_path_factory.mktemp("one")
        assert train(source, out, *options, "--mesh=fsdp=1") == 0
        return out

    return run


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=4", "data=2,fsdp=2", "tensor=2"])
def test_all_weights_of_a_mesh_are_those_of_one_device(source, mesh, of_one, tmp_path):
    assert train(source, tmp_path, f"--mesh={mesh}") == 0
    assert_alike(tmp_path, of_one(source), "model/model.safetensors", 2e-3)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "fsdp=4"])
def test_adapters_beside_nf4_and_their_merge(source, mesh, of_one, tmp_path):
    options = "--lora=4", "--quantize=nf4", "--merge"
    assert train(source, tmp_path, f"--mesh={mesh}", *options) == 0
    assert_alike(tmp_path, of_one(source, *options), "model/model.safetensors", 5e-3)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "fsdp=4"])
def test_a_run_on_a_mesh_shows_samples_and_stops_early(source, mesh, tmp_path, capsys):
    options = "--every=1", "--patience=1", "--samples=3", "--learning-rate=3", "--eval-share=0.2", "--steps=6"
    assert train(source, tmp_path, f"--mesh={mesh}", *options) == 0
    printed = capsys.readouterr().out
    assert "had the least held-out loss, and is taken" in printed and printed.count("sample 3: ") >= 2, printed


@pytest.fixture(scope="module")
def samples_of_one():
    """What one device showed, by the run's options."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tensor=2,sequence=2", "fsdp=2,tensor=2", "fsdp=2,sequence=2"])
@pytest.mark.parametrize("options", [(), ("--lora=4", "--quantize=nf4")], ids=str)
def test_devices_that_share_rows_show_the_samples_of_one_device(
    source, mesh, options, samples_of_one, tmp_path, capsys
):
    def shown(mesh):
        every = f"--mesh={mesh}", "--samples=3", "--eval-share=0.2", "--learning-rate=0.001"
        assert train(source, tmp_path / mesh, *every, *options) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("sample ")]

    if options not in samples_of_one:
        samples_of_one[options] = shown("fsdp=1")
    assert len(samples_of_one[options]) == 6 and shown(mesh) == samples_of_one[options]


@pytest.mark.full
def test_without_a_mesh_the_most_devices_that_divide_the_run_are_taken(
    source, tmp_path, capsys, monkeypatch, one_device_unless_a_mesh_is_named
):
    monkeypatch.setattr(meshes, "chosen", one_device_unless_a_mesh_is_named)
    assert train(source, tmp_path, "--batch=6", "--micro-batches=3") == 0
    told = rf"^devices: fsdp=2 of 4 × {KIND}; .* ms of a step .*; 2 are idle, since mesh='fsdp=4' splits the batch"
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("samples", [(), ("--samples=2", "--eval-share=0.2")], ids=str)
def test_a_mixture_takes_an_axis_of_experts_by_itself_and_trains_as_one_device_does(
    samples, experts, of_one, tmp_path, capsys, monkeypatch, one_device_unless_a_mesh_is_named
):
    """Begun on that mesh, and gone on with it; a run that began with fsdp keeps it."""
    options = *samples, "--batch=8", "--micro-batches=2", "--length=30", "--remat=full"
    one = of_one(experts, *options)
    monkeypatch.setattr(meshes, "chosen", one_device_unless_a_mesh_is_named)
    capsys.readouterr()
    with ctrl_c_in_the_third_step():
        assert train(experts, tmp_path / "new", *options) == 128 + signal.SIGINT
    told = rf"^devices: expert=4 of 4 × {KIND}; .* ms of a step to send tokens in place of experts"
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)
    assert train(experts, tmp_path / "new", *options) == 0
    printed = capsys.readouterr().out
    assert "devices: expert=4 " in printed and "as when the run began" in printed and "resumed at step 3" in printed
    np.testing.assert_allclose(*(loss_of(experts, out, ()) for out in (tmp_path / "new", one)), rtol=2e-3)
    if not samples:
        with ctrl_c_in_the_third_step():
            assert train(experts, tmp_path / "old", *options, "--mesh=fsdp=4") == 128 + signal.SIGINT
        capsys.readouterr()
        assert train(experts, tmp_path / "old", *options) == 0
        assert "devices: fsdp=4 of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ["mesh", "message"],
    [
        ("fsdp=8", "mesh='fsdp=8' has 8 devices, and there are 4. Let the sizes multiply to at most 4, as fsdp=4"),
        ("tensor=4", "--mesh: tensor has 4 devices, which do not divide num_attention_heads=2. The nearest number"),
        ("fsdp=3", "mesh='fsdp=3' splits the batch into 3 shards, which do not divide the 4 rows that are computed at"),
        ("expert=2", "--mesh: expert has 2 devices, and Qwen2Config has no experts. Give the devices to fsdp."),
        ("model=2", "mesh='model=2': 'model' is not an axis. The axes are data, fsdp, expert, sequence and tensor"),
        ("fsdp=0", "mesh='fsdp=0': fsdp needs a number of devices of at least 1, as in 'fsdp=2'."),
        ("fsdp=2,fsdp=2", "mesh='fsdp=2,fsdp=2' names fsdp twice. Name it once."),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_refused_in_one_sentence(source, mesh, message, tmp_path, capsys):
    assert train(source, tmp_path, *f"--mesh={mesh}".split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("liger-jax finetune: ") and error.count("\n") == 1
    shutil.rmtree(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["sequence=2", "tensor=2,sequence=2"])
def test_devices_that_share_rows_train_as_one_does(mesh, source, of_one, tmp_path):
    assert train(source, tmp_path, "--lora=4", f"--mesh={mesh}") == 0
    losses = lambda out: [float(row["loss"]) for row in figures_of(out)]
    np.testing.assert_allclose(losses(tmp_path), losses(of_one(source, "--lora=4")), rtol=1e-4)


@pytest.fixture(scope="module")
def experts(source, tmp_path_factory):
    """A checkpoint of a mixture of experts with the other's tokenizer and data."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(source, folder)
    shutil.copy(source.parent / "chats.jsonl", folder.parent)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    sizes = dict(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    routing = dict(num_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
    config = OlmoeConfig(**sizes, **routing, max_position_embeddings=64)
    OlmoeForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(folder)
    return folder


def loss_of(experts, out, options):
    """The loss of what a run saved."""
    model = AutoModelForCausalLM.from_pretrained(experts if options else out / "model")
    model = load_adapters(model, out / "adapters") if options else model
    tokens = jax.numpy.arange(24).reshape(2, 12)
    return nnx.jit(lambda model, tokens: model(tokens, labels=tokens).loss)(model, tokens)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["expert=2", "fsdp=2,expert=2", "tensor=2,sequence=2", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("options", ["", "--lora=4 --lora-experts", "--lora=4 --lora-experts --quantize=nf4"])
def test_devices_that_share_experts_train_as_one_does(options, mesh, experts, of_one, tmp_path):
    """With a balancing loss, and rows that two devices cannot share before they are filled up."""
    all_options = *options.split(), "--batch=8", "--micro-batches=2", "--length=30"
    assert train(experts, tmp_path, *all_options, f"--mesh={mesh}") == 0
    one = of_one(experts, *all_options)
    assert_alike(tmp_path, one, "adapters/adapter_model.safetensors" if options else "model/model.safetensors", 2e-3)
    np.testing.assert_allclose(*(loss_of(experts, out, options) for out in (tmp_path, one)), rtol=2e-3)
