"""`liger-jax plan` in a terminal: its exit code, and errors that are one sentence."""

import json
import pathlib
import re
import sys

import pytest

from liger_jax.commands import main
from liger_jax.planner import plan, planning, searching
from liger_jax.planner.architectures import MODELS
from liger_jax.planner.compilers import Compiled
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.placement import Placement

PAGE = pathlib.Path(__file__).parents[2] / "docs/memory.md"
SMALL = "plan --model qwen2-0.5b --batch 8 --seq 512 --device h200".split()
LONG = "plan --model llama-3.1-8b --lora 32 --quantize nf4 --batch 1"


def with_(**fields):
    """A config.json with other fields."""
    return json.dumps(MODELS["qwen2-0.5b"] | fields).encode()


def refused(arguments, capsys):
    """The one line that the command prints for an error, and nothing else."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("liger-jax plan: ") and printed.err.count("\n") == 1
    return printed.err


def test_command_prints_the_plan_and_says_by_its_code_whether_it_fits(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    assert main([*SMALL, "--packed", "--details", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "8 × 512 tokens packed on h200" in printed
    for word in ("Fits: ", "fused", "logits", "parameters", "a process can have", "free", "estimates", "saves"):
        assert word in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main("plan --model llama-3-8b --batch 1 --seq 512 --device t4".split()) == 1
    assert "To make it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model="none-such"), "model='none-such' is neither a file nor known.*llama-3-8b"),
        (dict(device="h300"), "device='h300' is unknown. GPUs: h100.*TPUs: v4"),
        (dict(device="h200:12"), "1 to 8, or a multiple of 8"),
        (dict(device="h200:²"), "1 to 8, or a multiple of 8"),
        (dict(device="v5e:3x3"), "must be a topology of 2 axes that 2x2.*such as 'v5e:8x8'"),
        (dict(device="v5p:4x4"), "must be a topology of 3 axes"),
        (dict(device="v5e:32x32"), "has 1024 chips, and a pod has 256"),
        (dict(device="h200:8", mesh=dict(data=3, fsdp=2)), "has 6 devices, and the target has 8.*fsdp=8"),
        (
            dict(device="h200:8", mesh=dict(pipeline=8)),
            "must be sizes of data, fsdp, expert, sequence, tensor, as in 'fsdp=4,tensor=2'",
        ),
        (dict(device="h200:8", batch=12), "batch=12 is not divisible by the 8 devices.*Pass batch=8"),
        (dict(device="h200:24", batch=24), "fsdp=24 does not divide.*give the other devices to data"),
        (dict(batch=0), "batch=0 must be at least 1"),
        (dict(batch=10**30), "batch=10+ must be below"),
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
        b"": "cannot be read as JSON",
        b"\xff\xfe\x00": "cannot be read as JSON: 'utf-8' codec can't decode",
        b"{": "cannot be read as JSON",
        b"[]": "must hold an object",
        b"null": "must hold an object",
        b"[" * 100_000: "is nested too deep",
        b'{"text_config": 8}': "text_config=8 must be an object",
        b"{}": "model_type=None, which must be one of",
        b'{"model_type": "mamba"}': "model_type='mamba', which must be one of",
        b'{"model_type": ["llama"]}': "model_type=['llama'] must be a string",
        with_(num_hidden_layers=10**15): "num_hidden_layers=1000000000000000 must be",
        with_(num_attention_heads=13): "num_attention_heads=13",
        with_(hidden_act="relu"): "hidden_act='relu' must be 'silu'",
        with_(hidden_size=0): "hidden_size=0 must be",
        with_(hidden_size="896"): "hidden_size='896' (str) must be",
        with_(vocab_size=None): "vocab_size=None (NoneType) must be",
        with_(intermediate_size=1.5): "intermediate_size=1.5 (float) must be",
        with_(num_key_value_heads=[2]): "num_key_value_heads=[2] (list) must be",
        with_(tie_word_embeddings="yes"): "tie_word_embeddings='yes' (str) must be",
        with_(rope_theta=float("inf")): "is no finite float64",
        with_(rope_scaling=True): "rope_scaling=True must be an object",
        with_(layer_types=8): "layer_types=8 (int) must be a list",
    }.items(),
    ids=range(22),
)
def test_an_odd_config_json_is_one_sentence_that_names_it(content, message, capsys, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    printed = refused([*SMALL, "--model", str(tmp_path)], capsys)
    assert message in printed and str(tmp_path) in printed


def test_a_folder_without_a_config_json_is_refused(capsys, tmp_path):
    assert "is neither a file nor known" in refused([*SMALL, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "what, typed, largest",
    [
        ("batch", "--seq 256 --batch 1", 528),
        ("batch", "--seq 256 --micro-batches 3", 1584),
        ("seq", "--batch 8 --seq 10000000000", 17024),
    ],
)
def test_the_size_that_is_looked_for_may_be_missing_or_impossible(what, typed, largest, capsys, monkeypatch):
    answer = lambda run: Compiled(8 * run.tokens * 2**20, 0, 0)  # of an H200's 133.9 GiB
    for module in (searching, planning):
        monkeypatch.setattr(module, "compile_run", answer)
    monkeypatch.setattr(searching.compilers, "missing_compiler", lambda platform: None)
    command = f"plan --model qwen2-0.5b --device h200:8 --search {what} {typed}"
    assert main(command.split()) == 0
    assert f"The largest {what} that fits is {largest}." in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed, missing, told",
    [
        ("--device rtx4090", "nothing compiles here", "by the estimate, since nothing compiles here."),
        ("--device rtx4090 --level estimate", None, "by the estimate."),
        ("--memory 24GiB", None, "by the estimate, since no chip is named for which a step could be compiled."),
    ],
)
def test_without_a_compiler_or_by_request_the_estimate_is_searched(typed, missing, told, capsys, monkeypatch):
    monkeypatch.setattr(searching, "compile_run", None)
    monkeypatch.setattr(searching.compilers, "missing_compiler", lambda platform: missing)
    command = f"{LONG} {typed} --remat full --search seq"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Fits: ") and told in printed and "compiled" not in printed.partition(told)[0]


def test_the_longest_row_fits_and_the_next_does_not(capsys):
    command = f"{LONG} --memory 24GiB"
    assert main([*command.split(), "--search", "seq"]) == 0
    assert "The largest seq that fits is 131072 by" in capsys.readouterr().out  # with the host's memory
    command += " --remat full"
    assert main([*command.split(), "--search", "seq"]) == 0
    longest = int(re.search(r"The largest seq that fits is (\d+) by", capsys.readouterr().out)[1])
    fits = lambda seq: main([*command.split(), "--seq", str(seq)])
    assert longest % 128 == 0 and [fits(longest), fits(longest + 128)] == [0, 1]


def test_the_page_of_long_rows_says_what_the_estimate_finds():
    page = " ".join(PAGE.with_name("long-rows.md").read_text(encoding="utf8").split())
    told = re.search(
        r"for ([\d,]+) tokens on .*? is ([\d.]+) GiB, .*? the ([\d.]+) that.*? row is ([\d,]+) tokens", page
    )
    options = dict(device="rtx4090", lora=32, quantize="nf4", packed=True, batch=1, remat="offload")
    at = lambda seq: plan("llama-3.1-8b", seq=seq, rope_scaling="llama3", **options)
    asked, longest = (int(told[i].replace(",", "")) for i in (1, 4))
    assert f"{at(asked).needed / 2**30:.1f}" == told[2]
    assert f"{at(asked).run.target.capacity_bytes / 2**30:.1f}" == told[3]
    assert at(longest).fits and not at(longest + 128).fits


def test_a_mesh_is_searched_by_the_estimate_and_the_compiler_is_asked_where_it_is_named(capsys, monkeypatch):
    assert main("plan --model llama-3-8b --batch 4 --device h200:8 --search mesh --level estimate".split()) == 0
    assert "is the first that fits by the estimate." in capsys.readouterr().out
    monkeypatch.setattr(searching.compilers, "missing_compiler", lambda platform: "nothing compiles here")
    told = refused([*SMALL, "--search", "seq", "--level", "compiled"], capsys)
    assert told == "liger-jax plan: nothing compiles here\n"


def test_the_first_mesh_that_fits_is_looked_for(capsys, monkeypatch):
    """Four sequences are no batch for eight devices along fsdp, so that mesh is not even compiled."""
    monkeypatch.setattr(searching, "compile_run", lambda run: Compiled(2**40 >> run.mesh["tensor"], 0, 0))
    monkeypatch.setattr(searching.compilers, "missing_compiler", lambda platform: None)
    monkeypatch.setattr(planning, "compile_run", lambda run: Compiled(2**30, 0, 0))
    assert main("plan --model llama-3-8b --batch 4 --seq 2048 --device h200:8 --search mesh".split()) == 0
    printed = capsys.readouterr().out
    assert "data=1,fsdp=2,tensor=4 is the first that fits. What was compiled to find it:\n" in printed
    assert "  mesh data=1,fsdp=4,tensor=2: 256.00 GiB\n  mesh data=1,fsdp=2,tensor=4: 64.00 GiB\n" in printed
    assert "h200:8 (NVIDIA H200, data=1,fsdp=2,tensor=4)" in printed and "fsdp=8:" not in printed
    monkeypatch.setattr(searching, "compile_run", lambda run: Compiled(2**40, 0, 0))
    assert main("plan --model llama-3-8b --batch 4 --seq 2048 --device h200:8 --search mesh".split()) == 2
    assert "No mesh of h200:8 holds the run" in capsys.readouterr().err


def test_adapters_are_planned_with_their_targets_and_dora(capsys):
    def needed(options):
        assert main(f"plan --model qwen2.5-7b --device h200 --lora 64 {options}".split()) == 0
        return float(re.search(r"Fits: ([\d.]+) of", capsys.readouterr().out)[1])

    assert needed("--lora-targets q_proj,v_proj") < needed("")
    assert main("plan --model qwen2.5-7b --device h200 --lora 64 --dora --details".split()) == 0
    assert "adapters of rank 64 with DoRA" in capsys.readouterr().out
    assert "is for adapters, and none are trained" in refused([*SMALL, "--lora-targets", "q_proj"], capsys)
    assert "dora=True is for adapters" in refused([*SMALL, "--dora"], capsys)


def test_a_device_or_its_memory_is_needed(capsys):
    assert "--device is needed, such as --device rtx4090; or" in refused("plan --model qwen2-0.5b".split(), capsys)
    assert main("plan --model qwen2-0.5b --memory 24GiB".split()) == 0
    assert " on gpu (GPU of 24.0 GiB, " in capsys.readouterr().out
    printed = refused("plan --model qwen2-0.5b --memory 24GiB --level compiled".split(), capsys)
    assert "name one, such as --device='rtx4090', in addition to the memory" in printed


def test_what_is_not_said_is_as_in_finetune(capsys):
    """Both commands count the same run: the batch, its length, and a checkpoint's own dtype beside adapters."""
    for options, expected in (
        ("", "float32 parameters"),
        ("--lora", "adapters of rank 16, adamw (float32 state), bfloat16 parameters"),
        ("--lora 8 --optimizer adamw8bit", "adapters of rank 8, adamw8bit, bfloat16 parameters"),
    ):
        main(f"plan --model qwen2.5-7b --device h200 {options}".split())
        printed = capsys.readouterr().out
        settings = Settings.of(FinetuneOptions, model="qwen2.5-7b", data="text")
        assert f"{settings.recipe.batch} × {settings.rows.length} tokens" in printed
        assert expected in printed
    run = planning.make_run("qwen2.5-7b", device="h200", lora=16)
    chosen = Placement("qwen2.5-7b", dtype=run.dtype).precision(16, run.model.dtype)
    assert chosen == dict(dtype=run.dtype, param_dtype=run.param_dtype)


@pytest.mark.parametrize(
    "command, first",
    [
        ("plan --model qwen2.5-7b --device rtx4090 --lora 16", "Fits:"),
        ("plan --model meta-llama/Meta-Llama-3-8B --batch 1 --seq 4096 --device l4", "No option makes it fit"),
    ],
)
def test_the_page_shows_what_the_command_prints(command, first, capsys):
    page = PAGE.read_text(encoding="utf8")
    assert command.removeprefix("plan ") in page
    (shown,) = re.findall(rf"^```\n({first}.*?)^```$", page, re.MULTILINE | re.DOTALL)
    main(command.split())
    assert shown in capsys.readouterr().out


def test_an_ambiguous_card_is_told(capsys):
    main("plan --model qwen2-0.5b --device a100".split())
    assert "Note: a100 is taken for a100-40g; there is a100-80g, too." in capsys.readouterr().out
    main("plan --model qwen2-0.5b --device a100-80gb".split())
    assert "taken for" not in capsys.readouterr().out


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


def test_widths_that_a_run_does_not_quantise_are_refused_and_not_advised(tmp_path, capsys):
    config = dict(model_type="llama", vocab_size=64, hidden_size=8224, intermediate_size=22016, num_hidden_layers=20)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_attention_heads=257)))
    command = ["plan", "--model", str(tmp_path), "--device=t4", "--lora=4", "--seq=2048"]
    assert main([*command, "--quantize=nf4"]) == 2
    assert "--quantize='nf4' divides a projection's input into blocks of 64, which do not" in capsys.readouterr().err
    assert main(command) == 1  # quantised, its 16 billion parameters would fit
    assert "--quantize" not in capsys.readouterr().out
    assert main([*command, "--lora-targets=("]) == 2
    assert "--lora-targets='(' is no regular expression" in capsys.readouterr().err
