"""Times that the links' datasheets predict, and the groups of devices that programs name."""

import pytest

from benchmarks import links
from benchmarks._collectives import collectives

NAMED = """
ENTRY %main.1 (x.1: bf16[8,4]) -> f32[] {
  %x.1 = bf16[8,4]{1,0} parameter(0)
  %all-gather.1 = bf16[32,4]{1,0} all-gather(%x.1), replica_groups=GROUPS, dimensions={0}, use_global_device_ids=true
}
"""


@pytest.mark.parametrize(
    "groups, devices",
    [
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_1'}", 4),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", 4),
        ("{{0,1},{2,3}}", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
    ],
)
def test_the_devices_of_a_collective_are_told_in_several_ways(groups, devices):
    (found,) = collectives(NAMED.replace("GROUPS", groups))
    assert (found.kind, found.devices, found.bytes) == ("all-gather", devices, 2 * 32 * 4)


def test_keys_of_a_row_over_several_devices_are_sent_and_its_attention_grows_with_it():
    alone, shared = (links.predicted("llama-3-8b", mesh, 8192, "gpu") for mesh in ({"fsdp": 8}, {"sequence": 8}))
    assert alone.keys == 0 and shared.keys == pytest.approx(32 * 3 * 2 * 2 * 1024 * 8 * 8192 * 7 / 8 / 450e9)
    assert shared.parameters == alone.parameters and shared.activations == 0
    assert shared.compute - alone.compute == pytest.approx(8 * 32 * 4096 * 8192 * 7 * 8192 / 989e12, rel=1e-3)
