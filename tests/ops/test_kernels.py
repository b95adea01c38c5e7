"""How every op chooses its kernel, and what it refuses to do on several devices. The cases use rms_norm and geglu."""

import functools
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from liger_jax import fused_linear_cross_entropy, geglu, layer_norm, rms_norm
from liger_jax.ops import _rows, meshes
from liger_jax.ops.kernels import Kernels
from liger_jax.ops.place import Place, device_of
from liger_jax.pallas_kernels.norms import run_mosaic_gpu, run_triton, run_xla
from tests.ops import _oracle

CPU = jax.devices("cpu")[0]
with jax.default_device(CPU):
    X = jnp.ones((8, 16))
NORM_MODULES = {"xla": run_xla, "triton": run_triton, "mosaic_gpu": run_mosaic_gpu}


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(CPU):
        yield


def device_in_context(kind, platform):
    """In this context programs are made for a device of this kind, which need not be there."""
    device = AbstractDevice(kind, 1, platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device))


def kernels_of(function, *arrays):
    """The names of the Pallas kernels that a function traces to."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    return {name for name in ("rms_norm_forward", "glu_forward") if name in str(jaxpr)}


def traced(function, shape=(8, 16)):
    """What a Python function returns for a tracer. That need not be an array."""
    results = []
    jax.eval_shape(lambda x: results.append(function(x)), jax.ShapeDtypeStruct(shape, jnp.float32))
    return results[0]


def chosen(implementation, kind="cpu", platform="cpu", defaults=None):
    """The name of what is chosen among modules that run every case."""
    modules = {name: types.SimpleNamespace(unsupported=lambda *_: None) for name in ("xla", "triton", "mosaic_tpu")}
    kernels = Kernels("op", modules, defaults or {})
    with device_in_context(kind, platform):
        return traced(lambda x: kernels.choose(implementation, x)).name


def mesh_of_all(axis_type):
    devices = jax.devices("cpu")
    assert len(devices) == 4
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=devices)


# The choice by platform.


def test_default_on_cpu_is_xla():
    assert not kernels_of(rms_norm, X)
    assert not kernels_of(rms_norm, jax.ShapeDtypeStruct((8, 16), jnp.float32))


@pytest.mark.parametrize(
    "kind, platform, expected",
    [
        ("NVIDIA H200", "gpu", "triton"),
        ("NVIDIA H200", "cuda", "triton"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "triton"),
        ("NVIDIA RTX 2000 Ada Generation", "gpu", "triton"),
        ("NVIDIA GeForce RTX 4090", "gpu", "triton"),
        ("NVIDIA B200", "gpu", "triton"),
        ("NVIDIA RTX 5000 Ada Generation", "gpu", "triton"),
        ("AMD Instinct MI300X", "rocm", "triton"),
        ("Tesla T4", "gpu", "xla"),
        ("Tesla V100-SXM2-16GB", "gpu", "xla"),
        ("Tesla P100-PCIE-16GB", "gpu", "xla"),
        ("NVIDIA GeForce RTX 2080 Ti", "gpu", "xla"),
        ("NVIDIA GeForce GTX 1080", "gpu", "xla"),
        ("TPU v6 lite", "tpu", "mosaic_tpu"),
        ("cpu", "cpu", "xla"),
    ],
)
def test_default_follows_the_device_that_the_computation_is_for(kind, platform, expected):
    assert chosen(None, kind, platform, defaults={"gpu": ("triton",), "tpu": ("mosaic_tpu",)}) == expected


@pytest.mark.parametrize(
    "kind, shape, dtype, expected",
    [
        ("NVIDIA H200", (4096, 2304), jnp.bfloat16, ("triton", "triton")),
        ("NVIDIA H200", (4096, 2560), jnp.bfloat16, ("triton", "mosaic_gpu")),
        ("NVIDIA H200", (2048, 2560), jnp.bfloat16, ("triton", "triton")),
        ("NVIDIA H200", (8, 5120), jnp.bfloat16, ("triton", "mosaic_gpu")),
        ("NVIDIA H200", (8, 8192), jnp.float16, ("triton", "mosaic_gpu")),
        ("NVIDIA H200", (8, 18432), jnp.bfloat16, ("mosaic_gpu", "mosaic_gpu")),
        ("NVIDIA H200", (8, 18432), jnp.float32, ("triton", "triton")),
        ("NVIDIA H200", (8, 18000), jnp.bfloat16, ("triton", "triton")),
        ("NVIDIA A100-SXM4-80GB", (8, 18432), jnp.bfloat16, ("triton", "triton")),
        ("cpu", (8, 18432), jnp.bfloat16, ("xla", "xla")),
    ],
)
def test_wide_rows_come_by_hoppers_copy_engine(kind, shape, dtype, expected):
    platform = "gpu" if kind.startswith("NVIDIA") else "cpu"
    kernels = Kernels("op", NORM_MODULES, defaults={"gpu": ("triton",)})
    found = []

    def choose(x):
        found.extend(_rows.choose(kernels, None, x, hopper_widths=(9216, 2560)))

    with device_in_context(kind, platform):
        jax.eval_shape(choose, jax.ShapeDtypeStruct(shape, dtype))
    assert tuple(choice.name for choice in found) == expected


@pytest.fixture
def norm_choices(monkeypatch):
    """The names of a norm's implementations, forward and backward, once it was traced."""
    found, choose = [], _rows.choose

    def recorded(*arguments, **options):
        choices = choose(*arguments, **options)
        found.extend(choice.name for choice in choices)
        return choices

    monkeypatch.setattr(_rows, "choose", recorded)
    return found


@pytest.mark.parametrize(
    "kind, expected",
    [("NVIDIA H200", "mosaic_gpu"), ("NVIDIA H100 80GB HBM3", "triton"), ("NVIDIA H100 PCIe", "triton")],
)
def test_rms_norm_s_backward_follows_the_card(kind, expected, norm_choices):
    with device_in_context(kind, "gpu"):
        jax.eval_shape(rms_norm, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    assert norm_choices == ["triton", expected]


@pytest.mark.parametrize(
    "width, dtype, expected",
    [(8192, jnp.bfloat16, "mosaic_gpu"), (8192, jnp.float32, "triton"), (9216, jnp.float32, "mosaic_gpu")],
)
def test_float32_scales_move_layer_norm_s_forward_to_wider_rows(width, dtype, expected, norm_choices):
    row, scale = (jax.ShapeDtypeStruct(*x) for x in (((4096, width), jnp.bfloat16), ((width,), dtype)))
    with device_in_context("NVIDIA H200", "gpu"):
        jax.eval_shape(layer_norm, row, scale)
    assert norm_choices == [expected, "mosaic_gpu"]


def test_named_kernel_serves_both_directions():
    choices = _rows.choose(Kernels("op", NORM_MODULES), "triton:interpret", X, hopper_widths=(0, 0))
    assert [choice.name for choice in choices] == ["triton:interpret"] * 2


def test_gpu_older_than_ampere_says_why_not_triton():
    with device_in_context("Tesla T4", "gpu"):
        assert not kernels_of(rms_norm, jax.ShapeDtypeStruct((8, 16), jnp.float32))
        message = r"needs compute capability 8\.0 \(Ampere\) or newer, and this is a Tesla T4; use 'xla'\."
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(rms_norm, implementation="triton"), jax.ShapeDtypeStruct((8, 16), "f4"))


@pytest.mark.parametrize(
    "told, runs",
    [("7.5", ["xla"]), ("8.6", ["triton"]), ("9.0", ["triton", "mosaic_gpu"]), ("10.0", ["triton"])],
)
def test_a_gpu_that_is_there_is_known_by_what_it_tells_and_not_by_its_name(told, runs, monkeypatch):
    gpu = types.SimpleNamespace(device_kind="NVIDIA H2000", platform="gpu", compute_capability=told)
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    monkeypatch.setattr(type(jax.config), "jax_platforms", "cuda,cpu")
    kernels = Kernels("op", NORM_MODULES, defaults={"gpu": ("triton",)})
    place = Place(AbstractDevice(gpu.device_kind, None, "gpu"))
    assert kernels.choose(None, X, place=place).name == runs[0]
    if "mosaic_gpu" not in runs:
        with pytest.raises(ValueError, match="its instructions are Hopper's .wgmma, .*, and a NVIDIA H2000 has none"):
            kernels.choose("mosaic_gpu", X, place=place)
    assert place.is_hopper == ("mosaic_gpu" in runs)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB300", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA RTX 5000 Ada Generation", (8, 9)),
        ("NVIDIA RTX 4500 Ada Generation", (8, 0)),
        ("Quadro RTX 5000", (7, 5)),
    ],
)
def test_a_gpu_that_is_not_there_is_known_by_its_name(kind, expected):
    assert Place(AbstractDevice(kind, None, "gpu")).capability == expected


def test_named_kernel_is_the_one_that_runs():
    for name in ("triton:interpret", "mosaic_tpu:interpret"):
        assert kernels_of(functools.partial(rms_norm, implementation=name), X) == {"rms_norm_forward"}
    assert not kernels_of(functools.partial(rms_norm, implementation="xla"), X)


def test_concrete_input_says_where_the_computation_runs():
    with device_in_context("TPU v6 lite", "tpu"):
        assert device_of(X).platform == "cpu"
        assert traced(lambda x: device_of(None, x)).platform == "tpu"


def test_mesh_of_an_input_comes_before_the_mesh_in_context():
    device = AbstractDevice("Tesla T4", 1, "gpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Explicit,), abstract_device=device)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = []
    with device_in_context("TPU v6 lite", "tpu"):
        jax.eval_shape(lambda x: found.append(device_of(x)), x)
    assert found[0].device_kind == "Tesla T4"


# The kernel that is chosen.


@pytest.mark.parametrize("name", ["xla", "triton:interpret", "mosaic_gpu"])
def test_equal_choices_and_options_are_one_static_argument(name):
    """Then jit compiles a kernel once for all layers of a model."""
    traces, module = [], types.SimpleNamespace(forward=lambda x, *, eps: x + eps)

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, kernel):
        traces.append(kernel)
        return x

    for eps in (1e-6, 1e-5, 1e-6):
        run(X, Kernels("op", {name.partition(":")[0]: module}).named(name).kernel("forward", eps=eps))
    assert len(traces) == 2


def test_only_pallas_kernels_are_guarded_against_a_second_derivative():
    def second_derivative(name):
        module = types.SimpleNamespace(forward=lambda x, interpret=False: jnp.sin(x))
        kernel = Kernels("op", {name.partition(":")[0]: module}).named(name).kernel("forward")
        return jax.grad(lambda x: kernel.run(*kernel.guarded(x)))(1.0)

    assert second_derivative("xla") == second_derivative("splash:interpret") == jnp.cos(1.0)
    with pytest.raises(TypeError, match=r"^op is differentiated twice, .*; for second ones pass implementation='xla'"):
        second_derivative("triton:interpret")


# Names, and tuples of names.


@pytest.mark.parametrize("name", ["tritn", "triton:interpet", "xla:interpret", "mosaic_cpu", ""])
def test_unknown_name_lists_the_known_ones(name):
    message = (
        rf"^rms_norm: implementation='{name}' is unknown; this op has \('xla', 'triton', 'mosaic_gpu', 'mosaic_tpu', "
        r"'triton:interpret', 'mosaic_gpu:interpret', 'mosaic_tpu:interpret'\)\. Pass one of these, or None for the def"
    )
    with pytest.raises(ValueError, match=message):
        rms_norm(X, implementation=name)


def test_kernel_that_an_op_does_not_have_is_unknown():
    with pytest.raises(ValueError, match=r"^geglu: implementation='mosaic_tpu' is unknown; this op has \('xla', 'tri"):
        geglu(X, X, implementation="mosaic_tpu")


def test_tuple_may_name_kernels_that_only_other_ops_have():
    """A model hands one tuple to all of its ops."""
    with pytest.warns(UserWarning, match=r"geglu: stepping down from 'mosaic_tpu': this op has \('xla', 'triton', "):
        assert geglu(X, X, implementation=("mosaic_tpu", "xla")).shape == X.shape
    with pytest.raises(
        ValueError, match=r"geglu cannot run here with .* 'mosaic_tpu': this op has \('xla', 'triton', "
    ):
        with pytest.warns(UserWarning, match="stepping down from 'mosaic_gpu'"):
            geglu(X, X, implementation=("mosaic_gpu", "mosaic_tpu"))


def test_unknown_name_in_a_tuple_is_an_error_even_behind_one_that_runs():
    with pytest.raises(ValueError, match="implementation='tritn' is unknown"):
        rms_norm(X, implementation=("xla", "tritn"))


@pytest.mark.parametrize("wrong", [(), 3, ["xla"], ("xla", None)], ids=str)
def test_implementation_of_a_wrong_type_says_what_to_pass(wrong, unchecked_types):
    with pytest.raises(TypeError, match=r"^rms_norm: implementation must be None, a name or a tuple of names, got"):
        rms_norm(X, implementation=wrong)


@pytest.mark.parametrize("name, platform", [("triton", "gpu"), ("mosaic_tpu", "tpu")])
def test_kernel_for_another_platform_is_refused_with_the_cure(name, platform):
    message = f"^op cannot run here with implementation='{name}'.*compiled for {platform} only, and this computation is"
    with pytest.raises(ValueError, match=f"{message} for cpu; use 'xla', or '{name}:interpret' to debug"):
        chosen(name)


def test_interpreter_that_this_jax_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    types = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    loss = functools.partial(fused_linear_cross_entropy, labels=jnp.zeros(128, jnp.int32))
    with pytest.raises(ValueError, match="JAX interprets Mosaic GPU kernels since 0.12, and this is .*; use a newer"):
        jax.eval_shape(functools.partial(loss, implementation="mosaic_gpu:interpret"), *types)


def test_tuple_takes_the_first_that_runs_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(("triton:interpret", "xla")) == "triton:interpret"


def test_tuple_steps_down_with_a_warning_at_each_step():
    with pytest.warns(UserWarning) as caught:
        assert chosen(("triton", "mosaic_tpu", "xla")) == "xla"
    assert [str(w.message) for w in caught] == [
        f"op: stepping down from '{name}': it is compiled for {platform} only, and this computation is for cpu; "
        f"use 'xla', or '{name}:interpret' to debug."
        for name, platform in (("triton", "gpu"), ("mosaic_tpu", "tpu"))
    ]


def test_tuple_of_which_none_runs_gives_every_reason():
    with pytest.warns(UserWarning, match="stepping down from 'triton'"):
        with pytest.raises(ValueError, match=r"'triton': it is compiled for gpu.*'mosaic_tpu': it is compiled for"):
            chosen(("triton", "mosaic_tpu"))


def test_default_steps_down_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(None, "Tesla T4", "gpu", defaults={"gpu": ("triton",)}) == "xla"
        # The exact GELU has no Triton kernel; no error, though nothing could be lowered here.
        with device_in_context("NVIDIA H200", "gpu"):
            spec = jax.ShapeDtypeStruct((8, 16), jnp.float32)
            assert not kernels_of(functools.partial(geglu, approximate=False), spec, spec)


def test_interpret_is_part_of_what_jit_caches():
    traces = []

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(x, implementation):
        traces.append(implementation)
        return rms_norm(x, implementation=implementation)

    names = ("xla", "triton:interpret", "mosaic_tpu:interpret")
    for name in names * 2:
        run(X, name)
    assert traces == list(names)
    text = {name: run.lower(X, name).as_text() for name in names}
    assert len(set(text.values())) == 3


def test_interpreted_kernels_run_inside_a_function_compiled_without_naming_them():
    y = jax.jit(lambda x: rms_norm(x, implementation="triton:interpret"))(X)
    assert jnp.allclose(y, 1.0, atol=1e-5)


# Several devices.

both_axis_types = pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
pallas = pytest.mark.parametrize("name", ["triton:interpret", "mosaic_tpu:interpret"])


@pallas
@pytest.mark.parametrize(
    "axis_type, spec, message",
    [
        (
            AxisType.Auto,
            PartitionSpec("data"),
            r"'data',\); call it inside jax\.shard_map, which makes every axis Manual",
        ),
        (
            AxisType.Explicit,
            PartitionSpec(None, "data"),
            r"x is .* over \('data',\), but each device must have whole rows",
        ),
    ],
    ids=["Auto", "Explicit, and rows are split"],
)
def test_pallas_kernel_is_refused_at_trace_time_on_a_mesh_of_several_devices(axis_type, spec, message, name):
    mesh = mesh_of_all(axis_type)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(rms_norm, implementation=name), x)


@pallas
@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_pallas_kernel_is_refused_at_lowering_where_no_mesh_was_seen_before(wrap, name):
    other = jax.device_put(X, NamedSharding(mesh_of_all(AxisType.Auto), PartitionSpec("data")))
    loss = wrap(lambda x: rms_norm(x, implementation=name).sum())
    program = jax.jit(lambda other: (loss(jnp.ones((8, 16))), other)).trace(other)
    message = r"^rms_norm would be partitioned over 4 devices by the compiler.*Wrap the call in jax\.shard_map over the"
    with pytest.raises(ValueError, match=message):
        program.lower()


@pallas
def test_pallas_kernel_is_refused_outside_of_jit_on_a_sharded_array(name):
    x = jax.device_put(X, NamedSharding(mesh_of_all(AxisType.Auto), PartitionSpec("data")))
    with pytest.raises(ValueError, match="jax.shard_map"):
        rms_norm(x, implementation=name)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_guard_is_silent_inside_shard_map_and_on_one_device(wrap):
    guard = functools.partial(meshes.opaque, op="op", second_derivatives="")
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        mesh = mesh_of_all(axis_type)
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        specs: dict[str, Any] = dict(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
        for check_vma in (True, False):
            assert jnp.array_equal(wrap(jax.shard_map(guard, **specs, check_vma=check_vma))(x), X)
    assert jnp.array_equal(wrap(guard)(X), X)
    assert jnp.array_equal(wrap(jax.vmap(guard))(X), X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@both_axis_types
def test_guard_raises_on_several_devices(axis_type, wrap):
    x = jax.device_put(X, NamedSharding(mesh_of_all(axis_type), PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"^op would be partitioned over 4 devices by the compiler, which gathers its"):
        wrap(functools.partial(meshes.opaque, op="op", second_derivatives=""))(x)


def test_guard_raises_where_shard_map_leaves_an_axis_to_the_compiler():
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    guard = functools.partial(meshes.opaque, op="op", second_derivatives="")
    partly = jax.shard_map(
        guard, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), axis_names={"data"}
    )
    with pytest.raises(ValueError, match="^op would be partitioned over 2 devices"):
        jax.jit(partly)(X)


def test_xla_needs_no_shard_map():
    x = jax.device_put(X, NamedSharding(mesh_of_all(AxisType.Auto), PartitionSpec("data")))
    run = jax.jit(functools.partial(rms_norm, implementation="xla"))
    assert run(x).sharding.is_equivalent_to(x.sharding, 2)
    assert not _oracle.collectives(run.lower(x))


def test_replicated_arrays_meet_sharded_ones_and_their_gradients_are_summed():
    mesh = mesh_of_all(AxisType.Auto)
    specs = (PartitionSpec("data"), PartitionSpec())

    def local(x, w):
        aligned_x, aligned_w, absent = meshes.align_varying(x, w, None)
        assert absent is None
        varying = [jax.typeof(aligned).manual_axis_type.varying for aligned in (aligned_x, aligned_w)]
        assert varying == [{"data"}, {"data"}]
        return aligned_x * aligned_w

    product = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    x = jnp.arange(8.0)
    dw = jax.jit(jax.grad(lambda w: product(x, w).sum()))(jnp.ones(1))
    assert float(dw[0]) == 28.0
