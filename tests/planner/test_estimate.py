"""The estimate keeps to the rules that are known, and every wrong argument is told its cure."""

import dataclasses
import json
import pathlib
import re
import time
from types import SimpleNamespace

import jax
import pytest

from liger_jax.planner import plan, planning, search, target
from liger_jax.planner.advice import changes_to_fit, largest
from liger_jax.planner.architectures import MODELS, architecture
from liger_jax.planner.command import main
from liger_jax.planner.compiled import Compiled, memory_of
from liger_jax.planner.devices import GPUS, TPUS
from liger_jax.planner.estimate import DYNAMIC, STATIC, estimate, kept_by_a_layer, logits_bytes, static_bytes
from liger_jax.planner.planning import make_run
from liger_jax.planner.report import bars

GIB = 2**30
KNOWN = {  # parameters as the models' publishers count them, in billions
    "llama-2-7b": 6.74, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213,
    "qwen2-0.5b": 0.494, "qwen2-1.5b": 1.544, "qwen2-7b": 7.616, "qwen2.5-14b": 14.77, "qwen2-72b": 72.71,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in ("qwen2-0.5b", "llama-3-8b") else pytest.param(n, marks=pytest.mark.full) for n in MODELS]
)
def test_models_have_as_many_parameters_as_is_known(name):
    assert architecture(name).num_parameters / 1e9 == pytest.approx(KNOWN[name], rel=1e-3)


def test_mixed_precision_takes_16_bytes_a_parameter():
    assert static_bytes(10**9) == 16 * 10**9
    whole = plan("llama-3.2-1b", batch=64, seq=8192, device="h200").estimates["logits"]
    parameters = architecture("llama-3.2-1b").num_parameters
    assert whole.parts["parameters"] + whole.parts["optimizer state"] == 12 * parameters


def test_14_billion_parameters_over_8_devices_take_28_gb_each():
    assert static_bytes(14 * 10**9, 8) == 28 * 10**9


def test_a_sharded_model_takes_its_share():
    # On Hopper the peak is the loss, where other gradients are there.
    found = plan("qwen2.5-14b", batch=8, seq=1024, device="a100-80g:8").estimates["fused"]
    assert found.static == pytest.approx(static_bytes(architecture("qwen2.5-14b").num_parameters, 8), rel=1e-3)


COMPILED = pathlib.Path(__file__).parents[2] / "benchmarks/results/planner.md"
CELLS = r"^\| ([\w.-]+) \| (\d+) × (\d+) \| (\w+) \| (\w+) \| ([\w:-]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$"


def test_estimates_are_within_10_percent_of_all_steps_that_were_compiled():
    steps = re.findall(CELLS, COMPILED.read_text(encoding="utf8"), re.MULTILINE)
    assert len(steps) >= 40
    for model, batch, seq, remat, loss, device, compiled in steps:
        run = make_run(model, batch=int(batch), seq=int(seq), remat=remat, loss=loss, device=device)
        assert estimate(run).total / GIB == pytest.approx(float(compiled), rel=0.1), run


def test_three_float32_copies_of_a_152k_vocabulary_take_6_96_gib():
    assert round(logits_bytes(4096, 152_064, bytes_per_logit=12) / GIB, 2) == 6.96


def test_twice_the_batch_doubles_logits_and_leaves_the_fused_loss_flat():
    at = {b: plan("llama-3.2-1b", batch=b, seq=8192, device="h200").estimates for b in (8, 16)}
    hidden = 2 * 2 * 8 * 8192 * 2048  # the last hidden states and their gradient
    growth = {loss: at[16][loss].loss_bytes - at[8][loss].loss_bytes - hidden for loss in ("fused", "logits")}
    assert growth["logits"] == logits_bytes(8 * 8192, 128256)
    assert abs(growth["fused"]) < 0.02 * growth["logits"]


def test_an_estimate_takes_less_than_a_second():
    run = dict(batch=8, seq=2048, device="h200:8", remat="none")
    plan("qwen2-0.5b", **run)
    start = time.process_time()
    plan("qwen2-0.5b", **run)
    assert time.process_time() - start < 1


def test_remat_trades_what_layers_keep():
    at = {
        r: plan("qwen2-0.5b", batch=8, seq=2048, device="h200", remat=r).totals["fused"]
        for r in ("none", "dots", "full")
    }
    assert at["full"] < at["dots"] < at["none"]


@pytest.mark.parametrize("device", ["h200", "v5e"])
def test_no_part_of_a_small_model_is_less_than_nothing(device, tmp_path):
    """On a TPU, whose padding is most of what is kept."""
    path = tmp_path / "config.json"
    sizes = dict(vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=64, num_attention_heads=4)
    path.write_text(json.dumps(sizes | {"model_type": "llama", "num_key_value_heads": 4}))
    for remat in ("none", "dots", "full"):
        found = estimate(make_run(str(path), batch=1, seq=16, device=device, remat=remat))
        assert found.peak == "backward" and min(found.parts.values()) >= 0, found


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_what_a_norm_takes_is_kept_for_its_backward(remat, tmp_path):
    """What the feed-forward gives, in Gemma 2. Queries and keys are kept once, Qwen3's before their norms."""
    sizes = dict(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, hidden_act="silu",
    )  # fmt: skip
    gelu = sizes | dict(hidden_act="gelu_pytorch_tanh")

    def kept(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        run = make_run(str(tmp_path), batch=1, seq=16, device="h200", remat=remat)
        return sum(kept_by_a_layer(run).values()) // (2 * 16)  # bfloat16 values a token

    queries_and_keys = kept(sizes | dict(model_type="qwen3")) - kept(sizes | dict(model_type="llama"))
    assert queries_and_keys == 0
    result = kept(gelu | dict(model_type="gemma2")) - kept(gelu | dict(model_type="gemma"))
    assert result == (0 if remat == "full" else 64)


def test_micro_batches_hold_the_activations_of_one_and_a_sum_of_gradients():
    run = make_run("qwen2-0.5b", batch=64, seq=2048, device="h200", remat="none", loss="logits")
    one, four = estimate(run), estimate(dataclasses.replace(run, micro_batches=4))
    for name in ("layer inputs", "attention", "feed-forward"):
        assert four.parts[name] * 4 == one.parts[name] > 0
    assert four.parts["gradients"] == one.parts["gradients"] + 4 * architecture("qwen2-0.5b").num_parameters
    with pytest.raises(
        ValueError, match="batch=12 is not divided by the 2 devices .* in micro_batches=4. Take batch=8"
    ):
        make_run("qwen2-0.5b", batch=12, seq=128, device="h200:2", micro_batches=4)


def test_what_lies_on_the_host_takes_no_memory_of_a_device():
    at = lambda **options: plan("qwen2-0.5b", batch=8, seq=512, device="h200", **options).estimates["fused"].parts
    assert at(state_memory="host")["optimizer state"] == 0 < at()["optimizer state"]
    assert at(remat="offload")["layer inputs"] == 0 < at()["layer inputs"]


def test_micro_batches_make_a_large_batch_fit():
    run = make_run("qwen2-0.5b", batch=256, seq=4096, device="l4")
    changes = changes_to_fit(run)
    assert "micro-batches" in changes[0].name and changes[-1].total_bytes <= run.target.memory_bytes
    assert changes[-1].run.target == run.target


def test_a_run_that_does_not_fit_gets_changes_that_each_save():
    run = make_run("llama-3-8b", batch=64, seq=4096, device="a100-40g:8", remat="none", loss="logits")
    changes = changes_to_fit(run)
    assert [change.name for change in changes][:2] == ["the fused loss", "remat=full"]
    assert all(change.saved_bytes > 0 for change in changes)
    assert changes[-1].total_bytes <= run.target.memory_bytes


def test_advice_follows_from_the_numbers():
    small = plan("qwen2-0.5b", batch=1, seq=128, device="h200")
    large = plan("qwen2-0.5b", batch=64, seq=2048, device="h200")
    saves = lambda p: 1 - p.totals["fused"] / p.totals["logits"]
    assert saves(small) < 0.1 < 0.5 < saves(large)
    assert "at batch" in small.advice and "at batch" not in large.advice
    assert f"saves {saves(large):.0%}" in large.advice and "That is what makes it fit" in large.advice
    assert "shard over more devices first" in plan("llama-3-70b", batch=1, seq=128, device="h200").advice


@pytest.mark.parametrize(
    "bytes_per_token", [2**21, *(pytest.param(n, marks=pytest.mark.full) for n in (2**20, 3 * 2**20))]
)
def test_search_finds_the_largest_that_the_compiler_lets_fit(bytes_per_token, monkeypatch):
    """Wherever the estimate's guess lies; the compiler's answers are ours here."""
    answer = lambda run: Compiled(run.batch * run.seq * bytes_per_token, 0, 0)
    monkeypatch.setattr(planning, "compile_run", answer)
    monkeypatch.setattr(planning.compilers, "need_compiler", lambda platform: None)
    run = make_run("qwen2-0.5b", batch=8, seq=256, device="h200:8")
    for what, unit in (("batch", 8), ("seq", 128)):
        found = search(run, what)
        more = dataclasses.replace(found.run, **{what: getattr(found.run, what) + unit})
        assert answer(found.run).total <= run.target.memory_bytes < answer(more).total
        assert len(found.answers) < 20
    with pytest.raises(ValueError, match="Not even batch=8 fits into h200:8.*Take more or larger devices"):
        search(dataclasses.replace(run, seq=131072), "batch")


def test_largest_is_by_bisection():
    for most in range(40):
        assert largest(lambda n, most=most: n <= most) == most


def test_bars_are_as_long_as_the_parts():
    found = plan("llama-3.2-1b", batch=8, seq=2048, device="a100-40g")
    fused, logits = bars(found).splitlines()
    for line, loss in ((fused, "fused"), (logits, "logits")):
        estimate = found.estimates[loss]
        assert set(estimate.parts) == set(STATIC + DYNAMIC) and estimate.total == sum(estimate.parts.values())
        marks = sum(c.isalpha() for c in line.split("|")[1])
        assert marks == pytest.approx(60 * estimate.total / found.run.target.memory_bytes, abs=1)


def test_devices_are_named_with_their_number_or_topology():
    assert [target(f"h200:{n}").topology for n in (1, 8, 32)] == ["1x1x1", "1x1x8", "1x4x8"]
    for name, count in {"v5e": 1, "v5e:8x8": 64, "v6e:2x2": 4, "v5p:4x4x4": 64, "tpu7x:2x2x1": 8}.items():
        assert target(name).count == count
    assert set(GPUS) == {"h100", "h200", "a100-40g", "a100-80g", "l4", "a10", "t4", "b200"}
    assert {"v5e", "v5p", "v6e"} <= set(TPUS)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model="gpt-5"), "model='gpt-5' is neither a file nor known.*llama-3-8b"),
        (dict(device="h300"), "device='h300' is unknown. GPUs: h100.*TPUs: v4"),
        (dict(device="h200:12"), "1 to 8, or a multiple of 8"),
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


def test_config_json_is_read(tmp_path):
    values = MODELS["qwen2-0.5b"] | {"num_hidden_layers": 2, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = architecture(tmp_path)
    layers = jax.tree.leaves(found.abstract()[1]["model"]["layers"])
    assert {leaf.shape[0] for leaf in layers} == {2}
    assert found.num_parameters == architecture(tmp_path / "config.json").num_parameters
    text = dict(model_type="gemma3_text", hidden_size=64, num_hidden_layers=2, vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert architecture(tmp_path).config.vocab_size == 512  # the language part of a model that also sees
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="model_type='mamba', which must be one of"):
        architecture(tmp_path)


def test_sizes_without_end_are_refused_or_answered_in_a_moment(tmp_path):
    """In turn 5,000 layers slide and one does not: as modules these would take minutes."""
    sizes = dict(model_type="gemma3_text", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    many = dict(sizes, intermediate_size=128, num_hidden_layers=9999, sliding_window_pattern=5001, vocab_size=10**9)
    path = tmp_path / "config.json"
    start = time.process_time()
    path.write_text(json.dumps(many))
    layer = architecture(path)
    found = plan(path, batch=8, seq=128, device="h200")
    assert 9999 * 3 * 64 * 128 < layer.num_parameters - 64 * 10**9 < 9999 * 6 * 64 * 128 and not found.fits
    for field in ("num_hidden_layers", "vocab_size"):
        path.write_text(json.dumps(many | {field: 10**15}))
        with pytest.raises(ValueError, match=f"from {path}: {field}=1000000000000000 must be an int from 1 to"):
            plan(path, batch=8, seq=128, device="h200")
    assert time.process_time() - start < 3


def test_command_prints_the_plan_and_says_by_its_code_whether_it_fits(capsys, tmp_path):
    arguments = "plan --model qwen2-0.5b --batch 8 --seq 512".split()
    picture = tmp_path / "plan.png"
    assert main([*arguments, "--device", "h200", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    for word in ("fused", "logits", "parameters", "memory of a device", "estimates", "the fused loss saves"):
        assert word in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main([*arguments, "--device", "h200", "--mesh", "fsdp=2"]) == 2
    assert "has 2 devices, and the target has 1" in capsys.readouterr().err
    assert main("plan --model llama-3-8b --batch 1 --seq 512 --device t4".split()) == 1
    assert "To make it fit" in capsys.readouterr().out


@pytest.mark.parametrize("platform, total", [("gpu", 10 + 7 + 1), ("tpu", 14)])
def test_a_program_needs_all_its_arrays_on_a_gpu_and_its_peak_on_a_tpu(platform, total):
    """A GPU's temporaries are one allocation; libtpu's figure adds up what never lives together."""
    memory = SimpleNamespace(
        argument_size_in_bytes=10,
        temp_size_in_bytes=7,
        output_size_in_bytes=4,
        alias_size_in_bytes=3,
        peak_memory_in_bytes=14,
    )
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    found = memory_of(SimpleNamespace(memory_analysis=lambda: memory, output_shardings=[sharding]))
    assert found.total == total
