"""Projections with adapters, x·W + (x·A)·B, and a gated feed-forward of them, where a kernel adds in its accumulator.

On Hopper the adapter's product is a few more steps of the frozen one's, so that neither it nor the sum of gradients
takes a pass over memory. Elsewhere these are plain products, which any mesh may partition.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.ops import checks, meshes
from liger_jax.ops.kernels import Choice, Implementation, Kernel, Kernels
from liger_jax.ops.place import place_of
from liger_jax.pallas_kernels.adapted_linear import config, mosaic_gpu, triton
from liger_jax.pallas_kernels.gated_mlp import config as gated_config
from liger_jax.pallas_kernels.gated_mlp import mosaic_gpu as gated
from liger_jax.pallas_kernels.glu import formulas as glu
from liger_jax.pallas_kernels.tiles import round_up

KERNELS = Kernels("adapted_linear", {"xla": None, "mosaic_gpu": mosaic_gpu}, defaults={"gpu": ("mosaic_gpu",)})
_GATED = Kernels("adapted_gated_mlp", {"xla": None, "mosaic_gpu": gated}, defaults={"gpu": ("mosaic_gpu",)})
# `checkpoint_name` of the sum of a projection and its adapter. Where it is kept, neither of its terms is, which would be
# twice the memory.
ADAPTED = "adapted_projection"
# The two gradients that read a projection's gradient.
_PAIRS = Kernels("adapter_gradients", {"xla": None, "triton": triton}, defaults={"gpu": ("triton",)})
_STEP = 64  # ranks are padded to a multiple of it with zeros


@dataclasses.dataclass(frozen=True)
class _Options:
    """The kernels that an op is compiled with."""

    forward: Kernel
    backward: Kernel
    up: Kernel | None = None
    gradients: Kernel | None = None
    # For each adapter of the op, of which one pass makes two gradients, its rows of B, and the kernel.
    pairs: tuple[tuple[int, int, Kernel] | None, ...] = (None,)


def _run(kernel: Kernel, *arrays: Any) -> Any:
    return kernel.run(*kernel.guarded(*arrays))


def _narrow(x: jax.Array, a: jax.Array, axis: int = 0) -> jax.Array:
    """x (..., D) · a, which contracts a's `axis`: (..., R), rounded once."""
    return jax.lax.dot_general(x, a, (((x.ndim - 1,), (axis,)), ((), ())))


def _over_tokens(x: jax.Array, y: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """xᵀ·y, a sum over tokens."""
    tokens = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, y, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def _of_output(dy: jax.Array, t: jax.Array, b: jax.Array, pair: Any, wanted: bool) -> tuple[jax.Array, Any]:
    """dy·bᵀ (..., R) and tᵀ·dy (R, F); the second in vain where it is not wanted."""
    if pair is None or not wanted:
        return _narrow(dy, b, 1), _over_tokens(t, dy) if wanted else None
    first, end, kernel = pair
    u, db = _run(kernel, dy, t[..., first:end], b[first:end])
    around = first, t.shape[-1] - end
    return jnp.pad(u, ((0, 0),) * (u.ndim - 1) + (around,)), jnp.pad(db, (around, (0, 0)))


def _pair(x: jax.Array, width: int, first: int, rank: int) -> tuple[int, int, Kernel] | None:
    """For an adapter's rows of B, if a kernel makes both gradients in a pass over an output (..., width)."""
    n = math.prod(x.shape[:-1])
    case = jax.ShapeDtypeStruct((n, width), x.dtype), jax.ShapeDtypeStruct((n, rank), x.dtype)
    choice = _PAIRS.choose(None, *case, place=place_of(x))
    return None if choice.name == "xla" else (first, first + rank, choice.kernel("input_and_b_gradients"))


def _needs(primals: Any) -> tuple[Any, list[jax.Array]]:
    """The values, and residuals whose shapes say which gradients are wanted, as in `gated_mlp`."""
    return [p.value for p in primals], [jnp.zeros(int(p.perturbed), jnp.float32) for p in primals]


def _linear_forward(x, kernel, a, b, options):
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    t = _narrow(x, a)
    return _run(options.forward, x, kernel, t, b), t


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_vjp(x, kernel, a, b, options):
    return _linear_forward(x, kernel, a, b, options)[0]


def _linear_forward_rule(*primals_and_options):
    *primals, options = primals_and_options
    (x, kernel, a, b), needs = _needs(primals)
    y, t = _linear_forward(x, kernel, a, b, options)
    return y, (needs, x, kernel, a, b, t)


def _linear_backward_rule(options, residuals, dy):
    needs, x, kernel, a, b, t = residuals
    by_x, by_kernel, by_a, by_b = (need.size == 1 for need in needs)
    u, db = _of_output(dy, t, b.astype(dy.dtype), options.pairs[0], by_b)
    dx = _run(options.backward, dy, kernel, u, a.astype(dy.dtype)) if by_x else None
    dkernel = _over_tokens(x, dy, kernel.dtype) if by_kernel else None
    return dx, dkernel, _over_tokens(x, u, a.dtype) if by_a else None, db.astype(b.dtype) if by_b else None


_linear_vjp.defvjp(_linear_forward_rule, _linear_backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_linear = jax.jit(_linear_vjp, static_argnums=4, inline=True)


def can_add(x: Any, *kernels: Any) -> bool:
    """Whether a kernel adds the adapters' products of projections here: else they are plain products."""
    place, n = place_of(x, *jax.tree.leaves(kernels)), math.prod(x.shape[:-1])
    for kernel in kernels:
        d, f = kernel.shape
        if not (isinstance(n, int) and config.is_large(n, f) and config.is_large(n, d)):
            return False
        kernel = jax.ShapeDtypeStruct(kernel.shape, x.dtype)
        if KERNELS.choose(None, x, kernel, place=place).name == "xla":
            return False
    return True


def adapted_linear(
    x: Float[Array, "*batch D"],
    kernel: Float[Array, "D F"],
    a: Float[Array, "D R"],
    b: Float[Array, "R F"],
    num_projections: int = 1,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """x·kernel + (x·a)·b in x.dtype. a and b are rounded to x.dtype; the kernels do not round their gradients.

    `num_projections`: how many the kernel has side by side, with blocks of `b`.
    """
    choice = KERNELS.choose(implementation, x, jax.ShapeDtypeStruct(kernel.shape, x.dtype), place=place_of(x))
    if choice.name == "xla":
        return _plain(x, kernel, a, b)
    rank = a.shape[1]
    whole = round_up(slot(rank), _STEP)
    a, b = _placed(a, 1, 0, whole), _placed(b, 0, 0, whole)
    arrays = meshes.align_varying(x, kernel.astype(x.dtype), a, b)
    # Columns of several projections have the rows of B of their own only.
    pairs = _pair(x, kernel.shape[1], 0, slot(rank)) if num_projections == 1 else None
    return _linear(*arrays, _options(choice, (pairs,)))


def _plain(x, kernel, a, b):
    return x @ kernel.astype(x.dtype) + (x @ a.astype(x.dtype)) @ b.astype(x.dtype)


def slot(rank: int) -> int:
    """Rows of B that an adapter has in the op, those beyond its rank 0: Triton's products have 16 or 32 columns."""
    return 16 if rank <= 16 else round_up(rank, 32)


def _options(choice: Choice, pairs: Any, **more: Any) -> _Options:
    kernels = (choice.kernel("sum_of_products", transposed=transposed) for transposed in (False, True))
    return _Options(*kernels, pairs=pairs, **more)


# --- the gated feed-forward -------------------------------------------------------------------------------------------


def _gated_forward(x, gate_kernel, up_kernel, down_kernel, a, gate_b, up_b, down_a, down_b, options):
    a, gate_b, up_b, down_a, down_b = (array.astype(x.dtype) for array in (a, gate_b, up_b, down_a, down_b))
    t = _narrow(x, a)
    gate = _run(options.forward, x, gate_kernel, t, gate_b)
    up, h = _run(options.up, x, up_kernel, gate, t, up_b)
    down_t = _narrow(h, down_a)
    return _run(options.forward, h, down_kernel, down_t, down_b), t, gate, up, down_t


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def _gated_vjp(*arrays_and_options):
    return _gated_forward(*arrays_and_options)[0]


def _gated_forward_rule(*primals_and_options):
    *primals, options = primals_and_options
    arrays, needs = _needs(primals)
    y, t, gate, up, down_t = _gated_forward(*arrays, options)
    gate, up = checkpoint_name((gate, up), ADAPTED)
    return y, (needs, arrays, t, gate, up, down_t)


def _gated_backward_rule(options, residuals, dy):
    needs, arrays, t, gate, up, down_t = residuals
    x, gate_kernel, up_kernel, down_kernel, *adapters = arrays
    a, gate_b, up_b, down_a, down_b = (array.astype(x.dtype) for array in adapters)
    wanted = [need.size == 1 for need in needs]
    gradients: list[Any] = [None] * len(arrays)

    def give(i, x, y):
        if wanted[i]:
            gradients[i] = _over_tokens(x, y, arrays[i].dtype)

    down_u, ddown_b = _of_output(dy, down_t, down_b, options.pairs[2], wanted[8])
    dgate, dup, h = _run(options.gradients, dy, down_kernel, gate, up, down_u, down_a)
    give(3, h, dy)
    give(7, h, down_u)
    gate_u, dgate_b = _of_output(dgate, t, gate_b, options.pairs[0], wanted[5])
    up_u, dup_b = _of_output(dup, t, up_b, options.pairs[1], wanted[6])
    u = gate_u + up_u
    give(1, x, dgate)
    give(2, x, dup)
    give(4, x, u)
    for i, db in ((5, dgate_b), (6, dup_b), (8, ddown_b)):
        gradients[i] = db if db is None else db.astype(arrays[i].dtype)
    if wanted[0]:
        last = jax.lax.dot_general(dup, up_kernel, (((dup.ndim - 1,), (1,)), ((), ())))
        gradients[0] = _run(options.backward, dgate, gate_kernel, u, a) + last
    return tuple(gradients)


_gated_vjp.defvjp(_gated_forward_rule, _gated_backward_rule, symbolic_zeros=True)
_gated = jax.jit(_gated_vjp, static_argnums=9, inline=True)


def can_gate(x: Any, up_kernel: Any, activation: str) -> bool:
    """Whether a kernel makes the unit of adapted projections here, where `can_add`."""
    if not gated_config.is_large(math.prod(x.shape[:-1]), up_kernel.shape[1]):
        return False
    kernel, place = jax.ShapeDtypeStruct(up_kernel.shape, x.dtype), place_of(x, *jax.tree.leaves(up_kernel))
    return _GATED.choose(None, x, kernel, place=place, activation=activation).name != "xla"


def _placed(x: jax.Array, axis: int, first: int, size: int) -> jax.Array:
    """x in zeros (size along the axis), from `first` on."""
    around = [(0, 0), (0, 0)]
    around[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, around)


def adapted_gated_mlp(
    x: Float[Array, "*batch D"],
    kernels: Any,
    adapters: Any,
    *,
    activation: str,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """`gated_mlp` of three projections with adapters.

    `kernels`: of gate, up and down. `adapters`: their pairs of A and B, whose scales are in B.
    """
    kernel = jax.ShapeDtypeStruct(kernels[1].shape, x.dtype)
    choice = _GATED.choose(implementation, x, kernel, place=place_of(x), activation=activation)
    if choice.name == "xla":
        gate, up = (_plain(x, kernels[i], *adapters[i]) for i in (0, 1))
        return _plain(glu.product(gate, up, activation=activation), kernels[2], *adapters[2])
    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = adapters
    first, second, third = (slot(each.shape[1]) for each in (gate_a, up_a, down_a))
    rank, down_rank = round_up(first + second, _STEP), round_up(third, _STEP)
    a = _placed(gate_a, 1, 0, rank) + _placed(up_a, 1, first, rank)
    gate_b, up_b = _placed(gate_b, 0, 0, rank), _placed(up_b, 0, first, rank)
    down_a, down_b = _placed(down_a, 1, 0, down_rank), _placed(down_b, 0, 0, down_rank)
    d, f = kernels[0].shape
    pairs = _pair(x, f, 0, first), _pair(x, f, first, second), _pair(x, d, 0, third)
    static: dict[str, Any] = dict(activation=activation, precision=checks.current_precision(None))
    options = _options(
        KERNELS.named(choice.name),
        pairs,
        up=choice.kernel("up_and_product", **static),
        gradients=choice.kernel("gradients_and_product", **static, in_place=False),
    )
    kernels = [kernel.astype(x.dtype) for kernel in kernels]
    arrays = meshes.align_varying(x, *kernels, a, gate_b, up_b, down_a, down_b)
    return _gated(*arrays, options)
