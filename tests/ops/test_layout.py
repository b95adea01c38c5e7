"""What ops know of a mesh: specs, and parts that are gathered and scattered."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops import layout
from liger_jax.ops.linear.split_head import head_split


@pytest.fixture
def mesh(devices):
    """Two by two, or one by two. Its first axis is Auto, and its second Explicit."""
    types = AxisType.Auto, AxisType.Explicit
    return jax.make_mesh((len(devices) // 2, 2), ("data", "fsdp"), axis_types=types, devices=devices)


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "data"), P("data", "fsdp"), P(("data", "fsdp")), P()], ids=str)
def test_gathered_parts_are_the_whole_and_scattering_sums_them(spec, mesh, devices):
    whole = jnp.arange(64.0).reshape(8, 8)
    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    with jax.set_mesh(mesh):
        x = jax.device_put(whole, NamedSharding(mesh, P()))
        gathered = run(lambda part: layout.gathered(part, spec), in_specs=spec, out_specs=P())
        scattered = run(lambda x: layout.scattered(x, spec), in_specs=P(), out_specs=spec)
        parts = jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(x)
        assert jnp.array_equal(jax.device_get(jax.jit(gathered)(parts)), whole)
        summed = jax.device_get(jax.jit(scattered)(parts))
    summands = 1
    for name in layout.names(spec):
        summands *= mesh.shape[name]
    assert jnp.array_equal(summed, summands * whole)


def test_only_explicit_axes_are_known(mesh):
    found, x = [], jax.ShapeDtypeStruct((8, 8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data", "fsdp")))
    jax.eval_shape(lambda x: found.append(layout.spec_of(x)), x)
    assert found == [P(None, "fsdp", None)]
    assert layout.spec_of(jnp.ones((2, 2))) == P(None, None)


def test_a_head_whose_mesh_axes_have_one_device_is_not_split():
    sizes = {"data": 1, "fsdp": 4}
    assert head_split(P("data"), sizes) is None
    assert head_split(P(), sizes) is None
    split = head_split(P("data", "fsdp"), sizes)
    assert split is not None and split.shards == (1, 4) and split.spec == P("data", "fsdp")
