"""Plans of mixtures of experts: adapters and quantised weights of experts, and what their layers hold."""

import dataclasses
import math
from typing import Any

import pytest

from liger_jax.models.core.memory import LayerMemory
from liger_jax.planner import plan
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run

QLORA = dict(batch=2, seq=2048, device="h200", remat="full", lora=16, quantize="nf4")


@pytest.mark.parametrize("devices", [1, 8])
def test_qlora_of_all_experts_of_qwen3_30b_fits_in_40_gb(devices):
    """FSDP splits the adapters by experts."""
    options = QLORA | dict(batch=2 * devices, device="h200" if devices == 1 else f"h200:{devices}")
    run = make_run("qwen3-30b-a3b", lora_experts=True, **options)
    found, without = estimate(run), estimate(make_run("qwen3-30b-a3b", **options))
    assert found.total < 40e9
    numbers = 48 * 128 * 16 * (2048 + 2 * 768 + 768 + 2048) // devices  # both matrices of both weights
    more = {name: found.bytes_of[name] - without.bytes_of[name] for name in found.bytes_of}
    own = {name: size for name, size in more.items() if size}
    assert own == {"parameters": 4 * numbers, "gradients": 4 * numbers, "optimizer state": 8 * numbers}


def test_long_rows_are_planned_where_the_shared_expert_alone_is_dense():
    options: dict[str, Any] = dict(batch=8, device="h200:8", remat="full", param_dtype="bfloat16")
    short, long = (make_run("qwen3.5-35b-a3b", seq=seq, **options) for seq in (2**13, 2**15))
    work = [estimate(run).bytes_of["one layer's work"] for run in (short, long)]
    assert 3 * work[0] < work[1] < 5 * work[0]
    assert long.model.config.feed_forward_width == long.model.config.experts.shared_width


def test_experts_are_held_in_the_bits_of_their_kind_and_a_few_are_dense():
    config = make_run("qwen3-30b-a3b", **QLORA).model.config
    numbers = config.num_hidden_layers * 3 * 128 * 2048 * 768
    of = lambda kind: estimate(make_run("qwen3-30b-a3b", **QLORA | dict(quantize=kind))).bytes_of
    nf4, int8, dense = of("nf4"), of("int8"), of(None)
    projections = config.num_hidden_layers * 2 * 2048 * (32 + 4) * 128
    assert int8["parameters"] - nf4["parameters"] == (numbers + projections) // 2
    assert math.isclose(dense["parameters"] - nf4["parameters"], (numbers + projections) * (2 - 17 / 32), rel_tol=1e-9)
    layer = 2 * (2 * 2048 * (32 + 4) * 128 + 2048 * 128)  # attention's matrices and the router
    dense_experts = 2 * (32 * 2048 * 1536 + 64 * 768 * 2048)
    assert abs(nf4["copies of parameters"] - layer - dense_experts) < 2**20


@pytest.mark.parametrize("adapts_experts", [False, True])
def test_what_a_layer_works_on_does_not_grow_with_its_experts(adapts_experts):
    run = make_run("qwen3-30b-a3b", **QLORA)
    device = run.target.description

    def held(count):
        config = dataclasses.replace(run.model.config, num_experts=count)
        options = dict(rows=2, seq=2048, device=device, adapts_experts=adapts_experts)
        memory = LayerMemory(config, run.kernels(), "none", "bfloat16", **options)
        return memory.worked_on, memory.kept

    assert held(8) == held(128)
    assert held(8)[1]["feed-forward"] == 4096 * 2 * 8 * 2 * 768


def test_adapters_of_experts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="lora_experts=True: qwen2-0.5b has no experts. Leave it out"):
        make_run("qwen2-0.5b", batch=2, device="h200", lora=16, lora_experts=True)
    with pytest.raises(ValueError, match="lora_experts=True is for adapters, and none are trained"):
        make_run("qwen3-30b-a3b", batch=2, device="h200", lora_experts=True)


# --- several devices --------------------------------------------------------------------------------------------------

OLMOE = dict(model="olmoe-1b-7b-0924", batch=16, seq=2048, device="h200:4")


def parts(**changes):
    return estimate(make_run(**OLMOE | changes)).bytes_of


def test_an_expert_axis_splits_parameters_and_state_as_fsdp_does():
    """Every matrix is split over both axes; vectors are too small to be seen."""
    whole = parts()
    for mesh in (dict(expert=4), dict(fsdp=2, expert=2)):
        found = parts(mesh=mesh)
        for name in ("parameters", "optimizer state", "gradients", "layer inputs"):
            assert found[name] == pytest.approx(whole[name], rel=1e-3), (mesh, name)
    run = make_run(**OLMOE | dict(mesh=dict(fsdp=2, expert=2)))
    assert (run.batch_devices, run.tokens) == (4, 4 * 2048)
    assert make_run(**OLMOE | dict(batch=None, device="h200:16", mesh=dict(fsdp=2, expert=8))).batch == 16
    with pytest.raises(ValueError, match="batch=6 is not divisible by the 4 devices of 'h200:4'"):
        make_run(**OLMOE | dict(batch=6, mesh=dict(expert=4)))


def test_no_experts_are_gathered_over_their_axis():
    layer = 2 * 3 * 64 * 2048 * 1024  # in bfloat16, of which one layer is there at a time
    gathered = parts()["copies of parameters"] - parts(mesh=dict(expert=4))["copies of parameters"]
    assert gathered == pytest.approx(layer * 3 / 4, rel=1e-3)


def test_columns_of_gate_and_up_that_change_devices_are_there_twice_more():
    gate_up, others = 64 * 2048 * 2048, 64 * 2048 * 1024 + 4 * 2048 * 2048
    of_tokens, head, router = 8 * 2048 * 2048, 50304 * 2048, 2048 * 64
    found = parts(mesh=dict(fsdp=2, tensor=2))["copies of parameters"]
    # In bfloat16, of a layer's halves; a router is whole. Of the head's gradient the other device's half waits, of each
    # half of the vocabulary. The embedding's sums are in float32.
    of_layer = gate_up + others + 2 * router
    assert found == pytest.approx(of_layer + 2 * gate_up + head / 2 + 4 * of_tokens, rel=1e-3)


def test_experts_that_devices_share_have_rows_for_half_more_than_their_share():
    """Tokens of all devices and the gradients of their sums are there, too, and nothing is kept."""
    run = make_run(**OLMOE)
    device = run.target.description

    def of(devices, seq=2048, trains_experts=True):
        options: dict[str, Any] = dict(expert=devices, trains_experts=trains_experts)
        return LayerMemory(run.model.config, run.kernels(), "none", "bfloat16", 2, seq, device, **options)

    tokens, of_rows = 4096, 2 * 4096 * 8 * (6 * 1024 + 2 * 2048)
    frozen = lambda *args: of(*args, trains_experts=False)
    assert frozen(8).worked_on - frozen(4).worked_on == (8 - 4) * 2 * 2 * tokens * 2048
    others = frozen(1).worked_on + frozen(1).kept["feed-forward"] - of_rows
    assert frozen(4).worked_on == others + 1.5 * of_rows + 2 * 4 * 2 * tokens * 2048
    assert frozen(4).kept["feed-forward"] == 0 < frozen(1).kept["feed-forward"]
    # Float32 sums of parts are more than half of the rows where these are few.
    edges, sums = 17 * 40 * (2048 + 2 * 1024) * 2, 4 * (3 * 2048 * 1024 * 16 + 4 * 128 * 2048)
    assert of(4, 64).worked_on - frozen(4, 64).worked_on == edges + sums - 0.75 * of_rows * 128 / tokens


def test_the_weights_gradient_on_hopper_copies_the_rows_at_the_ends_of_groups():
    """35.3 MiB of 128 experts with D 2,048 and F 768; none on other devices, nor where no weight has a gradient."""
    run = make_run("qwen3-30b-a3b", batch=4, seq=2048, device="h200")
    edges = lambda run, **fields: dataclasses.replace(run.layer, **fields).worked_on
    copied = edges(run) - edges(run, trains_experts=False)
    assert copied == 129 * 40 * (2048 + 2 * 768) * 2
    few = dataclasses.replace(run.model.config, num_experts=8)
    assert edges(run, config=few) - edges(run, config=few, trains_experts=False) == copied * 9 // 129
    for device in ("a100-80g", "v5e"):
        other = make_run("qwen3-30b-a3b", batch=4, seq=2048, device=device)
        assert edges(other) == edges(other, trains_experts=False)


def test_quantised_experts_that_fsdp_splits_are_gathered_in_their_codes():
    options = QLORA | dict(batch=8, device="h200:8")
    found = [
        estimate(make_run("qwen3-30b-a3b", **options | dict(mesh=mesh))).bytes_of["copies of parameters"]
        for mesh in (dict(fsdp=8), dict(data=8))
    ]
    dense = 2 * (2 * 2048 * (32 + 4) * 128 + 2048 * 128 + 32 * 2048 * 1536 + 64 * 768 * 2048)
    codes = 3 * 128 * 2048 * 768 * 17 // 32
    head = 2 * 151936 * 2048  # which is gathered early
    assert found[0] == pytest.approx(dense + codes + head, rel=1e-3) and found[1] == pytest.approx(dense, rel=1e-3)


def test_devices_for_experts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="expert='expert' has 2 devices, and Qwen2Config has no experts. Give the dev"):
        make_run("qwen2-0.5b", batch=2, device="h200:2", mesh=dict(expert=2))
    with pytest.raises(ValueError, match="expert='expert' has 3 devices, which do not divide the 64 experts"):
        estimate(make_run("olmoe-1b-7b-0924", batch=3, device="h200:3", mesh=dict(expert=3)))


def test_advice_keeps_the_expert_axis():
    too_much = dict(model="qwen3-30b-a3b", batch=8, seq=2048, device="a100-40g:4", mesh=dict(fsdp=2, expert=2))
    found = plan(**too_much).changes_to_fit()
    assert found and all(change.run.expert == 2 for change in found)
