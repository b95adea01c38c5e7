"""What ops know of a mesh: specs, and parts that are gathered and scattered."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops import layout
from liger_jax.ops.labels import as_labels
from liger_jax.ops.linear.split_head import HeadSplit, head_split
from liger_jax.ops.segment_ids import document_numbers, numbered


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


def test_specs_are_read_by_their_mesh_axes():
    assert layout.names(None) == () and layout.names("data") == ("data",)
    assert layout.names(P(("data", "fsdp"), None, "tensor")) == ("data", "fsdp", "tensor")
    assert layout.full_spec(P("data"), 3) == P("data", None, None)
    assert layout.along(P("tensor", ("data", "fsdp")), ("data", "fsdp")) == P(None, ("data", "fsdp"))
    assert head_split(P(("data", "fsdp")), {"data": 2, "fsdp": 4}) == HeadSplit((("data", "fsdp"), ()), (8, 1))


def test_a_matrix_is_sent_in_the_smaller_dtype():
    for dtypes in (("float32", "bfloat16"), ("bfloat16", "float32")):
        assert layout.sent_dtype(*dtypes) == jnp.bfloat16


def test_each_device_has_an_early_and_a_late_chunk():
    order = layout.in_chunks(jnp.arange(8), 0, 2)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert layout.from_chunks(order, 0, 2).tolist() == list(range(8))
    assert [layout.pairs_of_chunks(length, 8) for length in (131072, 32768)] == [2, 1]


def test_ids_of_rows_are_numbers_of_documents_or_nan():
    assert document_numbers(jnp.array([[1, 1, 2, 0]])).tolist() == [[0, 0, 1, 2]]
    factors = numbered(jnp.array([[1, 1, 0], [0, 0, 1]])).ravel()
    assert factors[0] == 1 and jnp.isnan(factors[1])
    assert as_labels(jnp.array([1, 2], jnp.uint8)).dtype == jnp.int32
