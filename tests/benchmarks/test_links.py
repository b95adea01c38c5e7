"""Times that the links' datasheets predict."""

import pytest

from benchmarks import links


def test_keys_of_a_row_over_several_devices_are_sent_and_its_attention_grows_with_it():
    alone, shared = (links.predicted("llama-3-8b", mesh, 8192, "gpu") for mesh in ({"fsdp": 8}, {"sequence": 8}))
    assert alone.keys == 0 and shared.keys == pytest.approx(32 * 3 * 2 * 2 * 1024 * 8 * 8192 * 7 / 8 / 450e9)
    assert shared.parameters == alone.parameters and shared.activations == 0
    assert shared.compute - alone.compute == pytest.approx(8 * 32 * 4096 * 8192 * 7 * 8192 / 989e12, rel=1e-3)
