"""On a mesh with Explicit axes every op computes what it computes on one device, and sends nothing but parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import ops
from tests.ops._oracle import SAME, TOLERANCE, largest_error, packed, sent

BATCH = P(("data", "fsdp"))
ROWS = (8, 5, 70)
B, T, Q, K, H, D, V = 8, 6, 4, 2, 8, 16, 72
NAMES = ("xla", "triton", "mosaic_tpu")  # `kernel_here` says how they run
# By name: the op, shapes of its rows and how they are sharded over the mesh, then the same of its parameters; its
# kernels.
CASES = {
    "rms_norm": (ops.rms_norm, [(ROWS, BATCH)], [((70,), P())], 3),
    "rms_norm of a split sequence": (ops.rms_norm, [((8, 6, 70), P("data", "fsdp"))], [((70,), P("fsdp"))], 3),
    "layer_norm": (ops.layer_norm, [(ROWS, BATCH)], [((70,), P())] * 2, 3),
    "fused_add_rms_norm": (ops.fused_add_rms_norm, [(ROWS, BATCH)] * 2, [((70,), P())], 3),
    "fused_add_rms_norm of nothing": (
        lambda x, scale, **options: ops.fused_add_rms_norm(x, None, scale, **options),
        [(ROWS, BATCH)],
        [((70,), P())],
        3,
    ),
    "dyt": (ops.dyt, [(ROWS, BATCH)], [((), P()), ((70,), P()), ((70,), P())], 1),
    "poly_norm": (ops.poly_norm, [(ROWS, BATCH)], [((3,), P()), ((), P())], 1),
    "gated_rms_norm": (ops.gated_rms_norm, [(ROWS, BATCH)] * 2, [((70,), P())], 1),
    "group_norm": (functools.partial(ops.group_norm, num_groups=5), [(ROWS, BATCH)], [((5,), P())] * 2, 1),
    "relu_squared": (ops.relu_squared, [(ROWS, BATCH)], [], 1),
    "swiglu": (ops.swiglu, [(ROWS, BATCH)] * 2, [], 2),
    "swiglu of split columns": (ops.swiglu, [(ROWS, P("data", None, "fsdp"))] * 2, [], 2),
    "gated_mlp": (ops.gated_mlp, [(ROWS, BATCH)], [((70, 37), P()), ((70, 37), P()), ((37, 70), P())], 2),
    "geglu of one array": (ops.geglu, [(ROWS, BATCH)], [], 2),
    "softmax": (functools.partial(ops.softmax, axis=1), [(ROWS, BATCH)], [], 1),
    "sparsemax": (ops.sparsemax, [(ROWS, BATCH)], [], 1),
}
IN_TRITON = ("rms_norm", "swiglu")  # by default; in the full suite all


def runs(names, others):
    return [*names, *(pytest.param(*case, marks=pytest.mark.full) for case in others)]


@pytest.fixture
def mesh(devices):
    """Two by two, or one by two."""
    shape, types = (len(devices) // 2, 2), (AxisType.Explicit,) * 2
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=types, devices=devices)


@pytest.fixture
def kernel_here(kernel, devices):
    """The kernel compiled for the mesh's devices if it is made for them, and interpreted on CPUs."""
    platform = {"triton": "gpu", "mosaic_tpu": "tpu"}.get(kernel)
    if platform in (None, devices[0].platform):
        return kernel
    if devices[0].platform != "cpu":
        pytest.skip(f"{kernel} is interpreted on CPUs, and this mesh is of {devices[0].platform}s")
    return f"{kernel}:interpret"


def check(op, arrays, specs, mesh, rng):
    """Value and all gradients, and what they take: numbers of elements that the devices send each other."""

    def value_and_gradients(arrays, cotangents):
        value, pullback = jax.vjp(op, *arrays)
        return value, pullback(cotangents)

    draw = lambda out: jnp.asarray(rng.uniform(0.5, 1.5, out.shape), out.dtype)
    cotangents = jax.tree.map(draw, jax.eval_shape(op, *arrays))
    expected = jax.jit(value_and_gradients)(arrays, cotangents)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        types = jax.eval_shape(op, *placed)
        cotangents = jax.tree.map(
            lambda x, y: jax.device_put(x, NamedSharding(mesh, y.sharding.spec)), cotangents, types
        )
        compiled = jax.jit(value_and_gradients).lower(placed, cotangents).compile()
        results = compiled(placed, cotangents)
    for found, truth in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert largest_error(np.asarray(found), truth) <= TOLERANCE
    value, gradients = results
    for x, gradient in zip(placed, gradients, strict=True):
        assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    return value, {size for _, size in sent(compiled.as_text())}


@pytest.mark.parametrize(
    "name, kernel",
    runs(
        [(name, "xla") for name in CASES] + [(name, "triton") for name in IN_TRITON],
        [
            (name, kernel)
            for name, (*_, kernels) in CASES.items()
            for kernel in NAMES[1:kernels]
            if (name, kernel) not in [(each, "triton") for each in IN_TRITON]
        ],
    ),
)
def test_rows_stay_where_they_are(name, kernel, kernel_here, mesh, rng):
    function, rows, parameters, _ = CASES[name]
    shapes, specs = zip(*rows, *parameters, strict=True)
    # All of one sign: a sum over rows that cancels would have no relative error to speak of.
    arrays = [jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32) for shape in shapes]
    op = functools.partial(function, implementation=kernel_here)
    value, sizes = check(op, arrays, specs, mesh, rng)
    for y in jax.tree.leaves(value):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), y.ndim)
    assert sizes <= packed({math.prod(shape) for shape, _ in parameters}, mesh.devices.flat)
    if not parameters:
        assert not sizes


@pytest.mark.parametrize("kernel", ["xla"])
@pytest.mark.parametrize("spec", runs([BATCH], [[P("data", "fsdp")], [P("data", None, "fsdp")]]), ids=str)
@pytest.mark.parametrize("table_batch", runs([1], [[B]]))
def test_rope_keeps_batch_sequence_and_heads_split(table_batch, spec, kernel_here, mesh, rng):
    q, k = (jnp.asarray(rng.standard_normal((B, T, heads, H)), jnp.float32) for heads in (Q, K))
    angles = jnp.asarray(rng.standard_normal((table_batch, T, H)), jnp.float32)
    rope = lambda q, k: ops.apply_rope(q, k, jnp.cos(angles), jnp.sin(angles), implementation=kernel_here)
    value, sizes = check(rope, [q, k], [spec, spec], mesh, rng)
    assert not sizes
    assert all(y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4) for y in value)


@pytest.mark.parametrize("spec", runs([P("data", None, "fsdp")], [[BATCH]]), ids=str)
def test_attention_keeps_batch_and_heads_split(spec, mesh, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, heads, H)), jnp.float32) for heads in (Q, K, K))
    segments = jnp.asarray(rng.integers(1, 3, (B, T)), jnp.int32)
    value, sizes = check(lambda q, k, v: ops.causal_attention(q, k, v, segments), [q, k, v], [spec] * 3, mesh, rng)
    assert not sizes
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


def losses(rng):
    """Labels (some are ignored), token weights, class weights and a bias."""
    labels = jnp.where(jnp.asarray(rng.random((B, T)) < 0.3), -100, jnp.asarray(rng.integers(0, V, (B, T))))
    weights, class_weights = (jnp.asarray(rng.random(shape), jnp.float32) for shape in ((B, T), (V,)))
    return labels, weights, class_weights


@pytest.mark.parametrize("kernel", runs(["xla"], [["triton"], ["mosaic_tpu"]]))
@pytest.mark.parametrize("reduction", runs(["mean"], [["sum"], ["none"]]))
def test_cross_entropy_sends_a_few_numbers(reduction, kernel_here, mesh, rng):
    labels, weights, class_weights = losses(rng)
    options = dict(reduction=reduction, label_smoothing=0.1, z_loss=0.01, implementation=kernel_here)

    def op(logits, weights):
        return ops.cross_entropy(logits, labels, token_weights=weights, class_weights=class_weights, **options)

    logits = jnp.asarray(rng.standard_normal((B, T, V)), jnp.float32)
    _, sizes = check(op, [logits, weights], [BATCH, BATCH], mesh, rng)
    assert sizes <= packed(set() if reduction == "none" else {1}, mesh.devices.flat)


HEADS = {"whole": P(), "of FSDP": P("fsdp"), "split over D": P(None, "fsdp"), "of a split vocabulary": P("fsdp")}
FUSED = [(reduction, mode, head) for head in HEADS for reduction, mode in (
    ("mean", "fast"), ("mean", "lean"), ("sum", "fast"), ("none", "lean")
) if mode == "lean" or head != "of a split vocabulary"]  # fmt: skip
FUSED_DEFAULT = [("mean", "fast", "of FSDP"), ("mean", "lean", "of a split vocabulary")]


# JAX's TPU interpreter lets no device begin a kernel before all have come to it. Here some may wait for the others in a
# sum that does not depend on it: on a CPU, that now and then never ends.
@pytest.mark.parametrize("kernel", runs(["xla"], [["triton"]]))
@pytest.mark.parametrize("reduction, mode, head", runs(FUSED_DEFAULT, [c for c in FUSED if c not in FUSED_DEFAULT]))
def test_fused_loss_sends_the_head_and_a_few_numbers(reduction, mode, head, kernel, kernel_here, mesh, rng):
    if mode == "fast" and kernel != "xla":
        pytest.skip("fast mode is XLA's and Hopper's")
    tokens = P("data") if head == "of a split vocabulary" else BATCH
    labels, weights, class_weights = losses(rng)
    options = dict(reduction=reduction, mode=mode, label_smoothing=0.1, z_loss=0.01, implementation=kernel_here)

    def op(hidden, weight, bias, weights):
        return ops.fused_linear_cross_entropy(
            hidden, weight, labels, bias=bias, token_weights=weights, class_weights=class_weights, **options
        )

    hidden, weight, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, T, D), (V, D), (V,)))
    value, sizes = check(op, [hidden, weight, bias, weights], [tokens, HEADS[head], P(), tokens], mesh, rng)
    allowed = {1, V, V // 2, V * D, V * D // 2}
    if head == "of a split vocabulary":  # a few numbers a token, and the gradient of hidden states: sums over shards
        own = B * T // mesh.shape["data"]
        allowed |= {own, own * D}
    assert sizes <= packed(allowed, mesh.devices.flat)
    spec = tokens if reduction == "none" else P()
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)


BESIDE_MANUAL = {
    **{name: (function, [shape for shape, _ in rows], [shape for shape, _ in others])
       for name, (function, rows, others, _) in CASES.items() if all(spec == BATCH for _, spec in rows)},
    "causal_attention": (ops.causal_attention, [(B, T, heads, H) for heads in (Q, K, K)], []),
    "cross_entropy": (lambda x: ops.cross_entropy(x, jnp.argmin(x, -1), reduction="sum"), [(B, T, V)], []),
    "fused_linear_cross_entropy": (
        lambda x, weight: ops.fused_linear_cross_entropy(x, weight, jnp.argmin(x, -1), reduction="sum"),
        [(B, T, D)],
        [(V, D)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", runs(["fused_linear_cross_entropy"], [[name] for name in BESIDE_MANUAL][:-1]))
def test_gradients_are_right_in_a_shard_map_over_the_other_axes(name, mesh, rng):
    """With one axis Manual, and JAX checking what varies over it, an op takes the other axes by itself."""
    op, rows, others = BESIDE_MANUAL[name]
    arrays = [jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32) for shape in (*rows, *others)]
    specs = *[P("data")] * len(rows), *[P()] * len(others)

    def loss(*arrays):
        return sum(jnp.sum(y * jnp.cos(y)) if y.ndim else y for y in jax.tree.leaves(op(*arrays)))

    value_and_gradients = lambda f: jax.jit(jax.value_and_grad(f, argnums=range(len(arrays))))
    expected = value_and_gradients(loss)(*arrays)
    with jax.set_mesh(mesh):
        on_shards = jax.shard_map(
            lambda *arrays: jax.lax.psum(loss(*arrays), "data"), in_specs=specs, out_specs=P(), axis_names={"data"}
        )
        placed = [jax.device_put(x, BATCH if spec else P()) for x, spec in zip(arrays, specs, strict=True)]
        found = value_and_gradients(on_shards)(*placed)
    for x, truth in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert largest_error(np.asarray(x), truth) <= TOLERANCE


def test_metrics_of_split_tokens_are_those_of_all(mesh, rng):
    labels, weights, _ = losses(rng)
    hidden, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, T, D), (V, D)))
    run = jax.jit(functools.partial(ops.fused_linear_cross_entropy, z_loss=0.1, return_metrics=True))
    expected = run(hidden, weight, labels, token_weights=weights)
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        found = run(place(hidden, BATCH), place(weight, P()), place(labels, BATCH), token_weights=place(weights, BATCH))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_arrays_that_would_have_to_be_gathered_are_refused(mesh):
    place = lambda shape, spec, dtype=jnp.float32: jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))
    rows = place((8, 4), P("data"))
    with pytest.raises(ValueError, match=r"fused_add_rms_norm: an array of shape \(8, 4\) is.*jax.sharding.reshard"):
        ops.fused_add_rms_norm(rows, place((8, 4), P("fsdp")), implementation="triton:interpret")
    labels = place((8,), P("data"), jnp.int32)
    loss = ops.fused_linear_cross_entropy
    with pytest.raises(ValueError, match=r"the first argument is sharded over the mesh as P.None, 'fsdp'.*whole"):
        loss(place((8, 4), P(None, "fsdp")), place((12, 4), P()), labels)
    message = "weight is sharded over the mesh as P.None, 'fsdp'., and the tokens over .'data',."
    with pytest.raises(ValueError, match=message):
        loss(rows, place((12, 4), P(None, "fsdp")), labels)
    with pytest.raises(ValueError, match="weight is sharded over the mesh as .*may split the vocabulary, but only one"):
        loss(rows, place((12, 4), P(("data", "fsdp"))), labels)


NORMS = {
    "rms_norm": lambda x: ops.rms_norm(x),
    "layer_norm": lambda x: ops.layer_norm(x),
    "fused_add_rms_norm": lambda x: ops.fused_add_rms_norm(x, x, jnp.ones(16)),
    "dyt": lambda x: ops.dyt(x, jnp.float32(0.5)),
    "poly_norm": lambda x: ops.poly_norm(x, jnp.ones(3), jnp.float32(0.0)),
    "gated_rms_norm": lambda x: ops.gated_rms_norm(x, x),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_split_rows_is_refused(name, mesh):
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(None, "fsdp")))
    message = rf"^{name}: x is sharded over the mesh as .*splits its last axis over \('fsdp',\), .*jax.sharding.reshard"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        NORMS[name](x)


def test_a_vmap_over_a_split_axis_is_refused_by_name(mesh):
    x = jax.device_put(jnp.ones((8, 3, 16)), NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="^rms_norm: jax.vmap maps over .* Explicit axes split"):
        jax.vmap(ops.rms_norm)(x)


@pytest.mark.parametrize("kernel", ["triton"])
def test_ops_run_outside_of_jit_and_of_a_mesh_in_context(kernel_here, mesh, rng):
    x, scale = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 70), (70,)))
    placed = jax.device_put(x, NamedSharding(mesh, BATCH))
    y = ops.rms_norm(placed, jax.device_put(scale, NamedSharding(mesh, P())), implementation=kernel_here)
    assert largest_error(np.asarray(y), ops.rms_norm(x, scale)) <= SAME
    assert y.sharding.is_equivalent_to(placed.sharding, 2)


def test_a_frozen_head_takes_no_gradient_work(mesh):
    with jax.set_mesh(mesh):
        place = lambda shape, spec, dtype=jnp.float32: jax.device_put(
            jnp.zeros(shape, dtype), NamedSharding(mesh, spec)
        )
        arrays = place((16, 8), BATCH), place((32, 8), P("fsdp")), place((16,), BATCH, jnp.int32)
        frozen = jax.grad(lambda h, w, y: ops.fused_linear_cross_entropy(h, w, y))
        both = jax.grad(lambda h, w, y: ops.fused_linear_cross_entropy(h, w, y), argnums=(0, 1))
        count = lambda f: jax.jit(f).lower(*arrays).as_text().count("stablehlo.dot_general")
        assert count(frozen) < count(both)


def test_a_feed_forward_whose_width_is_split_asks_for_a_shard_map(devices):
    mesh = jax.make_mesh((len(devices),), ("tensor",), axis_types=(jax.sharding.AxisType.Explicit,), devices=devices)
    with jax.set_mesh(mesh):
        put = lambda shape, *spec: jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, P(*spec)))
        up, down = put((8, 16), None, "tensor"), put((16, 8), "tensor")
        with pytest.raises(ValueError, match=r"gated_mlp: the mesh axes \('tensor',\) split F.*jax.lax.psum over"):
            jax.eval_shape(ops.gated_mlp, put((4, 8)), up, up, down)
