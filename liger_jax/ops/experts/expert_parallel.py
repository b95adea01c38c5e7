"""Experts that the devices of a mesh axis share, inside `jax.shard_map`.

The tokens of all devices are gathered. Each device computes its own experts for them, and the weighted sums are
scattered: each device gets those of its own tokens. So a token is sent to a device once, however many of its experts
are there, and so is what comes back. In the backward the gradients of the sums are gathered, and those of the tokens
scattered. Weights of experts are not sent, nor are their gradients.

Routers decide how many rows a device has: any number, up to all choices of all tokens. Arrays have room for half more
than an even share. If there are more rows, they are computed in parts, whose sums are added in float32: no row is
dropped, and memory does not grow with what routers choose.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.ops import meshes
from liger_jax.ops.experts.expert_order import Order, sorted_by_expert, summed
from liger_jax.ops.layout import gathered, scattered
from liger_jax.pallas_kernels.tiles import cdiv, full_like, promoted

AT_ONCE = 1.5  # the rows that a device computes at once, as a multiple of an even share


def rows_at_once(choices: int, devices: int) -> int:
    """The rows that a device computes at once, if `devices` share so many choices."""
    return min(choices, cdiv(int(AT_ONCE * choices), 8 * devices) * 8)


def on_shards(
    x: jax.Array, weights: jax.Array, experts: jax.Array, own: int, arrays: Any, feed_forward: Callable, axis: str
) -> jax.Array:
    """The weighted sum of its experts' results for each token of this device. The experts are shared by the devices.

    Args:
        x: (N, D), this device's tokens.
        weights: (N, k).
        experts: (N, k), numbers among the experts of all devices, in the axis' order. A token with a wrong one has NaN
            as its value and its gradients, and reaches no expert.
        own: how many experts this device has.
        arrays: a tree of this device's arrays.
        feed_forward: hashable; `feed_forward(rows, of_rows, sizes, arrays)` are the results of rows (M, D) that are
            sorted by expert, times the rows' weights (M, 1). Rows after the last group give zero.
        axis: the mesh axis.

    Returns:
        (N, D) in x.dtype.
    """
    devices = jax.lax.axis_size(axis)
    is_right = jnp.all((experts >= 0) & (experts < own * devices), axis=1, keepdims=True)
    leaves, tree = jax.tree.flatten(arrays)
    options = _Options(feed_forward, tree, own, rows_at_once(experts.size * devices, devices))
    of_all = lambda array: gathered(array, P(axis))

    @jax.checkpoint  # gathered tokens are not kept for the backward
    def run(x, weights, experts, *leaves):
        experts = of_all(experts) - own * jax.lax.axis_index(axis)
        x, weights, experts, *leaves = meshes.align_varying(of_all(x), of_all(weights), experts, *leaves)
        return scattered(_own_experts(x, weights, tuple(leaves), experts, options), P(axis))

    x, weights = (_nan_gradient(array, is_right) for array in (x, weights))
    y = run(x, weights, jnp.where(is_right, experts, -1), *leaves)
    return jnp.where(is_right, y, jnp.nan)


@jax.custom_vjp
def _nan_gradient(x: jax.Array, is_right: jax.Array) -> jax.Array:
    """x as it is; its gradient is NaN where a token has a wrong expert."""
    return x


_nan_gradient.defvjp(lambda x, is_right: (x, is_right), lambda is_right, dx: (jnp.where(is_right, dx, jnp.nan), None))


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static options: the function of rows, the structure of its arrays, the number of experts, rows at once."""

    feed_forward: Callable
    tree: Any
    own: int
    room: int


class _Part(NamedTuple):
    """Some of the rows that are sorted by own expert."""

    choice: jax.Array  # (size,), each row's place among the choices
    row: jax.Array  # (N, k), the row of each choice; `size` if that is in another part or on another device
    sizes: jax.Array  # (E,), rows of each expert

    @classmethod
    def of(cls, order: Order, shape: tuple[int, ...], number: Any, size: int) -> "_Part":
        """The rows from number · size on."""
        first = number * size
        ends = jnp.cumsum(order.sizes, dtype=jnp.int32)
        within = lambda rows: jnp.clip(rows - first, 0, size)
        row = order.row.reshape(shape)
        is_here = (row >= first) & (row < jnp.minimum(first + size, ends[-1]))
        choice = jax.lax.dynamic_slice_in_dim(jnp.pad(order.choice, (0, size)), first, size)
        return cls(choice, jnp.where(is_here, row - first, size), within(ends) - within(ends - order.sizes))

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """x (N, D) → (size, D): each row's token."""
        return x.at[self.choice // self.row.shape[1]].get(mode="promise_in_bounds")

    def of_choices(self, weights: jax.Array) -> jax.Array:
        """weights (N, k) → (size, 1): each row's, float32 or wider."""
        of_row = weights.reshape(-1).at[self.choice].get(mode="promise_in_bounds")
        return of_row.astype(promoted(weights.dtype, jnp.float32))[:, None]

    def by_token(self, rows: jax.Array) -> jax.Array:
        """rows (size, D) → (N, D): the sum over a token's choices, float32 or wider."""
        return summed(rows, self.row, mode="fill")

    def by_choice(self, values: jax.Array) -> jax.Array:
        """values (size, 1) → (N, k)."""
        return values[:, 0].at[self.row].get(mode="fill", fill_value=0)


def _in_parts(part: Callable, order: Order, options: _Options, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums of `part(number, size)`, a list, over as many parts as there are rows for, in the dtypes of `like`."""
    room, total = options.room, order.sizes.sum(dtype=jnp.int32)
    rounded = lambda sums: [own.astype(array.dtype) for own, array in zip(sums, like, strict=True)]
    alone = lambda: rounded(part(0, room))
    if room == order.choice.size:
        return alone()

    def several():
        size = cdiv(room, 2)  # the sums may then take as much as the other half
        wider = lambda total, new: total + new.astype(total.dtype)
        add = lambda number, sums: list(map(wider, sums, part(number, size)))
        zeros = [full_like(array, array.shape, 0, promoted(array.dtype, jnp.float32)) for array in like]
        return rounded(jax.lax.fori_loop(0, (total + size - 1) // size, add, zeros))

    return jax.lax.cond(total <= room, alone, several)


def _order(experts: jax.Array, own: int) -> Order:
    """experts (N, k), of which 0 to own − 1 are this device's → the order of all choices."""
    return sorted_by_expert(experts.reshape(-1, 1), own)


def _forward(x, weights, leaves, experts, options):
    order, arrays = _order(experts, options.own), jax.tree.unflatten(options.tree, leaves)

    def part(number, size):
        own = _Part.of(order, experts.shape, number, size)
        rows, of_rows = own.of_tokens(x), own.of_choices(weights)
        return [own.by_token(options.feed_forward(rows, of_rows, own.sizes, arrays))]

    return _in_parts(part, order, options, [x])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _own_experts_vjp(x, weights, leaves, experts, options):
    return _forward(x, weights, leaves, experts, options)


def _forward_rule(x, weights, leaves, experts, options):
    primals = x, weights, *leaves
    # A residual's shape says which gradients are wanted, as in `gated_mlp`.
    needs = [jnp.zeros(int(primal.perturbed), jnp.float32) for primal in primals]
    x, weights, *leaves = (primal.value for primal in primals)
    return _forward(x, weights, leaves, experts.value, options), (needs, x, weights, leaves, experts.value)


def _backward_rule(options, residuals, dy):
    needs, x, weights, leaves, experts = residuals
    order, wanted = _order(experts, options.own), [i for i, need in enumerate(needs) if need.size]

    def part(number, size):
        own = _Part.of(order, experts.shape, number, size)
        inputs = [own.of_tokens(x), own.of_choices(weights), *leaves]

        def of_wanted(*arrays):
            rows, of_rows, *leaves = (dict(zip(wanted, arrays, strict=True)).get(i, x) for i, x in enumerate(inputs))
            return options.feed_forward(rows, of_rows, own.sizes, jax.tree.unflatten(options.tree, leaves))

        gradients = jax.vjp(of_wanted, *(inputs[i] for i in wanted))[1](own.of_tokens(dy))
        places = {0: own.by_token, 1: own.by_choice}
        return [places.get(i, lambda x: x)(gradient) for i, gradient in zip(wanted, gradients, strict=True)]

    primals = x, weights, *leaves
    found = dict(zip(wanted, _in_parts(part, order, options, [primals[i] for i in wanted]), strict=True))
    dx, dweights, *dleaves = (found.get(i) for i in range(len(primals)))
    return dx, dweights, tuple(dleaves), None


_own_experts_vjp.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_own_experts = jax.jit(_own_experts_vjp, static_argnums=4, inline=True)
