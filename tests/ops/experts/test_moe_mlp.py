"""What moe_mlp promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import moe_mlp
from liger_jax.ops.experts.grouped_matmul import KERNELS as GROUPED
from liger_jax.ops.experts.moe_mlp import ACTIVATIONS, EXPERT_GATE_UP
from liger_jax.pallas_kernels.grouped_matmul import mosaic_gpu_block
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import grouped_matmul as reference

KERNELS = ("xla",)
INPUTS = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")
N, D, F, E, K = 21, 11, 7, 5, 2


def draw(rng, n=N, d=D, f=F, num_experts=E, k=K, dtype=jnp.float32):
    shapes = (n, d), (n, k), (num_experts, d, 2 * f), (num_experts, f, d), (num_experts, 2 * f), (num_experts, d)
    arrays = normal(rng, *shapes, dtype=dtype)
    arrays[1] = jax.nn.softmax(arrays[1], axis=-1)
    arrays[2:4] = (w * jnp.asarray(w.shape[1] ** -0.5, dtype) for w in arrays[2:4])
    return arrays


def choose(rng, n=N, num_experts=E, k=K):
    """Experts (n, k), different ones for each token."""
    return jnp.asarray(rng.permuted(np.tile(np.arange(num_experts), (n, 1)), axis=1)[:, :k], jnp.int32)


def make(experts, implementation=None, activation="silu"):
    def op(x, weights, gate_up, down, gate_up_bias=None, down_bias=None):
        return moe_mlp(
            x, weights, experts, gate_up, down,
            gate_up_bias=gate_up_bias, down_bias=down_bias, activation=activation, implementation=implementation,
        )  # fmt: skip

    return op


def truth(experts, activation="silu"):
    return functools.partial(reference.moe_mlp, experts=experts, activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_matches_float64(activation, implementation, rng):
    experts = choose(rng)
    op, arrays = make(experts, implementation, activation), draw(rng)
    if activation == "clamped_swiglu":  # so that some of either side are clamped
        arrays[4] = 8 * arrays[4]
    _oracle.check_float32(op, truth(experts, activation), arrays, rng)


@pytest.mark.parametrize("num_experts, k", [(16, 3), *(pytest.param(n, n, marks=pytest.mark.full) for n in (1, 5))])
def test_any_number_of_experts_without_biases_matches_float64(num_experts, k, implementation, rng):
    experts = choose(rng, num_experts=num_experts, k=k)
    arrays = draw(rng, num_experts=num_experts, k=k)[:4]
    _oracle.check_float32(make(experts, implementation), truth(experts), arrays, rng)


@pytest.mark.parametrize(
    "experts", _oracle.first(1, [[[2, 2]] * N, [[0, 4]] * N]), ids=["one expert twice", "two for all"]
)
def test_experts_that_nobody_chooses_have_zero_gradients(experts, implementation, rng):
    experts, arrays = jnp.asarray(experts), draw(rng)
    _oracle.check_float32(make(experts, implementation), truth(experts), arrays, rng)
    gradients = _oracle.value_and_gradients(make(experts, implementation), arrays, jnp.ones((N, D)))[3:]
    unused = sorted({*range(E)} - {*np.unique(experts)})
    assert all(not gradient[jnp.array(unused)].any() for gradient in gradients)


@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_a_loop_over_experts(dtype, implementation, rng):
    """As transformers' eager path: each expert's tokens, its output rounded, weighed and added."""
    experts = choose(rng, 60)

    def plain(x, weights, gate_up, down, gate_up_bias, down_bias):
        y = jnp.zeros_like(x)
        for e in range(E):
            token, place = np.nonzero(np.asarray(experts) == e)
            gate, up = jnp.split(x[token] @ gate_up[e] + gate_up_bias[e][None], 2, axis=1)
            out = (jax.nn.silu(gate) * up) @ down[e] + down_bias[e][None]
            y = y.at[token].add(out * weights[token, place][:, None])
        return y

    arrays = draw(rng, 60, d=64, f=64, dtype=dtype)
    _oracle.check_half(make(experts, implementation), plain, truth(experts), arrays, rng)


@pytest.mark.parametrize("wrong", _oracle.first(1, [E, -1, 2**31 - 1]))
def test_an_expert_that_does_not_exist_is_nan_for_that_token_alone(wrong, implementation, rng):
    experts, arrays = choose(rng), draw(rng)
    arrays[0] = arrays[0].at[4].set(jnp.inf)  # what the wrong token holds reaches nothing
    cotangent = normal(rng, (N, D))[0].at[4].set(jnp.nan)
    op = make(experts.at[4, 1].set(wrong), implementation)
    y, dx, dweights, *others = _oracle.value_and_gradients(op, arrays, cotangent)
    rows = np.delete(np.arange(N), 4)
    assert all(jnp.isnan(found[4]).all() for found in (y, dx, dweights))
    right = make(experts[rows], implementation)
    expected = _oracle.value_and_gradients(right, [*(a[rows] for a in arrays[:2]), *arrays[2:]], cotangent[rows])
    _oracle.assert_same([y[rows], dx[rows], dweights[rows], *others], expected)


def test_weights_that_are_nan_are_nan_for_that_token_alone(implementation, rng):
    arrays = draw(rng)
    arrays[1] = arrays[1].at[4, 0].set(jnp.nan)
    y = make(choose(rng), implementation)(*arrays)
    assert jnp.isnan(y).all(axis=1).nonzero()[0].tolist() == [4] and not jnp.isnan(jnp.delete(y, 4, axis=0)).any()


def test_two_runs_are_alike_to_the_bit(implementation, rng):
    experts, arrays, cotangent = choose(rng), draw(rng), normal(rng, (N, D))[0]
    run = jax.jit(lambda *arrays: _oracle.value_and_gradients(make(experts, implementation), arrays, cotangent))
    one, other = (run(*arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    program = str(jax.make_jaxpr(lambda *a: _oracle.value_and_gradients(make(experts, "xla"), a, cotangent))(*arrays))
    assert "scatter-add" not in program and "scatter_add" not in program


def test_gate_and_up_and_the_order_are_kept(implementation, rng):
    arrays, experts = draw(rng), choose(rng)
    gate_and_up, order = jnp.zeros((N * K, 2 * F)), jnp.zeros((4, N * K), jnp.int32)
    kept = [*arrays, gate_and_up, order, jnp.zeros(N + E + 6)]
    _oracle.check_residuals(make(experts, implementation), arrays, kept=kept)


@pytest.mark.parametrize("is_kept, products", [(False, 1), (True, 0)], ids=["full", "kept by name"])
def test_remat_makes_gate_and_up_again_unless_their_name_is_kept(is_kept, products, rng):
    arrays = draw(rng)
    names = (EXPERT_GATE_UP,) if is_kept else ()
    op = jax.checkpoint(make(choose(rng), "xla"), policy=jax.checkpoint_policies.save_only_these_names(*names))
    run = jax.jit(jax.grad(lambda *arrays: (op(*arrays[:4]) ** 2).sum(), argnums=range(4)))
    assert products_of(run, *arrays) == 2 + 4 + products


@pytest.mark.parametrize("wrt, products", [("x", 2), ("weights", 1), ("gate_up", 2), ("down", 1), ("gate_up_bias", 1)])
def test_what_is_frozen_takes_no_products(wrt, products, rng):
    arrays = draw(rng)
    arrays = dict(zip(INPUTS, arrays, strict=True))
    op = make(choose(rng), "xla")
    run = jax.jit(jax.grad(lambda own: (op(**(arrays | {wrt: own})) ** 2).sum()))
    assert products_of(run, arrays[wrt]) == 2 + products


def products_of(run, *arrays) -> int:
    """Loops over visits, each of which has one product."""
    return sum(
        eqn.primitive.name == "while" and "dot_general" in str(eqn) for eqn in equations(run.trace(*arrays).jaxpr)
    )


def equations(jaxpr):
    """All equations of a program, those of its parts too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns"):
                yield from equations(part)


def test_vmap(implementation, rng):
    experts = choose(rng)
    _oracle.check_vmap(make(experts, implementation), draw(rng), rng, shared=(2, 3, 4, 5))


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make(choose(rng), implementation), draw(rng), rng, implementation)


def test_scan(implementation, rng):
    _oracle.check_scan(make(choose(rng), implementation), draw(rng), rng)


@pytest.mark.parametrize("check_vma", _oracle.first(1, [True, False]))
def test_shard_map(check_vma, implementation, rng):
    experts, arrays = choose(rng, 8), draw(rng, 8)

    def op(*arrays):  # experts as a number to split, which has no gradient
        x, weights, gate_up, down, numbers = arrays
        return make(numbers.astype(jnp.int32), implementation)(x, weights, gate_up, down)

    arrays = [*arrays[:4], experts.astype(jnp.float32)]
    _oracle.check_shard_map(op, arrays, rng, implementation, check_vma, wrt=range(4), split=(0, 1, 4))


GOOD = dict(x=(4, 2), weights=(4, 2), gate_up=(3, 2, 10), down=(3, 5, 2))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(activation="relu"), ValueError, "activation='relu' is unknown"),
        (dict(x=jnp.ones((4, 2), int)), TypeError, "x has dtype int32"),
        (dict(experts=jnp.ones((4, 2))), TypeError, "experts has dtype float32, but must be of integers"),
        (dict(x=jnp.ones((4, 3))), ValueError, r"x has shape \(4, 3\) and gate_up \(3, 2, 10\)"),
        (dict(down=jnp.ones((3, 4, 2))), ValueError, r"down has shape \(3, 4, 2\).*\(E, F, D\)"),
        (dict(gate_up_bias=jnp.ones((3, 5))), ValueError, r"gate_up_bias has shape .*\(E, 2F\)"),
        (dict(down_bias=jnp.ones((3, 5))), ValueError, r"down_bias has shape .*\(E, D\)"),
        (dict(experts=jnp.ones((3, 2), int)), ValueError, r"experts has shape \(3, 2\).*N = 4 tokens"),
        (dict(weights=jnp.ones((4, 1))), ValueError, r"weights has shape \(4, 1\)"),
        (dict(weights=jnp.ones((4, 4)), experts=jnp.ones((4, 4), int)), ValueError, "k = 4 .* only E = 3 experts"),
        (dict(down=jnp.ones((3, 5, 2), "bfloat16")), ValueError, "down has dtype bfloat16 and x float32"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_say_what_to_do(change, error, message, unchecked_types):
    arrays = {name: jnp.ones(shape) for name, shape in GOOD.items()}
    arguments = arrays | dict(experts=jnp.zeros((4, 2), int), activation="silu") | change
    with pytest.raises(error, match=f"^(moe_mlp|grouped_matmul): .*{message}"):
        moe_mlp(**arguments)


def test_no_tokens_give_none():
    arrays = {name: jnp.ones(shape) for name, shape in GOOD.items()} | dict(
        x=jnp.ones((0, 2)), weights=jnp.ones((0, 2))
    )
    assert moe_mlp(**arrays, experts=jnp.zeros((0, 2), int), activation="silu").shape == (0, 2)


def test_hopper_copies_tokens_to_the_rows_of_their_experts(hopper, rng, monkeypatch):
    """Simulated, two cores of four warpgroups copy several tokens each."""
    if hopper != "mosaic_gpu":
        monkeypatch.setattr(mosaic_gpu_block, "NUM_CORES", 2)
    n, d, k = 23, 128, 2
    (x,) = normal(rng, (n, d), dtype="bfloat16")
    row = rng.permutation(n * k).astype(np.int32)
    token = (np.argsort(row) // k).astype(np.int32)
    spread = GROUPED.named(hopper).kernel("spread").run
    assert (spread(x, jnp.asarray(token), jnp.asarray(row.reshape(n, k))) == x[token]).all()
