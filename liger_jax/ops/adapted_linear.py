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
from liger_jax.pallas_kernels.adapted_linear import config, mosaic_gpu
from liger_jax.pallas_kernels.gated_mlp import config as gated_config
from liger_jax.pallas_kernels.gated_mlp import mosaic_gpu as gated
from liger_jax.pallas_kernels.glu import formulas as glu
from liger_jax.pallas_kernels.tiles import round_up

KERNELS = Kernels("adapted_linear", {"xla": None, "mosaic_gpu": mosaic_gpu}, defaults={"gpu": ("mosaic_gpu",)})
_GATED = Kernels("adapted_gated_mlp", {"xla": None, "mosaic_gpu": gated}, defaults={"gpu": ("mosaic_gpu",)})
# `checkpoint_name` of the sum of a projection and its adapter. Where it is kept, neither of its terms is, which would
# be twice the memory.
ADAPTED = "adapted_projection"
_STEP = 64  # ranks are padded to a multiple of it with zeros


@dataclasses.dataclass(frozen=True)
class _Options:
    """The kernels that an op is compiled with."""

    forward: Kernel
    backward: Kernel
    up: Kernel | None = None
    gradients: Kernel | None = None


def _run(kernel: Kernel, *arrays: Any) -> Any:
    return kernel.run(*kernel.guarded(*arrays))


def _narrow(x: jax.Array, a: jax.Array, axis: int = 0) -> jax.Array:
    """x (..., D) · a, which contracts a's `axis`: (..., R), rounded once."""
    return jax.lax.dot_general(x, a, (((x.ndim - 1,), (axis,)), ((), ())))


def _over_tokens(x: jax.Array, y: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """xᵀ·y, a sum over tokens."""
    tokens = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, y, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


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
    u = _narrow(dy, b.astype(dy.dtype), 1)
    dx = _run(options.backward, dy, kernel, u, a.astype(dy.dtype)) if by_x else None
    dkernel = _over_tokens(x, dy, kernel.dtype) if by_kernel else None
    return dx, dkernel, _over_tokens(x, u, a.dtype) if by_a else None, _over_tokens(t, dy, b.dtype) if by_b else None


_linear_vjp.defvjp(_linear_forward_rule, _linear_backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_linear = jax.jit(_linear_vjp, static_argnums=4, inline=True)


def can_add(x: Any, *kernels: Any) -> bool:
    """Whether a kernel computes these projections with their adapters; if not, XLA computes separate products."""
    place, n = place_of(x, *jax.tree.leaves(kernels)), math.prod(x.shape[:-1])
    for kernel in kernels:
        d, f = kernel.shape
        if not (isinstance(n, int) and config.is_large(n, d, f)):
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
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """x·kernel + (x·a)·b in x.dtype, to which all are rounded; the kernels do not round a's and b's gradients."""
    (x,) = checks.floating("adapted_linear", x=x)
    kernel, a, b = _checked("adapted_linear", x, "", kernel, a, b)
    choice = KERNELS.choose(implementation, x, jax.ShapeDtypeStruct(kernel.shape, x.dtype), place=place_of(x))
    if choice.name == "xla":
        return _plain(x, kernel, a, b)
    rank = round_up(a.shape[1], _STEP)
    a, b = _placed(a, 1, 0, rank), _placed(b, 0, 0, rank)
    arrays = meshes.align_varying(x, kernel, a, b)
    return _linear(*arrays, _options(choice))


def _checked(op: str, x: jax.Array, of: str, kernel: Any, a: Any, b: Any, width: int | None = None) -> list[jax.Array]:
    """A projection's arrays as JAX's arrays that fit x, the kernel in x.dtype.

    `of`: its name in messages. `width`: of its input, if that is not x.
    """
    names = [f"{of}{name}" for name in ("kernel", "a", "b")]
    kernel, a, b = arrays = list(checks.floating(op, **dict(zip(names, (kernel, a, b), strict=True))))
    for name, array, axes in zip(names, arrays, ("(D, F)", "(D, rank)", "(rank, F)"), strict=True):
        if array.ndim != 2:
            raise ValueError(f"{op}: {name} has shape {array.shape}, but must be {axes}; reshape it.")
    if x.ndim == 0 or kernel.shape[0] != (x.shape[-1] if width is None else width):
        of_x = f"x has shape {x.shape}" if width is None else f"its input has {width} columns"
        raise ValueError(
            f"{op}: {of_x} and {names[0]} has shape {kernel.shape}, but they must be (..., D) and (D, F); transpose a "
            "kernel that is (F, D)."
        )
    checks.check_shape(op, names[1], a, (kernel.shape[0], a.shape[1]), f"it is (D, rank), as {names[0]} is (D, F)")
    checks.check_shape(op, names[2], b, (a.shape[1], kernel.shape[1]), f"it is (rank, F), with {names[1]}'s rank")
    return [kernel.astype(x.dtype), a, b]


def _plain(x, kernel, a, b):
    return x @ kernel + (x @ a.astype(x.dtype)) @ b.astype(x.dtype)


def _options(choice: Choice, **more: Any) -> _Options:
    kernels = (choice.kernel("sum_of_products", transposed=transposed) for transposed in (False, True))
    return _Options(*kernels, **more)


# --- the gated feed-forward -------------------------------------------------------------------------------------------


def _gated_forward(x, gate_kernel, up_kernel, down_kernel, a, gate_b, up_b, down_a, down_b, options):
    a, gate_b, up_b, down_a, down_b = (array.astype(x.dtype) for array in (a, gate_b, up_b, down_a, down_b))
    t = _narrow(x, a)
    gate = _run(options.forward, x, gate_kernel, t, gate_b)
    up, h = _run(options.up, x, up_kernel, gate, t, up_b)
    down_t = _narrow(h, down_a)
    return _run(options.forward, h, down_kernel, down_t, down_b), t, gate, up, down_t


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def _gated_vjp(x, gate_kernel, up_kernel, down_kernel, a, gate_b, up_b, down_a, down_b, options):
    return _gated_forward(x, gate_kernel, up_kernel, down_kernel, a, gate_b, up_b, down_a, down_b, options)[0]


def _gated_forward_rule(*primals_and_options):
    *primals, options = primals_and_options
    arrays, needs = _needs(primals)
    y, t, gate, up, down_t = _gated_forward(*arrays, options=options)
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

    down_u = _narrow(dy, down_b, 1)
    dgate, dup, h = _run(options.gradients, dy, down_kernel, gate, up, down_u, down_a)
    give(3, h, dy)
    give(7, h, down_u)
    give(8, down_t, dy)
    u = _narrow(dgate, gate_b, 1) + _narrow(dup, up_b, 1)
    give(1, x, dgate)
    give(2, x, dup)
    give(4, x, u)
    give(5, t, dgate)
    give(6, t, dup)
    if wanted[0]:
        last = jax.lax.dot_general(dup, up_kernel, (((dup.ndim - 1,), (1,)), ((), ())))
        gradients[0] = _run(options.backward, dgate, gate_kernel, u, a) + last
    return tuple(gradients)


_gated_vjp.defvjp(_gated_forward_rule, _gated_backward_rule, symbolic_zeros=True)
_gated = jax.jit(_gated_vjp, static_argnums=9, inline=True)


def can_gate(x: Any, up_kernel: Any, activation: str) -> bool:
    """Whether kernels also compute the gate of such projections; `can_add` comes first."""
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
    op = "adapted_gated_mlp"
    (x,) = checks.floating(op, x=x)
    gate, up = (_checked(op, x, of, kernels[i], *adapters[i]) for i, of in enumerate(("gate_", "up_")))
    checks.check_shape(op, "up_kernel", up[0], gate[0].shape, "it is (D, F), as gate_kernel is")
    down = _checked(op, x, "down_", kernels[2], *adapters[2], width=gate[0].shape[1])
    kernels, adapters = zip(*((own, pair) for own, *pair in (gate, up, down)), strict=True)
    kernel = jax.ShapeDtypeStruct(kernels[1].shape, x.dtype)
    choice = _GATED.choose(implementation, x, kernel, place=place_of(x), activation=activation)
    if choice.name == "xla":
        gate, up = (_plain(x, kernels[i], *adapters[i]) for i in (0, 1))
        return _plain(glu.product(gate, up, activation=activation), kernels[2], *adapters[2])
    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = adapters
    first, rank = gate_a.shape[1], round_up(gate_a.shape[1] + up_a.shape[1], _STEP)
    down_rank = round_up(down_a.shape[1], _STEP)
    a = _placed(gate_a, 1, 0, rank) + _placed(up_a, 1, first, rank)
    gate_b, up_b = _placed(gate_b, 0, 0, rank), _placed(up_b, 0, first, rank)
    down_a, down_b = _placed(down_a, 1, 0, down_rank), _placed(down_b, 0, 0, down_rank)
    static: dict[str, Any] = dict(activation=activation, precision=checks.current_precision(op, None))
    options = _options(
        KERNELS.named(choice.name),
        up=choice.kernel("up_and_product", **static),
        gradients=choice.kernel("gradients_and_product", **static, in_place=False),
    )
    arrays = meshes.align_varying(x, *kernels, a, gate_b, up_b, down_a, down_b)
    return _gated(*arrays, options)
