"""What keeps ops honest: operands aligned inside shard_map, no silent gather outside, kernels differentiated once."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

_CURE = (
    "Wrap the call in jax.shard_map over the axes that shard the tokens (inside it every op just works), "
    "pass KernelOptions(batch_axes=…) to a model that makes it, or run it on one device."
)


def align_varying(*arrays: Any) -> tuple[Any, ...]:
    """Casts all arrays to vary over every manual mesh axis that any of them varies over.

    Inside `jax.shard_map(..., check_vma=True)` a replicated weight meets sharded tokens. The transpose of this
    cast is the `psum` that the weight's gradient needs; without it a `custom_vjp` would have to sum by itself.
    Elsewhere nothing happens.

    Args:
        *arrays: arrays of any shape and dtype; `None` entries pass through.

    Returns:
        The arrays, in order.
    """
    varying = frozenset().union(*(_varying(x) for x in arrays if x is not None))
    return tuple(x if x is None else _cast(x, varying - _varying(x)) for x in arrays)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _cast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def needs_shard_map(*inputs: jax.Array | None) -> str | None:
    """Says why a computation that the compiler cannot partition must not stand on the inputs' mesh.

    Args:
        *inputs: arrays or tracers; `None` entries are passed over.

    Returns:
        The reason as a sentence, or None where every mesh axis is Manual or of one device.
    """
    for mesh in {jax.typeof(x).sharding.mesh for x in inputs if x is not None}:
        explicit = AxisType.Explicit in mesh.axis_types
        automatic = mesh.size > 1 and AxisType.Auto in mesh.axis_types
        if explicit or automatic:
            return (
                f"it is not partitioned over the mesh axes {mesh.axis_names}; "
                "call it inside jax.shard_map, which makes every axis Manual, or pass KernelOptions(batch_axes=…) "
                "to a model that calls it."
            )
    return None


def opaque(inputs: Any, op: str, twice: str) -> Any:
    """Returns `inputs`, on their way into what the compiler must not partition and nobody can differentiate.

    Neither a Triton call nor a scan over token chunks has a good partitioning: XLA would gather the tokens on
    every device without a word. How many devices a program is for is known only when it is lowered, so the
    check is a primitive that lowers to nothing. Nor has it a derivative: an op's rules, which call it, are its first.

    Args:
        inputs: a tree of arrays.
        op: the op's public name, for the message.
        twice: what has second derivatives, for the message.

    Returns:
        `inputs`.

    Raises:
        ValueError: when the program is lowered for several devices outside of `jax.shard_map`.
        TypeError: when an input is differentiated.
    """
    return jax.tree.map(lambda x: _opaque.bind(x, op=op, twice=twice), inputs)


_opaque = Primitive("opaque")
_opaque.def_abstract_eval(lambda x, *, op, twice: x)


@_opaque.def_impl
def _(x: jax.Array, *, op: str, twice: str) -> jax.Array:
    _check_devices(op, len(x.devices()))
    return x


def _differentiate(primals: Any, tangents: Any, *, op: str, twice: str) -> Any:
    raise TypeError(
        f"{op} is differentiated twice, but its kernels have first derivatives only, by jax.grad; for second ones "
        f"{twice}."
    )


def _lower(context: Any, x: Any, *, op: str, twice: str) -> list[Any]:
    axis_context = context.module_context.axis_context
    manual_axes = getattr(axis_context, "manual_axes", None)
    if manual_axes is None:
        _check_devices(op, getattr(axis_context, "num_devices", 1))
    else:
        mesh = axis_context.mesh
        left = [mesh.shape[axis] for axis in mesh.axis_names if axis not in manual_axes]
        _check_devices(op, max(left, default=1))
    return [x]


def _check_devices(op: str, num_devices: int) -> None:
    if num_devices > 1:
        raise ValueError(
            f"{op} would be partitioned over {num_devices} devices by the compiler, which gathers its inputs on "
            f"each of them. {_CURE}"
        )


ad.primitive_jvps[_opaque] = _differentiate
mlir.register_lowering(_opaque, _lower)
batching.primitive_batchers[_opaque] = lambda args, dims, **names: (_opaque.bind(*args, **names), dims[0])
