"""A run says if what it wrote is what it began with."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.lora import add_lora, save_adapters
from liger_jax.trainers import unchanged
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from tests import _tiny

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
COMMON = "--length=32 --batch=4 --steps=1 --eval-share=0".split()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint in bfloat16, with conversations beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, param_dtype=jnp.bfloat16)
    model.save_pretrained(folder.parent / "bf16", tokenizer_from=folder)
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(8))
    return folder.parent / "bf16"


def lines(settings, source, target):
    return [*unchanged.lines(settings, Source(source), target)]


@pytest.mark.parametrize(
    ["options", "told"],
    [
        (
            ["--learning-rate=1e-10"],
            "the updates are too small for bfloat16: --save-dtype float32 keeps them. A higher",
        ),
        pytest.param(
            ["--learning-rate=1e-10", "--lora=4", "--merge"],
            "the updates are too small for bfloat16: --save-dtype",
            marks=pytest.mark.full,
        ),
        (["--learning-rate=0.01"], None),
        (["--learning-rate=1e-4", "--save-dtype=float32"], None),
    ],
)
def test_a_run_whose_updates_are_lost_in_bfloat16_says_so(options, told, source, tmp_path, capsys):
    data = source.parent / "chats.jsonl"
    assert main(["finetune", f"--model={source}", f"--data={data}", f"--out={tmp_path}", *COMMON, *options]) == 0
    *_, last, before_next, _ = capsys.readouterr().out.splitlines()
    if told is None:
        assert "unchanged" not in before_next
        return
    assert last.startswith("1 step; loss ")
    assert before_next.startswith("unchanged: all ") and f" weights in {tmp_path}/model are those of " in before_next
    assert f"; {told}" in before_next


def test_weights_near_zero_that_changed_are_counted(source, tmp_path):
    """The biases of a new model are 0, so that any update changes them."""
    model = AutoModelForCausalLM.from_pretrained(source)
    settings = Settings.of(FinetuneOptions, model="m", data="d", save_dtype="float32")
    for number, add in enumerate((0.0, 1e-9, 1.0)):
        bias = model.model.layers.self_attn.q_proj.bias
        bias.set_value(bias.get_value() + add)
        if add == 1.0:
            head = model.model.embed_tokens
            head.set_value(head.get_value() + add)
        model.save_pretrained(tmp_path / f"{number}", tokenizer_from=source)
    total = sum(x.size for _, x in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert lines(settings, source, tmp_path / "0")[0].startswith(f"unchanged: all {total:,} weights in ")
    assert lines(settings, source, tmp_path / "1")[0].startswith(f"unchanged: all but 16 of {total:,} weights in ")
    assert lines(settings, source, tmp_path / "2") == []
    shutil.rmtree(tmp_path / "0")
    assert lines(settings, source, tmp_path / "0") == []  # it is a remark, and no reason to fail


def test_adapters_without_a_gradient_are_told(source, tmp_path):
    model = add_lora(AutoModelForCausalLM.from_pretrained(source), 4, alpha=8, rngs=nnx.Rngs(0))
    settings = Settings.of(FinetuneOptions, model="m", data="d", lora=4)
    save_adapters(model, tmp_path / "begun", base_model=str(source))
    [line] = lines(settings, source, tmp_path / "begun")
    assert line.startswith(f"unchanged: the adapters in {tmp_path / 'begun'} are 0, as they began, and change nothing")
    b = model.model.layers.self_attn.q_proj.lora_b
    b.set_value(b.get_value() + 1e-9)
    save_adapters(model, tmp_path / "trained", base_model=str(source))
    assert lines(settings, source, tmp_path / "trained") == []
    goes_on = settings.changed(adapters=str(tmp_path / "trained"))
    assert lines(goes_on, source, tmp_path / "trained")[0].startswith("unchanged: the adapters in ")
    assert lines(goes_on, source, tmp_path / "begun") == []
    assert json.loads((tmp_path / "begun" / "adapter_config.json").read_text())["r"] == 4


def test_parameters_in_memory_are_compared():
    before = {"a": np.ones(200, np.float32), "b": np.ones(9, np.float32)}
    assert [*unchanged.of_arrays(before, before)][0].startswith("unchanged: all 209 parameters are as they began; the")
    assert [*unchanged.of_arrays(before, before | {"a": np.zeros(200, np.float32)})] == []
