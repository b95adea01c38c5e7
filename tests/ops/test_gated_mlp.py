"""What gated_mlp promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import ops
from liger_jax.ops import gated_mlp
from liger_jax.pallas_kernels import _hopper_product
from liger_jax.pallas_kernels import hopper as hopper_kernels
from liger_jax.pallas_kernels.gated_mlp import config, mosaic_gpu
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import glu as reference

KERNELS = ("xla", "triton")
OPS = {"silu": ops.swiglu, "gelu_tanh": ops.geglu, "gelu": functools.partial(ops.geglu, approximate=False)}
INPUTS = ("x", "gate_kernel", "up_kernel", "down_kernel")

activations = pytest.mark.parametrize("activation", OPS)
keeping = pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])


def make(activation, implementation, recomputed=False):
    if activation == "gelu" and (implementation or "").startswith("triton"):
        pytest.skip("no Triton kernel: tests/ops/test_glu.py")
    return functools.partial(gated_mlp, activation=activation, implementation=implementation, recomputed=recomputed)


def draw(rng, *batch, d=11, f=37, dtype=jnp.float32):
    x, *kernels = normal(rng, (*batch, d), (d, f), (d, f), (f, d), dtype=dtype)
    return [x, *(kernel * jnp.asarray(0.3, dtype) for kernel in kernels)]


def composed(x, gate_kernel, up_kernel, down_kernel, *, gated):
    return gated(x @ gate_kernel, x @ up_kernel) @ down_kernel


@activations
@pytest.mark.parametrize("batch", _oracle.first(2, [(3, 5), (), (130,)]), ids=str)
def test_every_shape_matches_float64(batch, activation, implementation, rng):
    gated = functools.partial(reference.gated, activation=activation)
    oracle = functools.partial(composed, gated=gated)
    _oracle.check_float32(make(activation, implementation), oracle, draw(rng, *batch), rng)


def test_gates_made_again_in_unequal_halves_match_float64(implementation, rng, monkeypatch):
    monkeypatch.setattr(config, "LEAST_TILES", 1)
    oracle = functools.partial(composed, gated=functools.partial(reference.gated, activation="silu"))
    arrays = draw(rng, 3, 5, f=200)
    _oracle.check_float32(make("silu", implementation, recomputed=True), oracle, arrays, rng)


@activations
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_products_around_the_op(dtype, activation, implementation, rng):
    plain = functools.partial(composed, gated=functools.partial(OPS[activation], implementation="xla"))
    oracle = functools.partial(composed, gated=functools.partial(reference.gated, activation=activation))
    _oracle.check_half(make(activation, implementation), plain, oracle, draw(rng, 60, d=64, dtype=dtype), rng)


def test_hopper_rounds_the_sum_of_both_products_once(hopper, rng):
    """Where they cancel, the rounding of each would be larger than what is left."""
    dgate, small, kernel = normal(rng, (3, 56, 192), (3, 56, 192), (128, 192), dtype=jnp.bfloat16)
    dup = (small * jnp.bfloat16(2**-7) - dgate).astype(jnp.bfloat16)
    with hopper_kernels.interpreter(hopper != "mosaic_gpu"):
        dx = mosaic_gpu.input_gradient(dgate, dup, kernel, kernel, precision=None)
    dgate, dup, kernel, dx = (np.asarray(array, np.float64) for array in (dgate, dup, kernel, dx))
    exact = (dgate + dup) @ kernel.T
    assert dx.shape == (3, 56, 128)
    assert np.max(np.abs(dx - exact)) < 2**-7 * np.max(np.abs(exact))


@pytest.mark.parametrize(
    "dtype, activation, recomputed",
    _oracle.half(
        {name: name for name in ("bfloat16", "float16")},
        {name: name for name in ("silu", "gelu_tanh")},
        {"kept": False, "recomputed": True},
    ),
)
def test_hopper_is_no_worse_than_products_around_the_op(dtype, activation, recomputed, hopper, rng, monkeypatch):
    """Ragged in rows and columns; simulated, two cores walk over three tiles each, and use their memory again."""
    if hopper != "mosaic_gpu":
        monkeypatch.setattr(_hopper_product, "NUM_CORES", 2)
    monkeypatch.setattr(config, "LEAST_TILES", 1)
    plain = functools.partial(composed, gated=functools.partial(OPS[activation], implementation="xla"))
    oracle = functools.partial(composed, gated=functools.partial(reference.gated, activation=activation))
    arrays = draw(rng, 2, 148, d=192, f=192, dtype=dtype)
    _oracle.check_half(make(activation, hopper, recomputed), plain, oracle, arrays, rng)


@keeping
@pytest.mark.parametrize("sizes", _oracle.first(1, [(2048, 8192), (896, 4864), (4096, 14336)]), ids=str)
def test_hopper_at_models_sizes(sizes, recomputed, hardware, hopper, rng):
    d, f = sizes
    plain = functools.partial(gated_mlp, implementation="xla")
    oracle = functools.partial(composed, gated=functools.partial(reference.gated, activation="silu"))
    assert config.is_large(8000, f // 2)
    _oracle.check_half(make("silu", None, recomputed), plain, oracle, draw(rng, 8000, d=d, f=f, dtype="bfloat16"), rng)


@keeping
@pytest.mark.parametrize("loop", ["vmap", "map"])
def test_hopper_maps_over_a_batch(loop, recomputed, hopper, rng):
    """Each element has its own result, up to the order of sums that are rounded to bfloat16."""
    op, batch = make("silu", hopper, recomputed), 3
    xs, *kernels = draw(rng, batch, 72, d=64, f=64, dtype="bfloat16")
    (dy,) = normal(rng, xs.shape, dtype="bfloat16")

    def run(function):
        y, pullback = jax.vjp(function, xs, *kernels)
        return [y, *pullback(dy)]

    def over(xs, *kernels):
        one = functools.partial(lambda kernels, x: op(x, *kernels), kernels)
        return jax.vmap(one)(xs) if loop == "vmap" else jax.lax.map(one, xs)

    mapped = jax.jit(lambda: run(over))()
    alone = jax.jit(lambda: run(lambda xs, *kernels: jnp.stack([op(x, *kernels) for x in xs])))()
    for found, expected in zip(mapped, alone, strict=True):
        assert _oracle.largest_error(found, expected) <= 2**-7


def test_x_and_both_gates_or_x_alone_are_kept_beside_the_kernels(implementation, rng):
    arrays = draw(rng, 37)
    gates = normal(rng, (37, 37), (37, 37))
    _oracle.check_residuals(make("silu", implementation), arrays, kept=[*arrays, *gates, jnp.zeros(4)])
    _oracle.check_residuals(make("silu", implementation, recomputed=True), arrays, kept=[*arrays, jnp.zeros(4)])


@keeping
@pytest.mark.parametrize(
    "wrt, products",
    [("x", 3), ("gate_kernel", 2), ("up_kernel", 2), ("down_kernel", 1), ("x gate_kernel", 4), (" ".join(INPUTS), 6)],
)
def test_what_is_frozen_takes_no_products(wrt, products, recomputed, implementation, rng):
    """Counts the backward's products. All gradients but down_kernel's need the gradient of the gated product."""
    arrays = dict(zip(INPUTS, draw(rng, 37), strict=True))
    op = make("silu", implementation, recomputed)
    if recomputed:  # gate and up again; for up_kernel's gradient alone XLA does not need up, and drops it
        products += 1 if (wrt, implementation) == ("up_kernel", "xla") else 2
    gradients_of = lambda op: jax.jit(jax.grad(lambda chosen: (op(**(arrays | chosen)) ** 2).sum()))
    chosen = {name: arrays[name] for name in wrt.split()}
    gradients = gradients_of(op).lower(chosen)
    assert gradients.as_text().count("stablehlo.dot_general") == 3 + products
    found = gradients.compile()(chosen)
    expected = gradients_of(functools.partial(composed, gated=OPS["silu"]))(chosen)
    for name in chosen:
        assert _oracle.largest_error(found[name], expected[name]) <= _oracle.TOLERANCE


def test_nothing_depends_on_a_value_that_is_not_used(implementation, rng):
    op = make("silu", implementation)
    arrays = draw(rng, 5)
    gradients = jax.grad(lambda *arrays: (op(*arrays), arrays[0].sum())[1], argnums=(0, 1))(*arrays)
    assert jnp.all(gradients[0] == 1) and not gradients[1].any()


@pytest.mark.parametrize("shared", [(1, 2, 3), ()], ids=["kernels shared", "all mapped"])
def test_vmap(shared, implementation, rng):
    _oracle.check_vmap(make("silu", implementation), draw(rng, 5), rng, shared=shared)


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make("gelu_tanh", implementation), draw(rng, 37), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make("silu", implementation), draw(rng, 37), rng)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, implementation, rng):
    _oracle.check_shard_map(make("silu", implementation), draw(rng, 8, 5), rng, implementation, check_vma)


def test_precision_of_the_call_holds_in_the_backward(rng):
    arrays = draw(rng, 5)
    with jax.default_matmul_precision("default"):

        def loss(*arrays):
            with jax.default_matmul_precision("highest"):
                return gated_mlp(*arrays).sum()

        text = jax.jit(jax.grad(loss, argnums=range(4))).lower(*arrays).as_text()
    assert len(re.findall("dot_general.*precision = .HIGHEST, HIGHEST", text)) == text.count("stablehlo.dot_general")


@pytest.mark.parametrize(
    "n, d, f, options, forward, backward",
    [
        (2048, 2048, 8192, {}, "mosaic_gpu", "mosaic_gpu"),
        (2048, 2048, 8192, dict(activation="gelu_tanh"), "mosaic_gpu", "mosaic_gpu"),
        (2048, 2048, 8192, dict(activation="gelu"), "xla", "xla"),
        (4096, 2048, 8192, dict(recomputed=True), "mosaic_gpu", "mosaic_gpu"),
        (2048, 2048, 8192, dict(recomputed=True), "mosaic_gpu", "triton"),
        (4096, 4096, 8192, dict(recomputed=True, activation="gelu_tanh"), "triton", "mosaic_gpu"),
        (2048, 4096, 8192, {}, "xla", "mosaic_gpu"),
        (1920, 2048, 8192, {}, "xla", "triton"),
        (2052, 2048, 8192, {}, "xla", "triton"),
        (2052, 2048, 8192, dict(activation="gelu_tanh"), "triton", "triton"),
    ],
)
def test_defaults_on_hopper(n, d, f, options, forward, backward):
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((n, d), (d, f), (d, f), (f, d))]
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)):
        run = lambda *arrays: jax.vjp(functools.partial(gated_mlp, **options), *arrays)
        program = str(jax.make_jaxpr(run)(*arrays))
        pullback, y = jax.eval_shape(lambda *arrays: run(*arrays)[::-1], *arrays)
        backward_program = str(jax.make_jaxpr(lambda pullback, dy: pullback(dy))(pullback, y))
    # Whole words: a kernel of either kind is under a jit named "gated_mlp_" and then the function's name.
    found = lambda kinds, text: {kind for name, kind in kinds.items() if re.search(rf"\b{name}\b", text)}
    assert found({"gated_mlp_up": "mosaic_gpu", "glu_forward": "triton"}, program) == {forward} - {"xla"}
    kinds = {"gated_mlp_gradients": "mosaic_gpu", "glu_gradients_and_product": "triton"}
    assert found(kinds, backward_program) == {backward} - {"xla"}


@pytest.mark.parametrize(
    "shapes, dtype, activation, why",
    [
        (((72, 64), (64, 64)), "float32", "silu", "x is float32"),
        (((72, 72), (72, 64)), "bfloat16", "silu", r"up_kernel is \(72, 64\)"),
        (((72, 64), (64, 72)), "bfloat16", "silu", r"up_kernel is \(64, 72\)"),
        (((2, 35, 64), (64, 64)), "bfloat16", "silu", "x has 70"),
        (((72, 64), (64, 64)), "bfloat16", "gelu", "no error function"),
        (((2, 36, 64), (64, 192)), "bfloat16", "silu", None),
    ],
)
def test_hopper_says_what_it_does_not_take(shapes, dtype, activation, why):
    found = mosaic_gpu.unsupported(*(jnp.zeros(shape, dtype) for shape in shapes), activation=activation)
    assert found is None if why is None else re.search(why, str(found))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(activation="relu"), ValueError, r"activation='relu' is unknown; pass one of \('silu', "),
        (dict(x=jnp.ones((2, 3), int)), TypeError, "x has dtype int32, but must be floating point; "),
        (dict(x=jnp.ones((2, 4))), ValueError, r"x has shape \(2, 4\) and gate_kernel \(3, 5\), .* transpose it if"),
        (dict(up_kernel=jnp.ones((3, 4))), ValueError, r"up_kernel has shape \(3, 4\), but must have shape \(3, 5\)"),
        (dict(down_kernel=jnp.ones((3, 5))), ValueError, r"down_kernel has shape \(3, 5\), .* shape \(5, 3\)"),
        (
            dict(up_kernel=jnp.ones((3, 5), "bfloat16")),
            ValueError,
            r"up_kernel has dtype bfloat16 and x float32, .*cast",
        ),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_say_what_to_do(change, error, message, unchecked_types):
    arrays = dict(zip(INPUTS, map(jnp.ones, [(2, 3), (3, 5), (3, 5), (5, 3)]), strict=True))
    with pytest.raises(error, match=f"^gated_mlp: {message}"):
        gated_mlp(**(arrays | change))
