"""Plans of mixtures of experts: adapters and quantised weights of experts, and what their layers hold."""

import dataclasses
import math

import pytest

from liger_jax.models.core.memory import LayerMemory
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
    more = {name: found.parts[name] - without.parts[name] for name in found.parts}
    own = {name: size for name, size in more.items() if size}
    assert own == {"parameters": 4 * numbers, "gradients": 4 * numbers, "optimizer state": 8 * numbers}


def test_experts_are_held_in_the_bits_of_their_kind_and_a_few_are_dense():
    config = make_run("qwen3-30b-a3b", **QLORA).model.config
    numbers = config.num_hidden_layers * 3 * 128 * 2048 * 768
    of = lambda kind: estimate(make_run("qwen3-30b-a3b", **QLORA | dict(quantize=kind))).parts
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
