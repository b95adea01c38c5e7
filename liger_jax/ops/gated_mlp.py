"""The gated feed-forward as one op. Its backward computes everything between the products in one pass."""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.ops import checks, glu, layout, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Choice, Implementation, Kernel, Kernels
from liger_jax.ops.place import place_of
from liger_jax.pallas_kernels.gated_mlp import config, mosaic_gpu, triton, xla
from liger_jax.pallas_kernels.glu import formulas as glu_formulas

_OP = "gated_mlp"
_OPS = {"silu": glu.swiglu, "gelu_tanh": glu.geglu, "gelu": functools.partial(glu.geglu, approximate=False)}
_MODULES = {"xla": xla, "triton": triton, "mosaic_gpu": mosaic_gpu}
# `checkpoint_name` of x · up_kernel, for remat policies that save products: on Hopper it is made by our kernel, which
# such a policy does not recognise as a product.
UP_PROJECTION = "up_projection"


@dataclasses.dataclass(frozen=True)
class _Options:
    """The kernels and options that an op is compiled with."""

    forward: Kernel  # the kernel of up and the gated product
    backward: Kernel  # the kernel of the gradients of gate and up, and of the gated product
    input_gradient: Kernel  # the kernel of x's gradient, of those of gate and up
    activation: str  # as `gated_mlp` takes it
    recomputed: bool  # as `gated_mlp` takes it
    precision: Any  # of the products
    backward_is_xla: bool  # whether XLA compiles `backward`, and not a kernel

    def times(self, x: jax.Array, kernel: jax.Array, axis: int = 0) -> jax.Array:
        """Contracts the last axis of x with `axis` of a kernel."""
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (axis,)), ((), ())), precision=self.precision)

    def kernel_gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """x (..., D), dy (..., F) → (D, F), a sum over tokens."""
        tokens = tuple(range(x.ndim - 1))
        return jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), precision=self.precision)

    def after(self, done: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays, for work that must wait until `done` is computed and the memory of its inputs is free.

        XLA's backward is not ordered, since on several devices the work would wait for a gradient's all-reduce.
        """
        return arrays if self.backward_is_xla else jax.lax.optimization_barrier((arrays, done))[0]


def _forward(x, gate_kernel, up_kernel, down_kernel, options):
    gate = options.times(x, gate_kernel)
    up, h = options.forward.run(*options.forward.guarded(x, up_kernel, gate))
    return options.times(h, down_kernel), gate, up


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gated_mlp_vjp(x, gate_kernel, up_kernel, down_kernel, options):
    return _forward(x, gate_kernel, up_kernel, down_kernel, options)[0]


def _forward_rule(*primals_and_options):
    *primals, options = primals_and_options
    # A residual's shape says which gradients are wanted. Its place in the tree of residuals must not: JAX 0.10 gives a
    # backward rule the tree that was traced last.
    needs = [jnp.zeros(int(primal.perturbed), jnp.float32) for primal in primals]
    x, *kernels = (primal.value for primal in primals)
    y, gate, up = _forward(x, *kernels, options=options)
    if options.recomputed:
        return y, (needs, x, None, None, *kernels)
    x_if_needed = x if primals[1].perturbed or primals[2].perturbed else jnp.zeros(0, x.dtype)
    return y, (needs, x_if_needed, gate, checkpoint_name(up, UP_PROJECTION), *kernels)


def _backward_rule(options, residuals, dy):
    shapes, x, gate, up, *kernels = residuals
    needs = [shape.size == 1 for shape in shapes]
    if options.recomputed:
        return _gradients_in_halves(needs, x, *kernels, dy=dy, options=options)
    return _gradients(needs, x, gate, up, *kernels, dy=dy, options=options)


def _gradients_in_halves(needs, x, gate_kernel, up_kernel, down_kernel, dy, options):
    """Recomputes gate and up, and then the gradients, one half of F after the other, in half the memory."""
    middle = 0 if options.backward_is_xla else _middle(x, gate_kernel)
    halves = []
    for half in (slice(middle), slice(middle, None)) if middle else (slice(None),):
        # Without the barrier, the compiler would keep the forward's gate and up, and compute both halves at once.
        x, dy, halves = jax.lax.optimization_barrier((x, dy, halves))
        own = gate_kernel[:, half], up_kernel[:, half], down_kernel[half]
        gate, up = options.times(x, own[0]), options.times(x, own[1])
        halves.append(_gradients(needs, x, gate, up, *own, dy, options))
    dxs, *kernel_gradients = zip(*halves, strict=True)
    dx = functools.reduce(operator.add, dxs) if needs[0] else None
    joined = [
        jnp.concatenate(both, axis) if need else None
        for both, axis, need in zip(kernel_gradients, (1, 1, 0), needs[1:], strict=True)
    ]
    return dx, *joined


def _gradients(needs, x, gate, up, gate_kernel, up_kernel, down_kernel, dy, options):
    by_x, by_gate, by_up, by_down = needs
    dx = dgate_kernel = dup_kernel = ddown_kernel = None
    if not (by_x or by_gate or by_up):
        h = glu_formulas.product(gate, up, activation=options.activation)
        return None, None, None, options.kernel_gradient(h, dy)
    # This order frees the gated product h first, and then x. Where down_kernel is frozen, h is made in vain, except by
    # XLA.
    dgate, dup, h = options.backward.run(*options.backward.guarded(dy, down_kernel, gate, up))
    if by_down:
        ddown_kernel = options.kernel_gradient(h, dy)
        dgate, dup = options.after(ddown_kernel, dgate, dup)
    if by_gate:
        dgate_kernel = options.kernel_gradient(x, dgate)
    if by_up:
        dup_kernel = options.kernel_gradient(x, dup)
    if by_x:
        dgate, dup = options.after((dgate_kernel, dup_kernel), dgate, dup)
        both = options.input_gradient.guarded(dgate, dup, gate_kernel, up_kernel)
        dx = options.input_gradient.run(*both)
    return dx, dgate_kernel, dup_kernel, ddown_kernel


def _middle(x, kernel):
    """Where F is cut in two, a multiple of 64 for the copy engine; 0 if the halves would be too small."""
    middle = kernel.shape[1] // 128 * 64
    return middle if config.is_large(math.prod(x.shape[:-1]), middle) else 0


_gated_mlp_vjp.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_gated_mlp = jax.jit(_gated_mlp_vjp, static_argnums=4, inline=True)


def gated_mlp(
    x: Float[ArrayLike, "*batch D"],
    gate_kernel: Float[ArrayLike, "D F"],
    up_kernel: Float[ArrayLike, "D F"],
    down_kernel: Float[ArrayLike, "F D"],
    *,
    activation: str = "silu",
    recomputed: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """The gated feed-forward without biases: y = (act(x · gate_kernel) · (x · up_kernel)) · down_kernel.

    Values and gradients equal those of three products and `swiglu` or `geglu`, with the same rounding; but Hopper's
    kernel sums both terms of x's gradient in float32, and rounds them once. The gradients need less memory and fewer
    passes. `x`, gate and up are kept for the backward, or only `x`. The backward computes the gradients of gate and up
    and their gated product in one pass, on a GPU in place, and on Hopper in the epilogue of a product. The order of its
    products frees arrays early. Gradients that are not needed are not computed.

    On a mesh with Explicit axes, the op is three separate products and `swiglu` or `geglu`.

    Args:
        x: (..., D), any float dtype.
        gate_kernel: (D, F) in x.dtype.
        up_kernel: (D, F) in x.dtype.
        down_kernel: (F, D) in x.dtype.
        activation: "silu", or "gelu_tanh" or "gelu", which is exact: see `geglu`.
        recomputed: whether gate and up are recomputed in the backward instead of being kept. If a Pallas kernel
            computes their gradients, large ones are recomputed for one half of F at a time, which takes half the
            memory. A `jax.checkpoint` around the op then does not recompute any product. Leave this False if the policy
            of a `jax.checkpoint` keeps products. On Hopper, up is not the result of a plain product; such a policy can
            keep it by its `checkpoint_name`, "up_projection".
        precision: of the products; None for `jax.default_matmul_precision`.
        implementation: of the operations between the products: None to choose, or "xla", "triton" or "mosaic_gpu"
            (Hopper).

    Returns:
        (..., D) in x.dtype.

    Raises:
        ValueError: F is sharded over a mesh with Explicit axes.

    Example:
        >>> x, kernel = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> gated_mlp(x, kernel, kernel, kernel.T)[0].tolist()
        [34.2926, 34.2926, 34.2926]

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).
    """
    checks.check_flag(_OP, recomputed=recomputed)
    arrays = x, gate_kernel, up_kernel, down_kernel = _checked(activation, x, gate_kernel, up_kernel, down_kernel)
    if any(map(layout.is_explicit, arrays)):
        dot = functools.partial(jnp.matmul, precision=precision)
        gated = _OPS[activation](dot(x, gate_kernel), dot(x, up_kernel), implementation=implementation)
        axes = [layout.names(spec[i]) for spec, i in ((layout.spec_of(gated), -1), (layout.spec_of(down_kernel), 0))]
        if axes[0] and axes[0] == axes[1]:
            raise ValueError(
                f"{_OP}: the mesh axes {axes[0]} split F, so that each device would have a summand of the result. Call "
                f"it inside jax.shard_map, and sum by jax.lax.psum over {axes[0]}; or gather down_kernel's F and that "
                "of the others by jax.sharding.reshard."
            )
        return dot(gated, down_kernel)
    forward, backward = _choose(x, up_kernel, activation, recomputed, implementation)
    precision = checks.current_precision(_OP, precision)
    static = {"activation": activation, "precision": precision}
    options = _Options(
        forward.kernel("up_and_product", **static),
        backward.kernel("gradients_and_product", **static, in_place=recomputed),
        backward.kernel("input_gradient", precision=precision),
        activation,
        recomputed,
        precision,
        backward_is_xla=backward.name == "xla",
    )
    return _gated_mlp(*meshes.align_varying(*arrays), options)


def _choose(x, up_kernel, activation, recomputed, implementation) -> tuple[Choice, Choice]:
    """The implementations of the forward and of the backward."""
    glu_kernels = glu.KERNELS["swiglu" if activation == "silu" else "geglu"]
    forward, backward = list(glu_kernels.defaults.get("gpu", ())), ["triton"]
    is_large = config.is_large(math.prod(x.shape[:-1]), up_kernel.shape[1])
    if is_large and x.shape[-1] <= config.DEEPEST_UP:
        forward.insert(0, "mosaic_gpu")
    # Hopper's kernel writes beside gate and up, Triton's pass over them. So a token takes 2.5·F numbers in halves and
    # 5·F as a whole on Hopper, and 3·F in Triton.
    if _middle(x, up_kernel) > 0 if recomputed else is_large:
        backward.insert(0, "mosaic_gpu")

    place = place_of(x, up_kernel)

    def choose(names: list[str]) -> Choice:
        kernels = Kernels(_OP, _MODULES, defaults={"gpu": tuple(names)})
        return kernels.choose(implementation, x, up_kernel, place=place, activation=activation)

    return choose(forward), choose(backward)


def _checked(activation, x, gate_kernel, up_kernel, down_kernel) -> tuple[Any, ...]:
    """The arguments as JAX's arrays, checked."""
    checks.check_choice(_OP, "activation", activation, tuple(_OPS))
    kernels = dict(gate_kernel=gate_kernel, up_kernel=up_kernel, down_kernel=down_kernel)
    arrays = x, gate_kernel, up_kernel, down_kernel = tuple(checks.floating(_OP, x=x, **kernels))
    if x.ndim == 0 or gate_kernel.ndim != 2 or gate_kernel.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and gate_kernel {gate_kernel.shape}, but they must be (..., D) and (D, F); "
            "pass a kernel in Flax's layout; transpose it if it is (F, D)."
        )
    checks.check_shape(_OP, "up_kernel", up_kernel, gate_kernel.shape, "it is (D, F), as gate_kernel is")
    checks.check_shape(_OP, "down_kernel", down_kernel, gate_kernel.shape[::-1], "it is (F, D)")
    for name, kernel in zip(kernels, arrays[1:], strict=True):
        if kernel.dtype != x.dtype:
            raise ValueError(
                f"{_OP}: {name} has dtype {kernel.dtype} and x {x.dtype}, but all must have one, in which the products "
                f"are; cast it, for example {name}.astype(x.dtype)."
            )
    return arrays
