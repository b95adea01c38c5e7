"""What is stored in the host's memory is counted, and a host may have too little of it."""

import pytest

from liger_jax.planner import plan, planning, search, searching
from liger_jax.planner.compilers import Compiled
from liger_jax.planner.estimate import estimate
from liger_jax.planner.report import notes, verdict

GIB = 2**30
LONG = dict(batch=1, seq=131_072, device="h100", lora=32, quantize="nf4", remat="offload")


def test_layer_inputs_and_state_are_counted_on_the_host():
    found = plan("llama-3.1-8b", **LONG)
    inputs = 32 * 131_072 * 4096 * 2  # layers, tokens, width, bytes
    assert found.host == inputs
    on_device = plan("llama-3.1-8b", **LONG | dict(remat="full"))
    assert on_device.host == 0
    state = on_device.estimates["fused"].bytes_of["optimizer state"]
    assert plan("llama-3.1-8b", **LONG, state_memory="host").host == inputs + state
    sums = 32 * 131_072 * 32 * 4  # layers, tokens, heads, bytes; attention's results are as wide as layers' inputs
    assert plan("llama-3.1-8b", **LONG | dict(remat="offload_attention")).host == 2 * inputs + sums


def test_one_layers_work_is_less_than_90_kib_a_token():
    parts = plan("llama-3.1-8b", **LONG).estimates["fused"].bytes_of
    assert parts["one layer's work"] < 90 * 1024 * 131_072


def test_a_host_may_have_too_little(capsys):
    assert plan("llama-3.1-8b", **LONG, host_memory="64GiB").fits
    found = plan("llama-3.1-8b", **LONG, host_memory="24GiB")
    assert not found.fits
    assert verdict(found) == "Does not fit: 32.0 GiB needed of the host's memory, which has 24.0."


def test_a_plan_names_the_limit_of_the_pool_where_it_must_be_raised():
    text = lambda seq, **options: " ".join(notes(plan("llama-3.1-8b", **LONG | dict(seq=seq) | options)))
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=141" in text(131_072, batch=4)
    assert "The host holds 16.0 GiB in pinned memory." in text(65_536)


def test_the_longest_row_is_one_that_the_host_holds(monkeypatch):
    monkeypatch.setattr(searching, "compile_run", lambda run: Compiled(estimate(run).total, 0, 0))
    monkeypatch.setattr(searching.compilers, "need_compiler", lambda platform: None)
    run = planning.make_run("llama-3.1-8b", **LONG, host_memory="8GiB")
    assert search(run, "seq").run.seq == 32_768  # 256 KiB a token
    with pytest.raises(ValueError, match=r"host_memory=2.0GiB is too little for batch=1\."):
        search(planning.make_run("llama-3.1-8b", **LONG, host_memory="2GiB"), "batch")


def test_rows_beyond_the_positions_are_planned_on_request():
    longer = LONG | dict(seq=262_144)
    with pytest.raises(ValueError, match="longer than the 131072 positions .* rope_scaling"):
        plan("llama-3.1-8b", **longer)
    assert plan("llama-3.1-8b", **longer, rope_scaling="yarn").host == 64 * GIB
    run = planning.make_run("llama-3.1-8b", **LONG | dict(seq=None), rope_scaling="yarn")
    assert run.model.config.longest_sequence == 2**24  # what a search may try
