"""The estimate keeps to the rules that are known, and every wrong argument is told its cure."""

import dataclasses
import itertools
import json
import pathlib
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import lora_memory
from benchmarks._memory import Figures, estimated
from liger_jax.pallas_kernels.devices import GPUS, TPUS
from liger_jax.planner import plan, search, searching, target
from liger_jax.planner.advice import largest
from liger_jax.planner.architectures import architecture
from liger_jax.planner.compilers import Compiled, memory_of
from liger_jax.planner.estimate import estimate, logits_bytes
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import make_optimizer

GIB = 2**30


def test_mixed_precision_takes_16_bytes_a_parameter():
    whole = plan("llama-3.2-1b", batch=64, seq=8192, device="h200").estimates["logits"]
    parameters = architecture("llama-3.2-1b").num_parameters
    assert whole.bytes_of["parameters"] + whole.bytes_of["optimizer state"] == 12 * parameters


def test_8_bit_state_takes_about_2_03_bytes_of_the_8_a_parameter():
    """The estimate knows no small parameters, which have float32 moments."""
    run = make_run("qwen2-0.5b", batch=1, seq=512, device="h200", optimizer="adamw8bit")
    optimizer = make_optimizer("adamw8bit", "float32")
    state = jax.eval_shape(optimizer.init, run.model.abstract(param_dtype=jnp.float32)[1])
    counted = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert estimate(run).bytes_of["optimizer state"] == pytest.approx(counted, rel=0.01)
    assert counted / run.model.num_parameters == pytest.approx(2.03, abs=0.02)


def test_a_sharded_model_takes_its_share():
    found = plan("qwen2.5-14b", batch=8, seq=1024, device="h200:8").estimates["fused"]
    assert found.static == pytest.approx(16 * architecture("qwen2.5-14b").num_parameters / 8, rel=1e-3)


COMPILED = pathlib.Path(__file__).parents[2] / "benchmarks/results/planner.md"
CELLS = r"^\| ([\w.-]+) \| (\d+) × (\d+) \| (\w+) \| (\w+) \| ([\w:-]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$"


def test_estimates_are_within_10_percent_of_all_steps_that_were_compiled():
    steps = re.findall(CELLS, COMPILED.read_text(encoding="utf8"), re.MULTILINE)
    assert len(steps) >= 40
    for model, batch, seq, remat, loss, device, compiled in steps:
        run = make_run(model, batch=int(batch), seq=int(seq), remat=remat, loss=loss, device=device)
        assert estimate(run).total / GIB == pytest.approx(float(compiled), rel=0.1), run


def test_estimates_of_adapters_are_within_10_percent_of_all_steps_that_were_compiled():
    """On a T4 within 20 %: XLA converts bfloat16 to float32 there."""
    figures, compared = Figures("lora_memory", None), 0
    for cell in itertools.product(lora_memory.MODELS, ("LoRA", "QLoRA"), lora_memory.CARDS):
        spec = lora_memory.spec_of(*cell)
        if figure := figures.compiled(spec):
            tolerance = 0.2 if cell[-1] == "t4" else 0.1
            assert estimated(spec).total == pytest.approx(figure["total"], rel=tolerance), cell
            compared += 1
    assert compared >= 15


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


@pytest.mark.parametrize(
    "fields, seq, compiled",
    [
        ({}, 16384, 483),
        (dict(hidden_size=1024, head_dim=64), 32768, 1231),
        (dict(hidden_size=1024, head_dim=64, num_key_value_heads=16), 16384, 877),
        (dict(hidden_size=1024, head_dim=128, num_attention_heads=8, num_key_value_heads=2), 32768, 834),
    ],
    ids=str,
)
def test_long_rows_that_tpus_share_take_what_was_compiled(fields, seq, compiled, tmp_path):
    """In MiB, by JAX 0.10.2 for a v6e. A chunk's scores are most of it, since XLA attends there."""
    config = dict(model_type="llama", vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=2)
    config |= dict(num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2**16) | fields
    config["intermediate_size"] = 2 * config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = make_run(tmp_path / "config.json", batch=1, seq=seq, device="v6e:2x2", mesh=dict(sequence=4))
    assert estimate(run).total / 2**20 == pytest.approx(compiled, rel=0.05)


def test_a_long_row_of_a_billion_parameters_that_tpus_share_takes_what_was_compiled():
    """By JAX 0.10.2; tests/planner/test_compiled.py compiles it for a v6e."""
    run = make_run("llama-3.2-1b", batch=1, seq=32768, device="v6e:2x2", mesh=dict(sequence=4))
    assert estimate(run).total == pytest.approx(8_368_152_736, rel=0.1)


def test_each_layer_that_keeps_its_products_takes_as_much():
    """Steps of LLaMA-3-8B with adapters, compiled for an H200 by JAX 0.11.2: 19.44, 28.60 and 38.08 GiB."""
    layers = dict(full=19.44, dots=38.08) | {16: 28.60}
    run = dict(batch=4, seq=2048, device="h200", lora=16)
    found = {remat: plan("llama-3-8b", **run, remat=remat).needed / 2**30 for remat in (*layers, 0, 15, 31, 32)}
    assert {remat: found[remat] for remat in layers} == pytest.approx(layers, rel=0.02)
    assert (found[0], found[32]) == (found["full"], found["dots"])
    assert found[16] - found[15] == pytest.approx((found[31] - found[15]) / 16)


@pytest.mark.parametrize("device", ["h200", "v5e"])
def test_no_part_of_a_small_model_is_less_than_nothing(device, tmp_path):
    """On a TPU, padding is most of the memory that is kept."""
    path = tmp_path / "config.json"
    sizes = dict(vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=64, num_attention_heads=4)
    path.write_text(json.dumps(sizes | {"model_type": "llama", "num_key_value_heads": 4}))
    for remat in ("none", "dots", "full"):
        found = estimate(make_run(str(path), batch=1, seq=16, device=device, remat=remat))
        assert found.peak == "backward" and min(found.bytes_of.values()) >= 0, found


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
        return sum(run.layer.kept.values()) // (2 * 16)  # bfloat16 values a token

    queries_and_keys = kept(sizes | dict(model_type="qwen3")) - kept(sizes | dict(model_type="llama"))
    assert queries_and_keys == 0
    result = kept(gelu | dict(model_type="gemma2")) - kept(gelu | dict(model_type="gemma"))
    assert result == (0 if remat == "full" else 64)


@pytest.mark.parametrize("model, seq", [("qwen2-0.5b", 2048), ("gemma-2-2b", 8192)])
def test_packed_rows_take_the_memory_of_one_segment(model, seq):
    """On an H200 kernels take both, and on a T4 XLA does."""
    for device, dtype in dict(h200="bfloat16", t4="float16").items():
        run = make_run(model, batch=8, seq=seq, device=device, dtype=dtype, packed=True)
        assert estimate(run).total == estimate(dataclasses.replace(run, packed=False)).total


@pytest.mark.parametrize("remat, compiled", [("full", 7.430), ("none", 12.604)])
def test_linear_attention_takes_what_the_compiler_finds(remat, compiled, tmp_path):
    """GiB of a step of six layers with it and two without, compiled for an H200."""
    heads = dict(num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=16)
    sizes = dict(vocab_size=32768, hidden_size=1024, intermediate_size=3584, num_hidden_layers=8)
    fields = dict(model_type="qwen3_5_text", torch_dtype="bfloat16") | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps(fields))
    run = make_run(str(tmp_path), batch=8, seq=2048, device="h200", remat=remat)
    assert estimate(run).total / GIB == pytest.approx(compiled, rel=0.1)
    of_tpu = make_run(str(tmp_path), batch=8, seq=2048, device="v5e", remat=remat)  # by kernels, too
    assert estimate(of_tpu).total / GIB == pytest.approx(compiled, rel=0.4)


def test_scores_are_counted_where_xla_attends():
    """On a T4 they are 1.0 of the 9.585 GiB that the compiler finds."""
    run = make_run("qwen2-0.5b", batch=8, seq=2048, device="t4", dtype="float16", remat="full")
    assert estimate(run).total == pytest.approx(9.585 * GIB, rel=0.1)


def test_micro_batches_hold_the_activations_of_one_and_a_sum_of_gradients():
    run = make_run("qwen2-0.5b", batch=64, seq=2048, device="h200", remat="none", loss="logits")
    one, four = estimate(run), estimate(dataclasses.replace(run, micro_batches=4))
    for name in ("layer inputs", "attention", "feed-forward"):
        assert four.bytes_of[name] * 4 == one.bytes_of[name] > 0
    assert four.bytes_of["gradients"] == one.bytes_of["gradients"] + 4 * architecture("qwen2-0.5b").num_parameters
    with pytest.raises(
        ValueError, match="batch=12 is not divisible by the 2 devices .* in micro_batches=4. Pass batch=8"
    ):
        make_run("qwen2-0.5b", batch=12, seq=128, device="h200:2", micro_batches=4)
    with pytest.raises(
        ValueError, match="^batch=6 is not divisible by micro_batches=4. Pass batch=4, or fewer of them.$"
    ):
        make_run("qwen2-0.5b", batch=6, seq=128, device="h200", micro_batches=4)


def test_what_lies_on_the_host_takes_no_memory_of_a_device():
    at = lambda **options: plan("qwen2-0.5b", batch=8, seq=512, device="h200", **options).estimates["fused"].bytes_of
    assert at(state_memory="host")["optimizer state"] == 0 < at()["optimizer state"]
    assert at(remat="offload")["layer inputs"] == 0 < at()["layer inputs"]


@pytest.mark.parametrize(
    "bytes_per_token", [2**21, *(pytest.param(n, marks=pytest.mark.full) for n in (2**20, 3 * 2**20))]
)
def test_search_finds_the_largest_that_the_compiler_lets_fit(bytes_per_token, monkeypatch):
    """Wherever the estimate's guess is; the compiler's answers are ours here."""
    answer = lambda run: Compiled(run.batch * run.seq * bytes_per_token, 0, 0)
    monkeypatch.setattr(searching, "compile_run", answer)
    monkeypatch.setattr(searching.compilers, "need_compiler", lambda platform: None)
    run = make_run("qwen2-0.5b", batch=8, seq=256, device="h200:8")
    for what, unit in (("batch", 8), ("seq", 128)):
        found = search(run, what)
        more = dataclasses.replace(found.run, **{what: getattr(found.run, what) + unit})
        assert answer(found.run).total <= run.target.capacity_bytes < answer(more).total
        assert len(found.answers) < 20
    with pytest.raises(
        ValueError,
        match="Not even batch=8 fits into h200:8: it needs .* The plan of batch=8 says what would make it fit",
    ):
        search(dataclasses.replace(run, seq=131072), "batch")


def test_largest_is_by_bisection():
    for most in range(40):
        assert largest(lambda n, most=most: n <= most) == most


def test_devices_are_named_with_their_number_or_topology():
    assert [target(f"h200:{n}").topology for n in (1, 8, 32)] == ["1x1x1", "1x1x8", "1x4x8"]
    for name, count in {"v5e": 1, "v5e:8x8": 64, "v6e:2x2": 4, "v5p:4x4x4": 64, "tpu7x:2x2x1": 8}.items():
        assert target(name).count == count
    assert {"h100", "h200", "a100-40g", "a100-80g", "l4", "a10", "t4", "b200"} <= set(GPUS)
    assert {"v5e", "v5p", "v6e"} <= set(TPUS)


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
