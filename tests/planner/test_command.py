"""`liger-jax plan` in a terminal: its exit code, and errors that are one sentence."""

import json
import sys

import pytest

from liger_jax.planner import plan
from liger_jax.planner.architectures import MODELS
from liger_jax.planner.command import main

SMALL = "plan --model qwen2-0.5b --batch 8 --seq 512 --device h200".split()
QWEN2 = MODELS["qwen2-0.5b"]


def refused(arguments, capsys):
    """The one line that the command prints for an error, and nothing else."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("liger-jax plan: ") and printed.err.count("\n") == 1
    return printed.err


def test_command_prints_the_plan_and_says_by_its_code_whether_it_fits(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    assert main([*SMALL, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    for word in ("Fits: ", "fused", "logits", "parameters", "a process can have", "free", "estimates", "saves"):
        assert word in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main("plan --model llama-3-8b --batch 1 --seq 512 --device t4".split()) == 1
    assert "To make it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model="gpt-5"), "model='gpt-5' is neither a file nor known.*llama-3-8b"),
        (dict(device="h300"), "device='h300' is unknown. GPUs: h100.*TPUs: v4"),
        (dict(device="h200:12"), "1 to 8, or a multiple of 8"),
        (dict(device="h200:²"), "1 to 8, or a multiple of 8"),
        (dict(device="v5e:3x3"), "must be a topology of 2 axes that 2x2.*such as 'v5e:8x8'"),
        (dict(device="v5p:4x4"), "must be a topology of 3 axes"),
        (dict(device="h200:8", mesh="data=3,fsdp=2"), "has 6 devices, and the target has 8.*fsdp=8"),
        (dict(device="h200:8", mesh="tensor=8"), "must be sizes of data and fsdp, as in 'data=2,fsdp=8'"),
        (dict(device="h200:8", batch=12), "batch=12 is not divided by the 8 devices.*Take batch=8"),
        (dict(device="h200:24", batch=24), "fsdp=24 does not divide.*give the other devices to data"),
        (dict(batch=0), "batch=0 must be at least 1"),
        (dict(seq=200_000), "longer than the 131072 positions"),
        (dict(remat="some"), "remat='some' must be one of"),
        (dict(param_dtype="int8"), "param_dtype='int8' must be"),
        (dict(level="guess"), "level='guess' must be one of"),
    ],
)
def test_wrong_arguments_are_told_the_cure(wrong, message):
    with pytest.raises(ValueError, match=message):
        plan(**dict(model="qwen2-0.5b", batch=8, seq=128, device="h200") | wrong)


def test_an_error_of_the_command_is_one_sentence(capsys):
    assert "has 2 devices, and the target has 1" in refused([*SMALL, "--mesh", "fsdp=2"], capsys)
    assert "Did you mean 'qwen2-0.5b'" in refused([*SMALL, "--model", "Qwen/Qwen2-0.5"], capsys)


@pytest.mark.parametrize(
    "content, message",
    {
        b"": "is no config.json: Expecting value",
        b"\xff\xfe\x00": "is no config.json: 'utf-8' codec can't decode",
        b"{": "is no config.json: Expecting property name",
        b"[]": "is no config.json|must hold an object",
        b"8": "is no config.json|must hold an object",
        b"null": "is no config.json|must hold an object",
        b"[" * 100_000: "is no config.json",
        b'{"text_config": 8}': "is no config.json|must hold an object",
        b"{}": "model_type=None, which must be one of",
        b'{"model_type": "mamba"}': "model_type='mamba', which must be one of",
        b'{"model_type": ["llama"]}': r"model_type=\['llama'\], which must be one of",
        json.dumps(
            QWEN2 | {"num_hidden_layers": 10**15}
        ).encode(): "num_hidden_layers=1000000000000000 must be at most",
        json.dumps(QWEN2 | {"num_attention_heads": 13}).encode(): "must divide",
        json.dumps(QWEN2 | {"hidden_act": "relu"}).encode(): "hidden_act='relu' must be 'silu'",
        json.dumps(QWEN2 | {"hidden_size": 0}).encode(): "hidden_size=0 must be",
    }.items(),
    ids=range(15),
)
def test_an_odd_config_json_is_one_sentence_that_names_it(content, message, capsys, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    printed = refused([*SMALL, "--model", str(tmp_path)], capsys)
    assert str(tmp_path) in printed
    with pytest.raises((ValueError, OSError), match=message):
        plan(tmp_path, batch=8, seq=512, device="h200")


def test_a_folder_without_a_config_json_is_refused(capsys, tmp_path):
    assert "is neither a file nor known" in refused([*SMALL, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent/plan.png", "there is no folder"),
        ("", "is a folder. Name a file in it"),
        ("plan.doc", "must end in .png"),
    ],
)
def test_a_picture_that_cannot_be_written_is_found_out_before_the_plan_is_made(name, message, capsys, tmp_path):
    assert message in refused([*SMALL, "--picture", str(tmp_path / name)], capsys)


@pytest.mark.parametrize(
    "missing, option", [("matplotlib.figure", "--picture=plan.png"), ("libtpu", "--level=compiled")]
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(missing, option, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    printed = refused([*SMALL, "--device", "v5e", option], capsys)
    assert "pip install -e " in printed and "[planner]" in printed
