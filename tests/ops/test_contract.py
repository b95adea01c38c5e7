"""What all ops and losses promise alike: which arrays they take, and which derivatives they have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax import losses, ops

D, F, V = 6, 4, 7
X = (3, D)  # rows
LABELS = {"labels": [1, -100, 6]}
TOKENS = {"where": [True, True, False], "class_weights": [0.5] * V}
TABLE = {name: jnp.linspace(0.1, 0.9, 12).reshape(1, 3, 4).tolist() for name in ("cos", "sin")}
TABLES = {name: [table] * 3 for name, table in TABLE.items()}
HEADS = {"q": (1, 3, 2, 4), "k": (1, 3, 1, 4)}
KERNELS = {"gate_kernel": (D, F), "up_kernel": (D, F), "down_kernel": (F, D)}
FUSED = {"hidden": X, "weight": (V, D), "bias": (V,), "token_weights": (3,)}
fused = ops.fused_linear_cross_entropy
# By name: the op, the shapes of what it is differentiated by, and its other arrays.
CASES = {
    "rms_norm": (ops.rms_norm, {"x": X, "scale": (D,)}, {}),
    "layer_norm": (ops.layer_norm, {"x": X, "scale": (D,), "bias": (D,)}, {}),
    "fused_add_rms_norm": (ops.fused_add_rms_norm, {"x": X, "residual": X, "scale": (D,)}, {}),
    "group_norm": (
        functools.partial(ops.group_norm, num_groups=2),
        {"x": (2, D, 3), "scale": (D,), "bias": (D,)},
        {},
    ),
    "dyt": (ops.dyt, {"x": X, "alpha": (), "scale": (D,), "bias": (D,)}, {}),
    "poly_norm": (ops.poly_norm, {"x": X, "weight": (3,), "bias": ()}, {}),
    "relu_squared": (ops.relu_squared, {"x": X}, {}),
    "softmax": (ops.softmax, {"x": X}, {}),
    "sparsemax": (ops.sparsemax, {"x": X}, {}),
    "swiglu": (ops.swiglu, {"gate": X, "up": X}, {}),
    "geglu": (ops.geglu, {"gate": X, "up": X}, {}),
    "gated_mlp": (ops.gated_mlp, {"x": X, **KERNELS}, {}),
    "apply_rope": (ops.apply_rope, HEADS, TABLE),
    "apply_mrope": (functools.partial(ops.apply_mrope, sections=(1, 0, 1)), HEADS, TABLES),
    "cross_entropy": (ops.cross_entropy, {"logits": (3, V), "token_weights": (3,)}, {**LABELS, **TOKENS}),
    "fused_linear_cross_entropy, fast": (functools.partial(fused, mode="fast"), FUSED, {**LABELS, **TOKENS}),
    "fused_linear_cross_entropy, lean": (functools.partial(fused, mode="lean"), FUSED, {**LABELS, **TOKENS}),
    "causal_lm_loss": (
        losses.causal_lm_loss,
        {"hidden": (1, *X), "head": (V, D)},
        {"labels": [[1, 5, 6]], "segment_ids": [[0, 0, 1]]},
    ),
    "softmax_cross_entropy_with_integer_labels": (
        losses.softmax_cross_entropy_with_integer_labels,
        {"logits": (3, V)},
        {"labels": [1, 0, 6], "where": TOKENS["where"]},
    ),
}
all_ops = pytest.mark.parametrize("name", CASES)


def case(name, rng):
    """A scalar function of the op's arrays by name, those that it is differentiated by, and the others."""
    op, shapes, others = CASES[name]
    arrays = {argument: jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32) for argument, shape in shapes.items()}

    def total(arrays, others):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(op(**arrays, **others)))

    return total, arrays, {argument: jnp.asarray(x) for argument, x in others.items()}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- which arrays -----------------------------------------------------------------------------------------------------


class Holder(nnx.Module):
    """A module whose parameters are an op's arguments."""

    def __init__(self, arrays):
        for name, x in arrays.items():
            setattr(self, name, nnx.Param(x))


@all_ops
def test_flax_variables_are_taken_as_the_arrays_that_they_hold(name, rng):
    total, arrays, others = case(name, rng)
    expected = jax.jit(jax.value_and_grad(total))(arrays, others)
    variables = {argument: nnx.Variable(x) for argument, x in others.items()}
    value, gradients = nnx.jit(nnx.value_and_grad(lambda module, others: total(vars_of(module), others)))(
        Holder(arrays), variables
    )
    same((value, {argument: gradients[argument][...] for argument in arrays}), expected)
    # Beside variables, a plain array is differentiated.
    first, *_ = arrays
    by_first = jax.jit(jax.grad(lambda x, rest, others: total({first: x} | rest, others)))
    rest = {argument: x for argument, x in arrays.items() if argument != first}
    held = {argument: nnx.Param(x) for argument, x in rest.items()}
    same(by_first(arrays[first], held, variables), by_first(arrays[first], rest, others))


@all_ops
def test_numpy_arrays_are_taken_as_jax_arrays(name, rng):
    total, arrays, others = case(name, rng)
    same(total(*jax.tree.map(np.asarray, (arrays, others))), total(arrays, others))


def vars_of(module):
    return {name: x for name, x in vars(module).items() if isinstance(x, nnx.Variable)}
