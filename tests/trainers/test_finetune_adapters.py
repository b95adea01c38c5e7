"""Adapters of `liger-jax finetune`: its options for new ones, and training that goes on from a folder of them."""

import csv
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM
from liger_jax.models.lora import add_lora
from liger_jax.trainers.adapters import AdapterOptions, loss_of, numbered
from liger_jax.trainers.adapters import add as add_adapters
from liger_jax.trainers.adapters import found as found_adapters
from liger_jax.user_errors import UserError
from tests import _tiny

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
SHORT = "--length 32 --batch 4 --steps 2 --learning-rate 0.05 --eval-share 0".split()
CHOSEN = ["--lora=3", "--lora-targets=q_proj,lm_head", "--lora-dropout=0.5", "--rslora", "--dora"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "texts.txt").write_text(_tiny.text(200))
    return folder


def run(model, data, out, *options):
    return main(["finetune", f"--model={model}", f"--data={data}", f"--out={out}", *SHORT, *options])


def losses(out):
    with (out / "log.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned")
    assert run(source, source.parent / "texts.txt", out, *CHOSEN) == 0
    return out


def test_options_say_what_the_adapters_are(tuned, source):
    config = json.loads((tuned / "adapters" / "adapter_config.json").read_text())
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "base_model_name_or_path")
    assert [config[name] for name in names] == [3, 6.0, 0.5, True, True, ["lm_head", "q_proj"], str(source)]


def test_training_goes_on_from_a_folder_of_adapters(tuned, source, tmp_path, capsys):
    """The first loss is that of the adapters, which stay of their kind; dropout may be another."""
    adapters, data = tuned / "adapters", source.parent / "texts.txt"
    assert run(adapters, data, tmp_path, "--lora-dropout=0", "--steps=1") == 0
    folders = tmp_path / "adapters", adapters
    config, before = (json.loads((folder / "adapter_config.json").read_text()) for folder in folders)
    assert config == before | {"lora_dropout": 0.0}
    new, old = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    moved = {name for name in old if (old[name] != new[name]).any()}
    assert new.keys() == old.keys() and moved == {name for name in old if "base_layer" not in name}
    assert losses(tmp_path)[0] < losses(tuned)[0]
    capsys.readouterr()
    assert main(["finetune", f"--config={tmp_path / 'settings.toml'}"]) == 0
    assert "finished: " in capsys.readouterr().out  # by its own file of options
    assert run(adapters, data, tuned) == 2
    assert "which is --model itself. Pass another --out" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("options", [["--pack"], ["--mesh=fsdp=2"], ["--mesh=sequence=2"], ["--mesh=tensor=2"]])
def test_dropout_is_the_same_in_micro_batches_in_packed_rows_and_on_two_devices(options, source, tmp_path):
    (tmp_path / "chats.jsonl").write_text(_tiny.chats(8))
    found = []
    for number, more in enumerate((["--micro-batches=4"], ["--micro-batches=1", *options])):
        own = ["--length=96", "--batch=8", "--lora=3", "--lora-dropout=0.5", "--dtype=float32", *more]
        assert run(source, tmp_path / "chats.jsonl", tmp_path / str(number), *own) == 0
        found.append(losses(tmp_path / str(number))[:2])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_dropout_is_another_in_each_step_and_without_it_rows_bring_nothing(source):
    options = AdapterOptions(lora=2, lora_dropout=0.5)
    drawn = lambda model, batch, normalizer: model.model.layers.self_attn.q_proj.dropout_key[...]
    model = add_lora(
        AutoModelForCausalLM.from_pretrained(source), 2, alpha=4, targets=["q_proj"], dropout=0.5, rngs=nnx.Rngs(0)
    )
    loss, batch = loss_of(options, 0, drawn), {"input_ids": np.zeros((2, 4), np.int32)}
    keys = [loss(model, jax.tree.map(jnp.asarray, numbered(batch, np.zeros((1, 4)), i))) for i in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    assert loss_of(AdapterOptions(lora=2), 0, drawn) is drawn


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dora"], "--dora is for adapters: pass --lora, such as --lora 16, as well"),
        (["--lora-targets=q_proj"], "--lora-targets is for adapters"),
        (["--lora=2", "--lora-dropout=1"], r"--lora-dropout=1.0 must be in \[0, 1\); 0 drops nothing"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_options_without_adapters_or_out_of_range_are_refused(options, message, source, tmp_path, capsys):
    assert run(source, source.parent / "texts.txt", tmp_path, *options) == 2
    assert re.search(message, capsys.readouterr().err)


def test_targets_that_the_model_does_not_have_are_one_sentence(source, tmp_path, capsys):
    assert run(source, source.parent / "texts.txt", tmp_path, "--lora=2", "--lora-targets=c_attn") == 2
    error = capsys.readouterr().err
    assert "no projection is called ['c_attn']. The model has ['down_proj', 'embed_tokens'" in error


def test_options_of_new_adapters_are_refused_with_a_folder_of_them(tuned):
    for name, value in (("lora", 4), ("rslora", True), ("lora_targets", "q_proj")):
        options = {name: value}
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is for new adapters, and .* holds adapters"):
            found_adapters(str(tuned / "adapters"), AdapterOptions(**options))


@pytest.mark.parametrize(
    ["experts", "options", "told"],
    [
        (4, {"dora": True}, "goes with neither --dora nor --lora-dropout"),
        (4, {"lora_dropout": 0.1}, "goes with neither --dora nor --lora-dropout"),
        (0, {}, "needs a mixture of experts, which --model is not"),
    ],
)
def test_adapters_of_experts_that_cannot_be_are_told_by_the_option(experts, options, told):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    family, config = LlamaForCausalLM, LlamaConfig(**sizes)
    if experts:
        family, config = OlmoeForCausalLM, OlmoeConfig(**sizes, num_experts=experts, num_experts_per_tok=2)
    adapted = AdapterOptions(lora=2, lora_experts=True, **options)
    with pytest.raises(UserError, match=f"^--lora-experts {told}. Leave it out."):
        nnx.eval_shape(lambda: add_adapters(family(config, rngs=nnx.Rngs(0)), adapted, 0))


@pytest.mark.parametrize(
    ["text", "told"],
    [
        ("q_proj,zz", "--lora-targets=q_proj,zz: no projection is called ['zz']. The model has ['down_proj', "),
        ("zz.*", "--lora-targets=zz.* must name at least one projection."),
    ],
)
def test_targets_that_the_model_has_not_are_told_by_the_option(text, told, tmp_path, capsys):
    folder = _tiny.checkpoint(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(_tiny.chats(4))
    command = (
        f"finetune --model={folder} --data={tmp_path / 'chats.jsonl'} --out={tmp_path / 'out'} --lora=4 --length=64"
    )
    assert main([*command.split(), f"--lora-targets={text}"]) == 2
    assert capsys.readouterr().err.startswith(f"liger-jax finetune: {told}")
