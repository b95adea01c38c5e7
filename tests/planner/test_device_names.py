"""Devices by the names that people type, and by their memory."""

import pytest

from liger_jax.pallas_kernels.devices import GIB, GPUS
from liger_jax.planner import target
from liger_jax.planner.device_names import known_as, memory_in_bytes, others_with_that_name
from liger_jax.planner.devices import CONTEXT_BYTES, _unseen, pinned_limit
from liger_jax.planner.model_names import refusal, without_quantization

TYPED = {
    "rtx4090": "rtx4090", "RTX 4090": "rtx4090", "4090": "rtx4090", "NVIDIA GeForce RTX 4090": "rtx4090",
    "rtx-3090": "rtx3090", "RTX 3090 Ti": "rtx3090ti", "a100": "a100-40g", "a100-80gb": "a100-80g",
    "a100-80": "a100-80g", "A100 80GB PCIe": "a100-80g", "A100-SXM4-40GB": "a100-40g", "l40s": "l40s",
    "h100-80g": "h100", "H100 SXM5 80GB": "h100", "h100-pcie": "h100-pcie", "h100-94gb": "h100-nvl",
    "rtx-pro-6000": "rtx-pro-6000", "a6000": "rtx-a6000", "RTX A6000": "rtx-a6000", "rtx6000ada": "rtx-6000-ada",
    "4060ti-16gb": "rtx4060ti-16g", "4060 ti": "rtx4060ti-8g", "v100-32gb": "v100-32g", "Tesla T4": "t4",
    "h200-141gb": "h200", "tpu-v5e": "v5e", "h100-pcie:8": "h100-pcie:8", "8xh100": "h100:8", "4x 4090": "rtx4090:4",
    "v5litepod:2x4": "v5e:2x4",
}  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_a_device_is_known_by_the_names_that_people_type(typed):
    assert target(typed).name == TYPED[typed]


@pytest.mark.parametrize(
    "typed, message",
    {
        "rtx4090-laptop": "a laptop's card has another chip.*memory='16GiB'",
        "h100-40gb": r"this card has 80 GiB \(h100\). For another memory pass memory=",
        "rtx409": "is unknown. Did you mean 'rtx4090'",
        "rtx6000": "is unknown. Did you mean .*'rtx-6000-ada'",
        "mi300x": "is unknown. GPUs: h100.*give its memory",
        "v5e-8": "named by the topology of their chips, such as 'v5e:2x2'",
        "gpu": "pass its memory, such as memory",
        "": "is unknown",
        "80gb": "is unknown",
    }.items(),
)
def test_a_name_that_is_no_device_is_never_another_one(typed, message):
    with pytest.raises(ValueError, match=message):
        target(typed)


def test_a_gpu_is_known_by_its_memory_alone_or_has_another_than_the_table():
    alone, card = target(memory="24GiB"), target("rtx4090", "48 GiB")
    assert 21 * GIB < alone.capacity_bytes < 24 * GIB - CONTEXT_BYTES
    assert alone.capability == (8, 0) and alone.more().name == "gpu:2" and target("gpu:2", "24GiB") == alone.more()
    assert card.memory_bytes == 48 * GIB and card.capability == (8, 9) and card.more().memory_bytes == 48 * GIB
    assert target("rtx4090", "24564MiB").capacity_bytes == pytest.approx(target("rtx4090").capacity_bytes, rel=0.01)
    with pytest.raises(ValueError, match="a TPU has 15.75 GiB"):
        target("v5e", "24GiB")
    with pytest.raises(ValueError, match="device=None: name one"):
        target()


def test_memory_is_read_with_its_unit():
    assert memory_in_bytes("24GiB") == memory_in_bytes("24") == memory_in_bytes("24576 MiB") == 24 * GIB
    assert memory_in_bytes("24GB") == 24 * 10**9
    for wrong in ("lots", "-1GiB", "1GiB", "24TiB", "", "1e3GiB", "9999999GiB"):
        with pytest.raises(ValueError, match="must be"):
            memory_in_bytes(wrong)


def test_no_card_hides_more_than_is_taken_off_a_memory_by_number():
    for name, gpu in GPUS.items():
        assert 0 < gpu.memory_bytes - gpu.visible_gib * GIB <= _unseen(gpu.memory_bytes), name


def test_small_memory_has_no_negative_capacity():
    assert [target(f"gpu:{count}", "2GiB").capacity_bytes >= 0 for count in (1, 8)] == [True, True]


def test_a_name_without_its_memory_means_the_smaller_card():
    keys = [known_as(name) for name in ("NVIDIA RTX-4090", "8xA100-80GB", "4060ti")]
    assert keys == [("rtx4090", ""), ("a100-80g", "8"), ("rtx4060ti-8g", "")]
    assert others_with_that_name("a100-40g", "a100") == ["a100-80g"]
    assert others_with_that_name("a100-40g", "a100-40gb") == []


def test_what_a_process_may_have_and_the_next_larger_number():
    assert target("t4").fraction == pytest.approx(0.942, abs=0.002)
    assert target("v5e").capacity_bytes / GIB == pytest.approx(15.75, abs=0.005)
    assert [target(name).more().name for name in ("h200:8", "v5e:2x2")] == ["h200:16", "v5e:2x4"]
    assert [pinned_limit(size * GIB) for size in (128, 8)] == [141, None]


def test_a_models_name_says_how_it_is_quantised_and_of_what_kind_it_is():
    assert without_quantization("llama-3-8b-instruct-bnb-4bit") == ("llama-3-8b-instruct", "nf4")
    families = ["llama", "qwen2"]
    assert refusal("deepseek-v3", families).startswith("is a mixture of experts of another family")
