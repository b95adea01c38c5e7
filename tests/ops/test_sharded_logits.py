"""cross_entropy of logits whose classes devices split: that of whole logits, and no logits travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import cross_entropy
from liger_jax.losses import softmax_cross_entropy_with_integer_labels
from tests import _devices
from tests.ops._losses import relative_error, value_and_grad
from tests.ops._oracle import sent

N, SHARD = 11, 7
FULL_KERNELS = ("triton:interpret", "mosaic_tpu:interpret")


@pytest.fixture
def mesh(devices):
    return jax.sharding.Mesh(devices, ("shard",))


def case(rng, v):
    """Logits with a token that does not count and is inf, and one whose first shard is impossible throughout."""
    logits = (3 * rng.standard_normal((N, v))).astype(np.float32)
    labels = rng.integers(SHARD, v, N)
    logits[3], labels[3] = np.inf, -100
    logits[5, :SHARD] = -np.inf
    weights = rng.uniform(0.5, 2.0, N), rng.uniform(0.5, 2.0, v)
    return jnp.asarray(logits), jnp.asarray(labels), *(jnp.asarray(x, jnp.float32) for x in weights)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_split_classes_have_the_loss_gradients_and_metrics_of_whole_ones(check_vma, reduction, mesh, rng):
    logits, labels, t, c = case(rng, SHARD * mesh.size)
    cotangent = jnp.asarray(rng.uniform(0.5, 2.0, N if reduction == "none" else ()), jnp.float32)
    loss = functools.partial(cross_entropy, reduction=reduction, return_metrics=True, implementation="xla")
    # Smoothing asks for the sum of a row's logits, and the row with impossible ones would be infinite.
    options = dict(z_loss=1e-2, logit_scale=0.9)

    def whole(logits, t):
        value, metrics = loss(logits, labels, token_weights=t, class_weights=c, **options)
        return jnp.sum(value * cotangent), metrics

    def split(logits, t):
        local = lambda z, y, t, c: loss(z, y, token_weights=t, class_weights=c, vocab_axis="shard", **options)
        specs = jax.P(None, "shard"), jax.P(), jax.P(), jax.P("shard")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)
        value, metrics = mapped(logits, labels, t, c)
        return jnp.sum(value * cotangent), metrics

    expected, found = (value_and_grad(f, (0, 1), has_aux=True)(logits, t) for f in (whole, split))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(b).all() and relative_error(a, b) < 1e-5


def test_smoothing_and_a_softcap_see_all_shards(implementation, rng):
    with _devices.several(implementation) as found:  # of a compiled kernel on one card: that card alone
        check_smoothing_and_a_softcap(implementation, jax.sharding.Mesh(found, ("shard",)), rng)


def check_smoothing_and_a_softcap(implementation, mesh, rng):
    logits, labels, _, c = case(rng, SHARD * max(2, mesh.size))
    logits = jnp.where(jnp.isfinite(logits), logits, -2.0)
    loss = functools.partial(cross_entropy, label_smoothing=0.1, logit_softcap=5.0, implementation=implementation)
    whole = lambda z: loss(z, labels, class_weights=c)
    local = lambda z, c: loss(z, labels, class_weights=c, vocab_axis="shard")
    specs = jax.P(None, "shard"), jax.P("shard")
    # The interpreter of Triton's kernels does not follow what varies over a mesh.
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
    expected, found = value_and_grad(whole)(logits), value_and_grad(lambda z: split(z, c))(logits)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-5


def test_a_label_that_no_shard_has_is_nan(mesh):
    v = SHARD * mesh.size
    local = functools.partial(cross_entropy, vocab_axis="shard", reduction="none")
    f = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(None, "shard"), jax.P()), out_specs=jax.P())
    found = jax.jit(f)(jnp.zeros((3, v)), jnp.asarray([v, 0, -1]))
    np.testing.assert_array_equal(np.isnan(found), [True, False, True])


def test_no_logits_travel(mesh):
    v = 32 * mesh.size
    local = functools.partial(cross_entropy, vocab_axis="shard")
    f = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(None, "shard"), jax.P()), out_specs=jax.P())
    text = jax.jit(jax.grad(f)).lower(jnp.zeros((16, v)), jnp.zeros(16, jnp.int32)).compile().as_text() or ""
    assert {kind for kind, _ in sent(text)} == {"all-reduce"}
    assert max(size for _, size in sent(text)) <= 4 * 16 * mesh.size


@pytest.mark.parametrize("function", ["cross_entropy", "softmax_cross_entropy_with_integer_labels"])
def test_on_an_explicit_mesh_the_classes_axis_is_found(function, devices, rng):
    rows = 2 if len(devices) > 2 else 1
    grid = np.array(devices).reshape(rows, -1)
    mesh = jax.sharding.Mesh(grid, ("data", "shard"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    v = SHARD * grid.shape[1]
    logits, labels = jnp.asarray(rng.standard_normal((8, v)), jnp.float32), jnp.asarray(rng.integers(0, v, 8))
    of_examples = lambda *a: softmax_cross_entropy_with_integer_labels(*a).sum()
    loss = cross_entropy if function == "cross_entropy" else of_examples
    expected = jax.jit(jax.value_and_grad(loss))(logits, labels)
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        placed = place(logits, "data", "shard")
        found = jax.jit(jax.value_and_grad(loss))(placed, place(labels, "data"))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-5
    assert found[1].sharding.is_equivalent_to(placed.sharding, 2)


def test_what_cannot_be_split_so_is_refused(devices):
    grid = np.array(devices).reshape(2, -1)
    mesh = jax.sharding.Mesh(grid, ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        logits = jax.device_put(jnp.zeros((4, 8)), jax.NamedSharding(mesh, jax.P(None, ("a", "b"))))
        with pytest.raises(ValueError, match="the mesh axes .*'a', 'b'.* split the classes of the logits, but one"):
            cross_entropy(logits, jnp.zeros(4, jnp.int32))
        with pytest.raises(ValueError, match="vocab_axis='a' is only for use inside jax.shard_map"):
            cross_entropy(logits, jnp.zeros(4, jnp.int32), vocab_axis="a")
