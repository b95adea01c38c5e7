"""What links cost a step on each mesh, and how their speed is measured and kept."""

import json

import jax
import pytest

from liger_jax.planner import links, target
from liger_jax.planner.architectures import architecture
from liger_jax.planner.links import Links, exchange_seconds, link_seconds
from liger_jax.planner.step import Run
from liger_jax.training import user_caches

NVLINK, PCIE = Links(330e9, 330e9, 330e9), Links(12e9, 12e9, 12e9)
MODEL = architecture("llama-3.2-1b")
NUMBERS = MODEL.num_parameters


def seconds(rates, data, fsdp, **options):
    number = data * fsdp
    return link_seconds(Run(MODEL, 8, 2048, target(f"h200:{number}"), dict(data=data, fsdp=fsdp), **options), rates)


def test_adapters_gather_weights_over_fsdp_alone_and_send_none_of_them_over_data():
    adapters = dict(lora=16, param_dtype="bfloat16")
    assert seconds(NVLINK, 2, 1, **adapters) == 0
    gathered = 2 * 2 * NUMBERS / 2  # twice, in bfloat16, the other device's half
    assert seconds(NVLINK, 1, 2, **adapters) == pytest.approx(gathered / 330e9, rel=1e-3)  # norms are whole
    assert seconds(NVLINK, 1, 2, **adapters, micro_batches=4) == pytest.approx(4 * gathered / 330e9, rel=1e-3)
    assert 0 < seconds(NVLINK, 2, 2, **adapters) < seconds(NVLINK, 1, 4, **adapters)
    assert seconds(NVLINK, 1, 2, **adapters, quantize="nf4") < 0.5 * seconds(NVLINK, 1, 2, **adapters)


def test_trained_weights_are_scattered_over_fsdp_or_summed_over_data_and_updated():
    update = 28 * NUMBERS / 4.8e12  # reads and writes of float32 weights, gradients and moments
    of_fsdp, of_data = 3 * 2 * NUMBERS / 2 / 330e9 + update / 2, 2 * 2 * NUMBERS / 2 / 330e9 + update
    assert seconds(NVLINK, 1, 2) == pytest.approx(of_fsdp, rel=1e-3)
    assert seconds(NVLINK, 2, 1) == pytest.approx(of_data, rel=1e-3)
    assert seconds(NVLINK, 2, 1) > 0.9 * seconds(NVLINK, 1, 2) and seconds(PCIE, 2, 1) < 0.75 * seconds(PCIE, 1, 2)


def test_devices_that_share_experts_gather_none_of_them_and_send_tokens():
    """By numbers: OLMoE has 64 experts of 3 · 2,048 · 1,024 in 16 layers, and a GPU 2 × 2,048 tokens."""
    mixture, rates = architecture("olmoe-1b-7b-0924"), Links(1e9, 1e9, 1e9)
    run = lambda number, **mesh: Run(mixture, 2 * number, 2048, target(f"h200:{number}"), dict(data=1, fsdp=1) | mesh)
    for number in (2, 4):
        ours, others = run(number, expert=number), run(number, fsdp=number)
        tokens = 5 * (number - 1) * 2 * 4096 * 2048 * 16 / 1e9
        experts = 3 * 2 * 64 * 3 * 2048 * 1024 * 16 * (1 - 1 / number) / 1e9
        assert exchange_seconds(ours, rates) == pytest.approx(tokens) and exchange_seconds(others, rates) == 0
        saved = link_seconds(others, rates) - link_seconds(ours, rates)
        assert saved == pytest.approx(experts - tokens, rel=1e-6)
    both = link_seconds(run(4, fsdp=2, expert=2), rates)  # a device gathers the other half of its half of the experts
    rest = link_seconds(run(4, expert=4), rates) - 3 * exchange_seconds(run(4, fsdp=2, expert=2), rates)
    quarter = 3 * 2 * 64 * 3 * 2048 * 1024 * 16 / 4 / 1e9
    assert both - exchange_seconds(run(4, fsdp=2, expert=2), rates) == pytest.approx(rest + quarter, rel=1e-6)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices, which a CPU simulates")
def test_the_links_of_devices_are_measured(monkeypatch):
    monkeypatch.setattr(links, "_WHOLE_BYTES", 2**16)
    found = links.measured(jax.devices()[:2])
    assert min(found.gather, found.scatter, found.exchange) > 0
    assert links.links(jax.devices("cpu")[:2]) == links.ON_CPU  # where nothing is measured


def test_a_command_measures_once_and_keeps_the_figures(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(links, "measured", lambda devices: calls.append(devices) or Links(123.4e9, 2e9, 3.5e9))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards = [type("Card", (), dict(platform="gpu", device_kind="A card"))() for _ in range(2)]
    with user_caches.used(True):
        for _ in range(2):
            assert links.links(cards) == Links(123e9, 2e9, 3.5e9)
            links._figures.cache_clear()  # as in another process
    assert len(calls) == 1 and str(Links(123e9, 2e9, 3.5e9)) == "gather 123, scatter 2, exchange 3.5 GB/s"
    (path,) = tmp_path.glob("*/links.json")
    assert list(json.loads(path.read_text()).values()) == [[123e9, 2e9, 3.5e9]]
    path.write_text("damaged")
    with user_caches.used(True):
        assert links.links(cards) == Links(123e9, 2e9, 3.5e9) and len(calls) == 2
