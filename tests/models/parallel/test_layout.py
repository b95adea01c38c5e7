"""A layout says how parameters, state and activations are sharded over a mesh, and refuses what would be copied
silently.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout
from liger_jax.models.core.parallel.layout import ONE_DEVICE
from liger_jax.training import stochastic_rounding
from tests.models._llama import CONFIG, make_model, random_tokens

WIDE = dataclasses.replace(CONFIG, vocab_size=64)
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
MESH = AbstractMesh((2, 2), ("data", "fsdp"))


def mesh_of(devices, names, axis_type=AxisType.Auto, shape=None):
    shape = shape or (len(devices) // 2, 2)
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)


def specs(shardings):
    """The specs by the ends of their paths, of the first layer's kernel, the head and a vector."""
    flat = {jax.tree_util.keystr(path): sharding.spec for path, sharding in jax.tree.leaves_with_path(shardings)}
    ends = ("['up_proj']['kernel'].value", "['lm_head'].value", "['norm']['scale'].value")
    return [{spec for path, spec in flat.items() if path.endswith(end)} for end in ends]


# --- what is refused --------------------------------------------------------------------------------------------------


@AXIS_TYPES
def test_an_axis_that_the_layout_does_not_name_is_refused_by_its_name(axis_type, devices):
    """Every device along it would compute the same."""
    mesh = mesh_of(devices, ("fsdp", "tensor"), axis_type)
    model = make_model(WIDE, kernels=KernelOptions(batch_axes=("fsdp",)))
    with jax.set_mesh(mesh):
        tokens = jax.device_put(jnp.zeros((8, 5), jnp.int32), NamedSharding(mesh, P("fsdp")))
        with pytest.raises(ValueError, match="2 devices along 'tensor', which the layout does not name"):
            jax.eval_shape(lambda tokens: model(tokens, labels=tokens).loss, tokens)
    with pytest.raises(ValueError, match="2 devices along 'tensor', which the layout does not name"):
        Layout(batch=("fsdp",)).shardings(model, mesh)


def test_an_unnamed_axis_of_one_device_is_no_harm(devices):
    mesh = mesh_of(devices, ("fsdp", "tensor"), shape=(len(devices), 1))
    layout = Layout(batch=("fsdp",))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(layout.run(lambda x: x + 1, (jnp.arange(8.0),)), jnp.arange(8.0) + 1)


def test_an_expert_axis_splits_the_batch_and_the_experts_and_what_fsdp_splits():
    layout = Layout(batch=("fsdp",), expert="x")
    assert layout.batch == layout.axes == layout.fsdp_axes == ("fsdp", "x")
    assert Layout(batch=("x",), fsdp="x", expert="x").fsdp_axes == ("x",)
    tree = {"kernel": jnp.zeros((4, 4)), "experts": {"gate_up": jnp.zeros((6, 4, 8)), "down": jnp.zeros((6, 3, 4))}}
    found = layout.shardings(tree, AbstractMesh((2, 2), ("fsdp", "x")))
    assert found["kernel"].spec == P(("fsdp", "x"))
    assert found["experts"]["gate_up"].spec == P("x", "fsdp") and found["experts"]["down"].spec == P("x")
    many = {"experts": {"gate_up": jnp.zeros((8, 4, 8)), "down_proj_bias": jnp.zeros((8, 4))}}
    for sizes, both in (((2, 2), ("x", "fsdp")), ((4, 1), ("fsdp", "x"))):
        found = layout.shardings(many, AbstractMesh(sizes, ("fsdp", "x")))
        assert {sharding.spec for sharding in jax.tree.leaves(found)} == {P(both)}
    with pytest.raises(ValueError, match="expert='x' has 4 devices, which do not divide the 6 experts of down"):
        layout.shardings(tree["experts"], AbstractMesh((1, 4), ("fsdp", "x")))
    model = nnx.eval_shape(lambda: make_model(scan_layers=True))
    with pytest.raises(ValueError, match="expert='x' has 2 devices, and LlamaConfig has no experts. Give the devices"):
        layout.shardings(model, AbstractMesh((1, 2), ("fsdp", "x")))
    with pytest.raises(ValueError, match=r"has the axes \('fsdp',\), and lacks \['x'\]"):
        layout.shardings({"kernel": jnp.zeros((4, 4))}, AbstractMesh((2,), ("fsdp",)))


@pytest.mark.usefixtures("unchecked_types")
def test_a_layout_s_arguments_are_checked():
    with pytest.raises(TypeError, match="batch='data' must be a tuple of mesh axis names"):
        Layout(batch="data")
    with pytest.raises(TypeError, match="fsdp=2 must be a mesh axis name"):
        Layout(fsdp=2)
    with pytest.raises(TypeError, match=r"tensor=\('x',\) must be a mesh axis name"):
        Layout(tensor=("x",))
    with pytest.raises(ValueError, match=r"\['data'\] is named twice"):
        Layout(tensor="data")
    with pytest.raises(ValueError, match=r"fsdp names \['fsdp'\], which split neither.*batch=\('data', 'fsdp'\)"):
        Layout(batch=("data",))
    with pytest.raises(ValueError, match="have the same meaning"):
        KernelOptions(layout=Layout(), batch_axes=("data", "fsdp"))
    with pytest.raises(TypeError, match="layout='fsdp' must be a Layout"):
        KernelOptions(layout="fsdp")


def test_batch_axes_are_the_layout_whose_last_axis_splits_parameters():
    assert KernelOptions(batch_axes=("a", "b")).mesh_layout == Layout(batch=("a", "b"), fsdp="b")
    assert KernelOptions(layout=Layout()).mesh_layout == Layout()
    assert KernelOptions().mesh_layout == ONE_DEVICE
    options = KernelOptions(batch_axes=("a",))
    assert dataclasses.replace(options, batch_axes=None).mesh_layout == ONE_DEVICE


# --- parameters and state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp", ["fsdp", ("data", "fsdp"), ()], ids=str)
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_parameters_and_their_moments_lie_alike(fsdp, scan):
    model = nnx.eval_shape(lambda: make_model(WIDE, scan_layers=scan))
    params, layout = nnx.state(model), Layout(fsdp=fsdp)
    kernel = P(*[None] * scan, fsdp) if fsdp else P()
    expected = [{kernel}, {P(fsdp) if fsdp else P()}, {P(fsdp) if fsdp else P()}]
    assert specs(layout.shardings(model, MESH)) == expected
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    for optimizer in (
        adamw,
        stochastic_rounding(adamw),
        optax.masked(adamw, jax.tree.map(lambda x: x.ndim > 1, params)),
    ):
        state = jax.eval_shape(optimizer.init, params)
        of_params, of_state = layout.shardings((params, state), MESH, optimizer)
        assert specs(of_params) == expected
        found = specs(of_state)
        assert found[:2] == expected[:2] and found[2] <= expected[2]
        assert jax.tree.structure(of_state) == jax.tree.structure(state)
        assert all(s.spec == P() for s, x in zip(*map(jax.tree.leaves, (of_state, state)), strict=True) if x.ndim == 0)


def test_a_vector_that_the_mesh_does_not_divide_is_whole_and_a_matrix_is_refused():
    assert Layout().shardings({"bias": jnp.zeros(3)}, MESH)["bias"].spec == P()
    with pytest.raises(ValueError, match=r"fsdp=2 does not divide axis 0 of q_proj.kernel, whose shape is \(3, 4\)"):
        Layout().shardings({"q_proj": {"kernel": jnp.zeros((3, 4))}}, MESH)
    with pytest.raises(ValueError, match=r"axis 0 of embed_tokens, .* Layout\(tensor=…\) pads a vocabulary"):
        Layout().shardings({"embed_tokens": jnp.zeros((3, 4))}, MESH)


def test_state_of_another_shape_follows_its_parameter_or_is_whole():
    params = {"kernel": jnp.zeros((8, 4)), "square": {"kernel": jnp.zeros((4, 4))}}
    spec_of = lambda tree: jax.tree.map(lambda sharding: sharding.spec, tree)

    def specs(make, other=None):
        init = lambda params: (jax.tree.map(make, params), other)
        optimizer = optax.GradientTransformation(init, lambda *_: (None, None))
        return spec_of(Layout().shardings((params, optimizer.init(params)), MESH, optimizer)[1])

    factors, kept = specs(lambda x: [jnp.zeros(x.shape[:1]), jnp.zeros(x.shape[1:])], jnp.zeros(3))
    assert factors["kernel"] == [P("fsdp"), P(None)] and factors["square"]["kernel"] == [P(), P()] and kept == P()
    for shape, spec in {
        (3, 8, 4): P(None, "fsdp", None),
        (4, 1): P("fsdp", None),
        (3, 4): P(None, None),
        (5,): P(),
    }.items():
        assert specs(lambda x, shape=shape: jnp.zeros(shape))[0]["kernel"] == spec
    for optimizer in (optax.adafactor(1.0, min_dim_size_to_factor=2), optax.sm3(1.0), optax.contrib.muon(1.0)):
        state = optimizer.init(params)
        found = Layout().shardings((params, state), MESH, optimizer)[1]
        assert jax.tree.structure(found) == jax.tree.structure(state)
        for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
            sharding.shard_shape(jnp.shape(x))
    with pytest.warns(UserWarning, match=r"an array of shape \(65536,\) at \[1\], which has no axis of a parameter"):
        specs(jnp.zeros_like, jnp.zeros(65_536))
    with pytest.raises(ValueError, match="is not a parameter of a model.*layout.shardings"):
        Layout().shardings((params, optax.adam(1.0).init(params)), MESH)


def test_a_batch_is_placed_by_its_rows(devices):
    mesh, layout = mesh_of(devices, ("data", "fsdp")), Layout()
    batch = dict(input_ids=jnp.zeros((8, 5)), positions=jnp.zeros((1, 5)), normalizer=3.0)
    with jax.set_mesh(mesh):
        placed = layout.place(batch)
    parts = {name: x.addressable_shards[0].data.shape for name, x in placed.items()}
    assert parts == dict(input_ids=(8 // len(devices), 5), positions=(1, 5), normalizer=())
    with pytest.raises(ValueError, match=f"the batch has 3 rows, which data·fsdp={len(devices)} does not divide"):
        layout.place(jnp.zeros((3, 5)), mesh)
    with pytest.raises(ValueError, match="no mesh is in context"):
        layout.place(batch)


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.full), AxisType.Explicit], ids=str)
def test_parameters_that_two_axes_split_give_one_device_s_loss_and_gradients(axis_type, devices, rng):
    config = dataclasses.replace(WIDE, num_hidden_layers=1)
    tokens = random_tokens(rng, batch=8)

    def value_and_grad(layout):
        graph, params = nnx.split(make_model(config, kernels=KernelOptions(layout=layout)))
        return jax.jit(jax.value_and_grad(lambda p, t: nnx.merge(graph, p)(t, labels=t).loss)), params

    single, params = value_and_grad(None)
    truth, expected = single(params, tokens)
    mesh, layout = mesh_of(devices, ("data", "fsdp"), axis_type), Layout(fsdp=("data", "fsdp"))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, layout.shardings(params, mesh))
        head = params["lm_head"][...]
        assert head.addressable_shards[0].data.size * len(devices) == head.size
        placed = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        value, found = value_and_grad(layout)[0](params, placed)
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(x) - y).max() < 2e-5 * np.abs(y).max(), path


def test_a_kernel_runs_with_all_axes_manual(devices):
    mesh, layout = mesh_of(devices, ("data", "fsdp")), Layout()

    def kernel(x, w):
        assert set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}
        assert (x.shape, w.shape) == ((8 // len(devices), 4), (4, 4))
        return x @ w

    x, w = jnp.arange(32.0).reshape(8, 4), jnp.arange(16.0).reshape(4, 4)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(functools.partial(layout.run, kernel))((x,), (w,)), x @ w)


@pytest.mark.parametrize("manual", [("data",), ("data", "fsdp")], ids=str)
def test_axes_that_are_manual_already_are_left_alone(manual, devices):
    """Each device along them has its own shard, and its own sum."""
    mesh, layout = mesh_of(devices, ("data", "fsdp")), Layout()
    x, w = jnp.arange(32.0).reshape(8, 4), jnp.arange(16.0).reshape(4, 4)
    whole = lambda w: layout.gathered(dict(kernel=w), w.dtype)["kernel"]

    def local(x, w):
        total, y = layout.run_sum(lambda x, w: (jnp.sum(x @ w), x @ w), (x,), (whole(w),))
        return total[None], y

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            local, in_specs=(P(manual), P()), out_specs=P(manual), axis_names={*manual}, check_vma=False
        )
        totals, y = jax.jit(mapped)(x, w)
    np.testing.assert_allclose(y, x @ w)
    parts = len(devices) // 2 * (2 if "fsdp" in manual else 1)
    np.testing.assert_allclose(totals, (x @ w).reshape(parts, -1).sum(axis=1))


WAYS = ("outside", "inside", "inside, of varying parameters")


def gradients_on_parts(loss, axes, way):
    """Value and gradients of loss(parameters, batch), a sum over devices along Manual axes; JAX checks what varies."""

    def inside(parameters, batch):
        if way == WAYS[1]:  # JAX sums the gradients
            value, gradients = jax.value_and_grad(loss)(parameters, batch)
            return jax.lax.psum(value, axes), gradients
        own = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), parameters)
        return jax.lax.psum(jax.value_and_grad(loss)(own, batch), axes)

    on_shards = functools.partial(jax.shard_map, in_specs=(P(), P(axes)), axis_names={*axes})
    if way == WAYS[0]:
        summed = lambda parameters, batch: jax.lax.psum(loss(parameters, batch), axes)
        return jax.jit(jax.value_and_grad(on_shards(summed, out_specs=P())))
    return jax.jit(on_shards(inside, out_specs=(P(), P())))


def assert_same_gradients(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.abs(np.asarray(x) - y).max() < 2e-5 * np.abs(y).max(), path


def skip_what_xla_cannot_sum(mesh, way):
    if way == WAYS[2] and mesh.shape["data"] == 1:
        pytest.skip("XLA compiles no psum over a Manual axis of one device, of an array that other axes split")


@pytest.mark.parametrize("num_devices, way", [*((4, way) for way in WAYS), *((2, way) for way in WAYS[:2])])
def test_gradients_of_what_a_layout_runs_are_right_beside_manual_axes(num_devices, way, devices, rng):
    """What runs with all axes Manual takes what varies over the axes that were, and its results vary over them."""
    mesh, layout = mesh_of(devices[:num_devices], ("data", "fsdp")), Layout()
    skip_what_xla_cannot_sum(mesh, way)
    x, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 4), (6,)))
    parameters = dict(kernel=jnp.asarray(rng.standard_normal((4, 6)), jnp.float32), bias=bias)

    def loss(parameters, x):
        whole = parameters["bias"], parameters["kernel"]
        y = layout.run(lambda x, bias, kernel: jnp.sin(x @ kernel + bias), (x,), whole)
        total, tanh = layout.run_sum(lambda y: (jnp.sum(y * y), jnp.tanh(y)), (y,))
        return total + jnp.sum(tanh)

    y = lambda parameters: jnp.sin(x @ parameters["kernel"] + parameters["bias"])
    expected = jax.value_and_grad(lambda parameters: jnp.sum(y(parameters) ** 2) + jnp.sum(jnp.tanh(y(parameters))))(
        parameters
    )
    with jax.set_mesh(mesh):
        assert_same_gradients(gradients_on_parts(loss, ("data",), way)(parameters, x), expected)


IN_FULL = [(AxisType.Auto, 4, way) for way in WAYS] + [(AxisType.Explicit, 4, way) for way in WAYS[1:]]
IN_FULL += [(axis_type, 2, way) for axis_type in (AxisType.Auto, AxisType.Explicit) for way in WAYS[:2]]


@pytest.mark.parametrize(
    "axis_type, num_devices, way",
    [(AxisType.Explicit, 4, WAYS[0]), *(pytest.param(*case, marks=pytest.mark.full) for case in IN_FULL)],
    ids=str,
)
def test_a_model_s_gradients_are_right_beside_manual_axes(axis_type, num_devices, way, devices, rng):
    """In a user's partly manual jax.shard_map that checks what varies, as it does by default."""
    config, tokens = dataclasses.replace(WIDE, num_hidden_layers=1), random_tokens(rng, batch=8)

    def split_model(layout):
        graph, params = nnx.split(make_model(config, kernels=KernelOptions(layout=layout)))
        return lambda p, t: nnx.merge(graph, p)(t, labels=t, loss_normalizer=float(tokens.size)).loss, params

    loss, params = split_model(None)
    expected = jax.jit(jax.value_and_grad(loss))(params, tokens)
    mesh, layout = mesh_of(devices[:num_devices], ("data", "fsdp"), axis_type), Layout()
    skip_what_xla_cannot_sum(mesh, way)
    with jax.set_mesh(mesh):
        placed = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        found = gradients_on_parts(split_model(layout)[0], ("data",), way)(params, placed)
    assert_same_gradients(found, expected)


def test_a_token_loss_beside_manual_axes_is_refused(devices):
    mesh, model = mesh_of(devices, ("data", "fsdp")), make_model(WIDE, kernels=KernelOptions(layout=Layout()))
    call = lambda t: model.token_loss(lambda log_prob: -log_prob, t, labels=t, denominator=1.0)[0][None]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"token_loss is called inside .* over \('data',\) only"):
        mapped = jax.shard_map(call, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        jax.eval_shape(mapped, jnp.zeros((8, 5), jnp.int32))


def test_the_joined_gradient_of_several_projections_lies_as_their_parameters_do(devices):
    """A gradient that is whole on every device has been summed whole, too."""
    mesh, layout = mesh_of(devices, ("data", "fsdp")), Layout()
    x, first, second = jnp.arange(32.0).reshape(8, 4), jnp.ones((4, 6)), jnp.ones((4, 2))

    def loss(parameters, x):
        whole = layout.gathered(parameters, x.dtype)
        return jnp.sum(jnp.tanh(0.01 * x @ jnp.concatenate([whole[name]["kernel"] for name in whole], axis=1)))

    parameters = dict(q_proj=dict(kernel=first), k_proj=dict(kernel=second))
    expected = jax.grad(lambda kernel: jnp.sum(jnp.tanh(0.01 * x @ kernel)))(jnp.concatenate([first, second], axis=1))
    with jax.set_mesh(mesh):
        placed = jax.device_put((parameters, x), NamedSharding(mesh, P("fsdp")))
        found = jax.jit(jax.grad(loss))(*placed)
    for name, columns in dict(q_proj=slice(6), k_proj=slice(6, 8)).items():
        assert found[name]["kernel"].sharding.spec == P("fsdp")
        np.testing.assert_allclose(found[name]["kernel"], expected[:, columns], rtol=1e-5)


def test_a_model_runs_where_all_axes_are_manual(devices, rng):
    mesh = mesh_of(devices, ("data", "fsdp"))
    graph, params = nnx.split(make_model(WIDE, kernels=KernelOptions(layout=Layout())))
    call = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens).loss[None]
    with jax.set_mesh(mesh):
        axes = P(("data", "fsdp"))
        mapped = jax.shard_map(call, in_specs=(P(), axes), out_specs=axes, check_vma=False)
        assert jax.eval_shape(mapped, params, random_tokens(rng, batch=8)).shape == (len(devices),)


def test_a_batch_of_numbers_alone_is_copied_to_all_devices(devices):
    placed = Layout(fsdp="fsdp").place(dict(temperature=jnp.float32(0.5)), mesh_of(devices, ("data", "fsdp")))
    assert placed["temperature"].sharding.is_fully_replicated
