"""What all ops do about meshes: they align operands inside `shard_map`, and refuse a silent gather outside of it."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_CURE = (
    "Wrap the call in jax.shard_map over the axes that shard the tokens (inside it every op just works), "
    "pass KernelOptions(batch_axes=…) to a model that makes it, or run it on one device."
)


def align_varying(*arrays: Any) -> tuple[Any, ...]:
    """Casts all arrays to vary over every manual mesh axis that any of them varies over.

    Inside `jax.shard_map(..., check_vma=True)` a replicated weight meets sharded tokens. The transpose of this
    cast is the `psum` that the weight's gradient needs; without it a `custom_vjp` would have to sum by itself.
    Outside of it nothing is cast.

    Args:
        *arrays: arrays of any shape and dtype; `None` entries stay None.

    Returns:
        The arrays, in order.
    """
    varying = varying_axes(*arrays)
    return tuple(x if x is None else cast(x, varying - _varying(x)) for x in arrays)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes that any of the arrays varies over; `None` entries have none."""
    return frozenset().union(*(_varying(x) for x in arrays if x is not None))


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def cast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, varying over these manual mesh axes, too."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def loss_call(op: str, axes: tuple[str, ...]) -> str:
    """The `jax.shard_map` to write around the loss of a batch that mesh axes split, as a sentence.

    Args:
        op: the loss's public name.
        axes: the axes of the user's mesh; () if they are not known.
    """
    known = axes or ("data",)
    tokens = repr(known[0] if len(known) == 1 else known)
    return (
        f"If {tokens} is what splits the tokens, write jax.shard_map(lambda hidden, weight, labels: "
        f"jax.lax.psum({op}(hidden, weight, labels, reduction='sum'), {tokens}) / num_tokens, mesh=mesh, "
        f"in_specs=(P({tokens}), P(), P({tokens})), out_specs=P())(hidden, weight, labels)."
    )


def axes_of(*arrays: Any) -> tuple[str, ...]:
    """The axes of several devices of the first mesh that the arrays' types, or the context, tell of; () if none."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if x is not None] + [jax.sharding.get_abstract_mesh()]
    return next(filter(None, map(_long_axes, meshes)), ())


def _long_axes(mesh: Any) -> tuple[str, ...]:
    return tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)


def opaque(inputs: Any, op: str, second_derivatives: str, axes: tuple[str, ...] | None = None) -> Any:
    """Returns `inputs`, for a computation that the compiler must not partition, and that has no derivative.

    XLA cannot partition a Triton call or a scan over chunks of tokens: it would silently gather the tokens on every
    device. The number of devices that a program is compiled for is known only when the program is lowered. So the check
    is a primitive that lowers to nothing. The primitive has no derivative either. An op's differentiation rules call
    it, so only a second differentiation of the op reaches it.

    Args:
        inputs: a tree of arrays.
        op: the op's public name, for the message.
        second_derivatives: how to get them, for the message.
        axes: for a loss, the axes of the mesh as `axes_of` tells them, for the message's `loss_call`.

    Returns:
        The inputs, unchanged.

    Raises:
        ValueError: when the program is lowered for several devices outside of `jax.shard_map`.
        TypeError: when an input is differentiated.
    """
    names = dict(op=op, second_derivatives=second_derivatives, axes=axes)
    return jax.tree.map(lambda x: _opaque.bind(x, **names), inputs)


_opaque = Primitive("opaque")
_opaque.def_abstract_eval(lambda x, **_: x)


@_opaque.def_impl
def _(x: jax.Array, *, op: str, second_derivatives: str, axes: tuple[str, ...] | None) -> jax.Array:
    _check_devices(op, len(x.devices()), axes)
    return x


def _differentiate(primals: Any, tangents: Any, *, op: str, second_derivatives: str, **_: Any) -> Any:
    raise TypeError(
        f"{op} is differentiated twice, but its kernels have first derivatives only, by jax.grad; for second ones "
        f"{second_derivatives}."
    )


def _lower(context: Any, x: Any, *, op: str, second_derivatives: str, axes: tuple[str, ...] | None) -> list[Any]:
    axis_context = context.module_context.axis_context
    manual_axes = getattr(axis_context, "manual_axes", None)
    if manual_axes is None:
        mesh = getattr(axis_context, "abstract_mesh", None)
        if axes == () and mesh is not None:
            axes = _long_axes(mesh)
        _check_devices(op, getattr(axis_context, "num_devices", 1), axes)
    else:
        mesh = axis_context.mesh
        left = [mesh.shape[axis] for axis in mesh.axis_names if axis not in manual_axes]
        _check_devices(op, max(left, default=1), axes)
    return [x]


def _check_devices(op: str, num_devices: int, axes: tuple[str, ...] | None) -> None:
    if num_devices > 1:
        call = "" if axes is None else f" {loss_call(op, axes)}"
        raise ValueError(
            f"{op} would be partitioned over {num_devices} devices by the compiler, which gathers its inputs on "
            f"each of them. {_CURE}{call}"
        )


ad.primitive_jvps[_opaque] = _differentiate
mlir.register_lowering(_opaque, _lower)
batching.primitive_batchers[_opaque] = lambda args, dims, **names: (_opaque.bind(*args, **names), dims[0])
