"""The feed-forward of a mixture of experts as one op."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from liger_jax.ops import checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.experts.expert_order import sorted_by_expert, summed
from liger_jax.ops.experts.grouped_matmul import KERNELS, Products, guarded, refuse_explicit
from liger_jax.ops.kernels import Implementation, Kernel
from liger_jax.ops.place import place_of
from liger_jax.pallas_kernels.glu import formulas as glu
from liger_jax.pallas_kernels.grouped_matmul import formulas
from liger_jax.pallas_kernels.tiles import promoted

_OP = "moe_mlp"
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")
# `checkpoint_name` of gate and up of all experts, for remat policies that save products: they are made by a kernel,
# which such a policy does not recognise as a product.
EXPERT_GATE_UP = "expert_gate_up"


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static options of an op: the copies of tokens to experts' rows, both weights' products, the activation."""

    spread: Kernel
    gate_up: Products
    down: Products
    activation: str


def _forward(arrays, options):
    x, weights, gate_up, down, gate_up_bias, down_bias, experts = arrays
    order = sorted_by_expert(experts, gate_up.shape[0])
    group = formulas.group_of_rows(order.sizes, order.token.shape[0])
    fill = jnp.zeros((), jnp.float32)
    rows = options.spread.run(x, order.token, order.row)
    both = _plus_bias(options.gate_up.forward.run(rows, gate_up, order.sizes, fill), gate_up_bias, group)
    gate, up = jnp.split(both, 2, axis=1)
    h = glu.product(gate, up, activation=options.activation)
    y = _plus_bias(options.down.forward.run(h, down, order.sizes, fill), down_bias, group)
    weights = jnp.where(order.is_right, weights, jnp.nan).astype(promoted(x.dtype, jnp.float32))
    return summed(y, order.row, weights).astype(x.dtype), order, both


def _plus_bias(y: jax.Array, bias: jax.Array | None, group: jax.Array) -> jax.Array:
    return y if bias is None else y + bias.at[group].get(mode="clip")


def _bias_gradient(rows: jax.Array, group: jax.Array, bias: jax.Array) -> jax.Array:
    """rows (N·k, F) → (E, F): sums over each expert's rows, as a product with their indicators: it has an order."""
    rows = jnp.where(group[:, None] < bias.shape[0], rows, jnp.zeros((), rows.dtype))
    indicators = (group[:, None] == jnp.arange(bias.shape[0], dtype=group.dtype)[None]).astype(rows.dtype)
    total = jax.lax.dot_general(
        indicators, rows, (((0,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=promoted(rows.dtype, jnp.float32),
    )  # fmt: skip
    return total.astype(bias.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _moe_mlp_vjp(x, weights, gate_up, down, gate_up_bias, down_bias, experts, options):
    arrays = guarded(_OP, x, weights, gate_up, down, gate_up_bias, down_bias, experts)
    return _forward(arrays, options)[0]


def _forward_rule(*primals_and_options):
    *primals, options = primals_and_options
    # A residual's shape says which gradients are wanted, as in `gated_mlp`.
    needs = [jnp.zeros(int(p is not None and p.perturbed), jnp.float32) for p in primals[:6]]
    values = [None if primal is None else primal.value for primal in primals]
    y, order, both = _forward(guarded(_OP, *values), options)
    return y, (needs, *values[:6], order, checkpoint_name(both, EXPERT_GATE_UP))


def _backward_rule(options, residuals, dy):
    """Sorted rows get the gradient of an unweighted sum, and weights are applied where rows are F wide and not D.

    With h the gated product and g = dy · downᵀ, a weight's gradient is h · g, and the gradient of h is weight · g.
    """
    needs, x, weights, gate_up, down, gate_up_bias, down_bias, order, both = residuals
    by_x, by_weights, by_gate_up, by_down, by_gate_up_bias, by_down_bias = (bool(need.size) for need in needs)
    dx = dweights = dgate_up = ddown = dgate_up_bias = ddown_bias = None
    dy, weights, gate_up, down, both = guarded(_OP, dy, weights, gate_up, down, both)
    fill, wide = jnp.zeros((), jnp.float32), promoted(x.dtype, jnp.float32)
    group = formulas.group_of_rows(order.sizes, order.token.shape[0])
    rows = options.spread.run(dy, order.token, order.row)
    of_row = order.by_row(weights).astype(wide)
    gate, up = jnp.split(both, 2, axis=1)
    h = glu.product(gate, up, activation=options.activation)
    dboth = None
    if by_down:
        weighted = (of_row * h.astype(wide)).astype(h.dtype)
        ddown = options.down.weight_gradient.run(weighted, rows, order.sizes, fill)
    if down_bias is not None and by_down_bias:
        ddown_bias = _bias_gradient((of_row * rows.astype(wide)).astype(rows.dtype), group, down_bias)
    if not (by_x or by_weights or by_gate_up or by_gate_up_bias):
        return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, None
    dh = options.down.transposed.run(rows, down, order.sizes, fill).astype(wide)
    if by_weights:
        own = jnp.sum(h.astype(wide) * dh, axis=1)
        if down_bias is not None:
            own += jnp.sum(rows.astype(wide) * down_bias.at[group].get(mode="clip").astype(wide), axis=1)
        dweights = order.by_choice(own).astype(weights.dtype)
    if by_x or by_gate_up or by_gate_up_bias:
        gradients = glu.gradients(of_row * dh, gate, up, activation=options.activation)
        dboth = jnp.concatenate(gradients, axis=1)
    if by_gate_up:
        x_rows = options.spread.run(x, order.token, order.row)
        dgate_up = options.gate_up.weight_gradient.run(x_rows, dboth, order.sizes, fill)
    if gate_up_bias is not None and by_gate_up_bias:
        dgate_up_bias = _bias_gradient(dboth, group, gate_up_bias)
    if by_x:
        dx = summed(options.gate_up.transposed.run(dboth, gate_up, order.sizes, fill), order.row)
        dx = jnp.where(order.is_right, dx, jnp.nan).astype(x.dtype)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, None


_moe_mlp_vjp.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_moe_mlp = jax.jit(_moe_mlp_vjp, static_argnums=7, inline=True)


def moe_mlp(
    x: Float[ArrayLike, "N D"],
    weights: Float[ArrayLike, "N k"],
    experts: Integer[ArrayLike, "N k"],
    gate_up: Float[ArrayLike, "E D gates"],
    down: Float[ArrayLike, "E F D"],
    *,
    gate_up_bias: Float[ArrayLike, "E gates"] | None = None,
    down_bias: Float[ArrayLike, "E D"] | None = None,
    activation: str,
    implementation: Implementation = None,
) -> Float[Array, "N D"]:
    """The feed-forward of a mixture of experts: y = Σ_j weights_j · expert_j(x), over the k experts of each token.

    expert(x) = (act(gate) · up) · down + down_bias, where gate and up are the two halves of x · gate_up + gate_up_bias.
    Tokens are sorted by expert, and each expert computes its tokens alone. No token is dropped. Rows are permuted by
    gathers, so results are bitwise reproducible. Kept for the backward are `x`, `weights`, the weights of the experts,
    gate and up (N·k, 2F) and the order of the tokens, and no array of shape (N·k, D). A `jax.checkpoint` around the op
    recomputes gate and up, unless its policy keeps them by their `checkpoint_name`, "expert_gate_up". Gradients that
    are not needed are not computed.

    Args:
        x: (N, D), any float dtype.
        weights: (N, k), any float dtype, as returned by a router. Sums over a token's experts are float32.
        experts: (N, k), integers from 0 to E − 1. A token with any other number has NaN as its value and its gradients,
            and is not computed. A token may choose an expert twice.
        gate_up: (E, D, 2F) in x.dtype, gate's columns before up's.
        down: (E, F, D) in x.dtype.
        gate_up_bias: (E, 2F) in x.dtype, or None.
        down_bias: (E, D) in x.dtype, or None.
        activation: "silu", "gelu_tanh" or "gelu", as in `gated_mlp`; or "clamped_swiglu", gpt-oss's unit:
            g·σ(1.702·g) · (u + 1) with g = min(gate, 7) and u = up between −7 and 7.
        implementation: of the grouped products, as in `grouped_matmul`.

    Returns:
        (N, D) in x.dtype.

    Raises:
        ValueError: an array is sharded over a mesh with Explicit axes.

    Example:
        >>> x, gate_up, down = jnp.ones((1, 2)), jnp.ones((3, 2, 8)), jnp.ones((3, 4, 2))
        >>> y = moe_mlp(x, jnp.array([[0.5, 0.5]]), jnp.array([[0, 2]]), gate_up, down, activation="silu")
        >>> [f"{number:.2f}" for number in y[0]]
        ['14.09', '14.09']

    References:
        Shazeer et al., "Outrageously Large Neural Networks", 2017 (arXiv:1701.06538).
    """
    arrays = _checked(x, weights, experts, gate_up, down, gate_up_bias, down_bias, activation)
    if any(array is not None and array.size == 0 for array in arrays):
        return jnp.zeros_like(arrays[0])
    options = _Options(*_choose(*arrays, implementation=implementation), activation)
    return _moe_mlp(*meshes.align_varying(*arrays), options)


def _choose(x, weights, gate_up, down, *_, implementation) -> tuple[Kernel, Products, Products]:
    """The copies of tokens, the products of `gate_up`, and those of `down`."""
    place = place_of(x, gate_up, down)
    precision = checks.current_precision(_OP, None)

    def choice(w):
        rows = jax.ShapeDtypeStruct((weights.size, w.shape[1]), x.dtype)
        return KERNELS.choose(implementation, rows, w, place=place)

    def products(w):
        return Products.of(choice(w), transpose_w=False, weight_dtype=w.dtype, precision=precision)

    return choice(gate_up).kernel("spread"), products(gate_up), products(down)


def _checked(x, weights, experts, gate_up, down, gate_up_bias, down_bias, activation) -> tuple[Any, ...]:
    """The arguments as JAX's arrays, checked, in the order of the op's rules."""
    checks.check_choice(_OP, "activation", activation, ACTIVATIONS)
    biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    x, weights, gate_up, down, gate_up_bias, down_bias = checks.floating(
        _OP, *biases, x=x, weights=weights, gate_up=gate_up, down=down, **biases
    )
    experts = checks.as_array(_OP, "experts", experts)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(
            f"{_OP}: experts has dtype {experts.dtype}, but must be of integers, the experts' numbers; pass what a "
            "router's top-k gives."
        )
    if x.ndim != 2 or gate_up.ndim != 3 or gate_up.shape[1] != x.shape[1] or gate_up.shape[2] % 2:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and gate_up {gate_up.shape}, but they must be (N, D) and (E, D, 2F); "
            "reshape x to rows of tokens, and transpose weights that are (E, 2F, D)."
        )
    num_experts, d, f = gate_up.shape[0], x.shape[1], gate_up.shape[2] // 2
    checks.check_shape(_OP, "down", down, (num_experts, f, d), "it is (E, F, D)")
    checks.check_shape(_OP, "gate_up_bias", gate_up_bias, (num_experts, 2 * f), "it is (E, 2F)")
    checks.check_shape(_OP, "down_bias", down_bias, (num_experts, d), "it is (E, D)")
    if experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"{_OP}: experts has shape {experts.shape}, but must be (N, k) with N = {x.shape[0]} tokens.")
    checks.check_shape(_OP, "weights", weights, experts.shape, "one for each of a token's experts")
    if experts.shape[1] > num_experts:
        raise ValueError(
            f"{_OP}: experts has k = {experts.shape[1]} for each token, but there are only E = {num_experts} experts; "
            "choose no more than there are."
        )
    for name, kernel in dict(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias).items():
        if kernel is not None and kernel.dtype != x.dtype:
            raise ValueError(
                f"{_OP}: {name} has dtype {kernel.dtype} and x {x.dtype}, but all but weights must have one, in which "
                f"the products are; cast it, for example {name}.astype(x.dtype)."
            )
    arrays = x, weights, gate_up, down, gate_up_bias, down_bias, experts
    refuse_explicit(_OP, *arrays)
    return arrays
