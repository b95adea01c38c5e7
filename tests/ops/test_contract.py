"""What all ops and losses promise alike: which arrays they take, and which derivatives they have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax import losses, ops
from tests._compilations import compilations
from tests.ops._oracle import TOLERANCE
from tests.ops.references import attention, cross_entropy, glu, norms, plain

D, F, V = 6, 4, 7
X = (3, D)  # rows
LABELS = {"labels": [1, 5, -100, 6]}
TOKENS = {"where": [True, True, True, False], "class_weights": [0.5] * V}
TABLE = {name: jnp.linspace(0.1, 0.9, 12).reshape(1, 3, 4).tolist() for name in ("cos", "sin")}
TABLES = {name: [table] * 3 for name, table in TABLE.items()}
HEADS = {"q": (1, 3, 2, 4), "k": (1, 3, 1, 4)}
KERNELS = {"gate_kernel": (D, F), "up_kernel": (D, F), "down_kernel": (F, D)}
FUSED = {"hidden": (4, D), "weight": (V, D), "bias": (V,), "token_weights": (4,)}
fused = ops.fused_linear_cross_entropy
TOKEN_LOSS = (
    {name: FUSED[name] for name in ("hidden", "weight", "bias")} | {"factor": (4,)},
    {**LABELS, "where": TOKENS["where"]},
)


def of_token(log_prob, entropy, factor):
    return factor * log_prob * entropy


def token_loss(hidden, weight, labels, factor, **options):
    return ops.fused_linear_token_loss(
        of_token, hidden, weight, labels, (factor,), denominator=2, entropy=True, **options
    )


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
    "gated_rms_norm": (ops.gated_rms_norm, {"x": X, "gate": X, "scale": (D,)}, {}),
    "relu_squared": (ops.relu_squared, {"x": X}, {}),
    "softmax": (ops.softmax, {"x": X}, {}),
    "sparsemax": (ops.sparsemax, {"x": X}, {}),
    "swiglu": (ops.swiglu, {"gate": X, "up": X}, {}),
    "geglu": (ops.geglu, {"gate": X, "up": X}, {}),
    "gated_mlp": (ops.gated_mlp, {"x": X, **KERNELS}, {}),
    "apply_rope": (ops.apply_rope, HEADS, TABLE),
    "causal_attention": (ops.causal_attention, {**HEADS, "v": HEADS["k"]}, {"segment_ids": [[1, 1, 2]]}),
    "gated_delta_rule": (
        ops.gated_delta_rule,
        {**{name: (1, 3, 1, 4) for name in "qk"}, "v": (1, 3, 2, 4), "gate": (1, 3, 2), "beta": (1, 3, 2)},
        {"segment_ids": [[1, 1, 2]]},
    ),
    "causal_conv1d": (ops.causal_conv1d, {"x": (1, *X), "weight": (D, 2), "bias": (D,)}, {"segment_ids": [[1, 1, 2]]}),
    "apply_mrope": (functools.partial(ops.apply_mrope, sections=(1, 0, 1)), HEADS, TABLES),
    "cross_entropy": (ops.cross_entropy, {"logits": (4, V), "token_weights": (4,)}, {**LABELS, **TOKENS}),
    "fused_linear_cross_entropy, fast": (functools.partial(fused, mode="fast"), FUSED, {**LABELS, **TOKENS}),
    "fused_linear_cross_entropy, lean": (functools.partial(fused, mode="lean"), FUSED, {**LABELS, **TOKENS}),
    "fused_linear_log_probs": (
        functools.partial(ops.fused_linear_log_probs, entropy=True),
        {name: FUSED[name] for name in ("hidden", "weight", "bias")},
        {**LABELS, "where": TOKENS["where"], "selected_token_ids": [2, 5]},
    ),
    "fused_linear_token_loss, fast": (functools.partial(token_loss, mode="fast"), *TOKEN_LOSS),
    "fused_linear_token_loss, lean": (functools.partial(token_loss, mode="lean"), *TOKEN_LOSS),
    "causal_lm_loss": (
        losses.causal_lm_loss,
        {"hidden": (1, *X), "head": (V, D)},
        {"labels": [[1, 5, 6]], "segment_ids": [[1, 1, 2]]},
    ),
    "softmax_cross_entropy_with_integer_labels": (
        losses.softmax_cross_entropy_with_integer_labels,
        {"logits": (4, V)},
        {"labels": [1, 0, 6, 2], "where": TOKENS["where"]},
    ),
}
EXPERTS = {
    "grouped_matmul": (ops.grouped_matmul, {"x": X, "w": (2, D, F)}, {"group_sizes": [1, 2]}),
    "moe_mlp": (
        functools.partial(ops.moe_mlp, activation="silu"),
        {"x": X, "weights": (3, 2), "gate_up": (2, D, 2 * F), "down": (2, F, D)},
        {"experts": [[0, 1], [1, 0], [0, 1]]},
    ),
}
# A mode takes its arrays as the other one does.
all_ops = pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(", lean")])


def scalar(outputs):
    return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs))


def case(name, rng, **options):
    """A scalar function of the op's arrays by name, the arrays to differentiate by, and the other arrays."""
    op, shapes, others = {**CASES, **EXPERTS}[name]
    arrays = {argument: jnp.asarray(rng.uniform(0.1, 0.6, shape), jnp.float32) for argument, shape in shapes.items()}

    def total(arrays, others):
        return scalar(op(**arrays, **others, **options))

    return total, arrays, {argument: jnp.asarray(x) for argument, x in others.items()}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", [*CASES, *EXPERTS])
def test_a_second_eager_call_compiles_nothing(name, rng):
    total, arrays, others = case(name, rng)
    gradients = jax.grad(total)
    total(arrays, others)
    gradients(arrays, others)
    with compilations() as of_value:
        total(arrays, others)
    with compilations() as of_gradients:
        gradients(arrays, others)
    assert (len(of_value), len(of_gradients)) == (0, 0)


# --- which arrays -----------------------------------------------------------------------------------------------------


class Holder(nnx.Module):
    """A module that passes its parameters to an op."""

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


# --- which derivatives ------------------------------------------------------------------------------------------------

LOSSES = [name for name in CASES if name.startswith(("fused_linear", "causal_lm"))]
BEHIND_KERNELS = {"down_kernel", "token_weights", "factor"}  # the results of kernels are multiplied by them
NO_KERNEL = (  # that an interpreter on a CPU runs, or none at all
    "causal_attention",
    "apply_rope",
    "apply_mrope",
    "dyt",
    "group_norm",
    "poly_norm",
    "gated_rms_norm",
    "causal_conv1d",
    "relu_squared",
    "softmax",
    "sparsemax",
    "softmax_cross_entropy_with_integer_labels",
)


def label_loss(logits, labels, token_weights, **options):
    counts = (labels != -100) & options.pop("where", True)
    return cross_entropy.cross_entropy(logits, labels, jnp.where(counts, token_weights, 0.0), **options)


def gated_mlp(x, gate_kernel, up_kernel, down_kernel):
    return glu.gated(x @ gate_kernel, x @ up_kernel, activation="silu") @ down_kernel


EPS = {"eps": 1e-6}
TRUTHS = {
    "rms_norm": functools.partial(norms.rms_norm, offset=0.0, **EPS),
    "layer_norm": functools.partial(norms.layer_norm, **EPS),
    "fused_add_rms_norm": functools.partial(norms.fused_add_rms_norm, offset=0.0, **EPS),
    "group_norm": functools.partial(plain.group_norm, num_groups=2, channel_axis=1, **EPS),
    "dyt": plain.dyt,
    "poly_norm": functools.partial(plain.poly_norm, **EPS),
    "gated_rms_norm": functools.partial(norms.gated_rms_norm, **EPS),
    "relu_squared": plain.relu_squared,
    "softmax": plain.softmax,
    "sparsemax": plain.sparsemax,
    "swiglu": functools.partial(glu.gated, activation="silu"),
    "geglu": functools.partial(glu.gated, activation="gelu_tanh"),
    "gated_mlp": gated_mlp,
    "apply_rope": plain.apply_rope,
    "causal_attention": attention.causal_attention,
    "apply_mrope": functools.partial(plain.apply_mrope, sections=(1, 0, 1)),
    "cross_entropy": label_loss,
    "softmax_cross_entropy_with_integer_labels": lambda logits, labels, where: label_loss(
        logits, labels, jnp.ones(4), where=where, reduction="none"
    ),
}


def twice(total, arrays, others, factors):
    """The gradient of a weighted sum of the gradients."""
    weighted = lambda gradients: jax.tree.map(lambda g, factor: jnp.sum(factor * g), gradients, factors)
    return jax.grad(lambda arrays: sum(jax.tree.leaves(weighted(jax.grad(total)(arrays, others)))))(arrays)


@pytest.mark.parametrize("name", TRUTHS)
def test_plain_jax_has_second_derivatives(name, rng):
    device, options = jax.devices()[0], {"implementation": "xla"}
    if name == "softmax_cross_entropy_with_integer_labels":  # it has no such option; a CPU's default is plain JAX
        device, options = jax.devices("cpu")[0], {}
    with jax.default_device(device):
        total, arrays, others = case(name, rng, **options)
        factors = case(name, rng)[1]
        found = jax.jit(functools.partial(twice, total))(arrays, others, factors)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        truth = lambda arrays, others: scalar(TRUTHS[name](**arrays, **others))
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if x.dtype == jnp.float32 else x
        expected = jax.jit(functools.partial(twice, truth))(*jax.tree.map(wide, (arrays, others, factors)))
    # Of the largest of all: the terms of one argument's may cancel, which leaves the rounding of them.
    largest = max(np.abs(np.asarray(x)).max() for x in expected.values())
    for argument in arrays:
        error = np.abs(np.asarray(found[argument], np.float64) - np.asarray(expected[argument])).max()
        assert error < TOLERANCE * largest, argument


# Whose kernels have the derivatives of their formulas.
TWICE = (*NO_KERNEL, "cross_entropy")


@pytest.mark.parametrize("name", [name for name in CASES if name not in TWICE])
def test_kernels_say_that_they_have_no_second_derivatives(name, rng):
    fused = name in LOSSES
    cure = r"cross_entropy\(hidden @ weight.T, " if fused else "pass implementation='xla', which is plain JAX"
    message = (
        f"differentiated twice, but its kernels have first derivatives only, by jax.grad; for second ones .*{cure}"
    )
    total, arrays, others = case(name, rng, implementation=None if fused else "triton:interpret")
    for argument in arrays.keys() - BEHIND_KERNELS:  # by one at a time: none is let through
        by_one = lambda own, arrays=arrays: twice(lambda own, others: total(arrays | own, others), own, others, own)
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(by_one, {argument: arrays[argument]})


# In XLA these have one.
WITH_FORWARD_MODE = {
    "causal_attention", "fused_linear_cross_entropy, fast", "causal_lm_loss",
    "softmax", "sparsemax", "group_norm", "dyt", "poly_norm", "relu_squared", "gated_rms_norm", "causal_conv1d",
    "cross_entropy", "softmax_cross_entropy_with_integer_labels",
}  # fmt: skip


@pytest.mark.parametrize("name", ["group_norm", "dyt", "poly_norm", "relu_squared", "sparsemax"])
def test_the_tangent_of_plain_jax_is_the_gradients_product_with_the_direction(name, rng):
    (total, arrays, others), (_, directions, _) = case(name, rng), case(name, rng)

    @jax.jit
    def found(arrays, directions):
        of_arrays = lambda arrays: total(arrays, others)
        return jax.jvp(of_arrays, (arrays,), (directions,))[1], jax.grad(of_arrays)(arrays)

    tangent, gradients = found(arrays, directions)
    expected = sum(np.vdot(gradients[argument], directions[argument]) for argument in arrays)
    np.testing.assert_allclose(tangent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_FORWARD_MODE])
def test_there_is_no_forward_mode(name, rng):
    total, arrays, others = case(name, rng)
    with pytest.raises(TypeError, match="can't apply forward-mode|supports gradients .* but here not forward mode"):
        jax.jvp(lambda arrays: total(arrays, others), (arrays,), (arrays,))
