"""Where a computation is meant to run, and what is known of a device by its name."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from liger_jax.ops import place as place_module
from liger_jax.ops import rms_norm
from liger_jax.ops.place import Place, place_of
from liger_jax.pallas_kernels.devices import GPUS, capability_of, gpu_named

# Names that a card's row was found by before there was one table.
ROWS = {
    "h100": ("NVIDIA H100 80GB HBM3", "NVIDIA H800", "H100-SXM5-80GB"),
    "h100-pcie": ("NVIDIA H100 PCIe",),
    "h100-nvl": ("NVIDIA H100 NVL",),
    "gh200": ("NVIDIA GH200 480GB",),
    "h200": ("NVIDIA H200", "NVIDIA H200 NVL"),
    "t4": ("Tesla T4", "NVIDIA T4"),
    "b200": ("NVIDIA B200",),
    "rtx3090ti": ("NVIDIA GeForce RTX 3090 Ti",),
    "rtx4070-super": ("NVIDIA GeForce RTX 4070 SUPER",),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation",),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
}
OTHERS = {
    (7, 5): ("NVIDIA T4G", "NVIDIA GeForce RTX 2070", "Quadro P5000", "NVIDIA TITAN Xp"),
    (8, 0): ("NVIDIA A100 80GB PCIe", "NVIDIA RTX 2000 Ada Generation", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    (10, 0): ("NVIDIA GB200", "NVIDIA B300 SXM6 AC"),
    (12, 0): ("NVIDIA GeForce RTX 5060", "NVIDIA RTX PRO 4500 Blackwell", "NVIDIA GeForce RTX 5090 Laptop GPU"),
}


def test_a_card_is_found_by_every_name_of_it():
    for row, names in ROWS.items():
        assert [name for name in names if gpu_named(name) is not GPUS[row]] == []
    for row, gpu in GPUS.items():
        of_that_kind = [other for other in GPUS.values() if other.kind == gpu.kind]  # they differ in memory
        assert gpu_named(gpu.kind) is of_that_kind[0], row
        assert capability_of(gpu.kind) == gpu.capability


def test_a_card_without_a_row_is_known_by_the_beginning_of_its_name():
    for capability, names in OTHERS.items():
        assert [name for name in names if gpu_named(name) or capability_of(name) != capability] == []


@pytest.mark.parametrize(
    "kind, cores",
    [("NVIDIA H200", 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H20", 78), ("NVIDIA H100 of tomorrow", 132)],
)
def test_hoppers_kernels_have_as_many_blocks_as_the_card_has_cores(kind, cores):
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=AbstractDevice(kind, None, "gpu"))
    call = functools.partial(rms_norm, implementation="mosaic_gpu")
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(call)(jnp.zeros((4096, 4096), jnp.bfloat16), jnp.zeros(4096, jnp.bfloat16))
    assert f"grid=({cores}," in str(program)


def types_on(kind, platform, axis_type=AxisType.Explicit):
    """The type of an array that is sharded over a mesh of absent devices."""
    device = AbstractDevice(kind, 1, platform)
    mesh = AbstractMesh((2,), ("data",), (axis_type,), abstract_device=device)
    return jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))


def place(*inputs, **options):
    found = []
    jax.eval_shape(lambda *x: found.append(place_of(*x, **options)), *inputs)
    return found[0]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_place_says_which_mesh_refuses(axis_type):
    found = place(types_on("TPU v5 lite", "tpu", axis_type))
    assert found.platform == "tpu"
    assert str(found.mesh_refusal).startswith("it is not partitioned over the mesh axes ('data',); call it inside")
    assert place(jax.ShapeDtypeStruct((8, 16), jnp.float32)).mesh_refusal is None


def test_what_lies_beside_the_inputs_may_be_refused_but_tells_no_device():
    found = []
    jax.eval_shape(
        lambda x, beside: found.append(place_of(x, None, beside=(beside, None))),
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
        types_on("TPU v5 lite", "tpu"),
    )
    assert found[0].mesh_refusal is not None
    assert found[0].device.device_kind != "TPU v5 lite"


def test_memory_is_asked_for_only_where_it_is_needed(monkeypatch):
    x = jnp.ones(2)
    monkeypatch.setattr(place_module, "_memory_here", lambda kind: 2**30)
    assert place_of(x, memory_is_needed=True).memory_bytes == 2**30
    monkeypatch.delattr(place_module, "_memory_here")
    assert place_of(x).memory_bytes is None


def test_an_h100_is_told_from_other_hopper_cards():
    found = {kind: Place(AbstractDevice(kind, None, "gpu")) for kind in ("NVIDIA H100 PCIe", "NVIDIA H200")}
    assert all(place.is_hopper for place in found.values())
    assert [place.is_h100 for place in found.values()] == [True, False]
