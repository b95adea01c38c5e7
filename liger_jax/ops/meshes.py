"""Meshes in all ops: operands are aligned inside `shard_map`, and outside of it a silent gather is refused."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType

_CURE = "Wrap the call in jax.shard_map over the axes that shard the tokens (inside it every op just works)."
OF_MODELS = "A model of this package does so by itself, given KernelOptions(batch_axes=…)."
_ARRAYS_OF_LOSS = {  # the arrays that each loss of a head takes of a sharded batch
    "fused_linear_cross_entropy": ("hidden", "weight", "labels"),
    "causal_lm_loss": ("hidden", "head", "labels"),
    "fused_linear_log_probs": ("hidden", "weight", "labels"),
    "fused_linear_token_loss": ("hidden", "weight", "labels", "per_token"),
    "fused_linear_distillation": ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight"),
    "fused_linear_topk_distillation": ("hidden", "weight", "token_ids", "log_probs"),
}


def align_varying(*arrays: Any) -> tuple[Any, ...]:
    """Casts all arrays to vary over every manual mesh axis that any of them varies over.

    Inside `jax.shard_map(..., check_vma=True)` a replicated weight meets sharded tokens. The transpose of this
    cast is the `psum` that the weight's gradient needs; without it a `custom_vjp` would have to sum by itself.
    Outside of it nothing is cast.
    """
    varying = varying_axes(*arrays)
    return tuple(x if x is None else cast(x, varying - _varying(x)) for x in arrays)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes that any of the arrays varies over; `None` entries have none."""
    return frozenset().union(*(_varying(x) for x in arrays if x is not None))


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def cast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, varying over these manual mesh axes, too. Its gradient is summed over those of several devices."""
    # Not over an axis of one device: XLA cannot compile that sum for an array that other axes split. They split no
    # constant, which is on no mesh yet.
    is_on_mesh = not jax.typeof(x).sharding.mesh.empty
    several = axes.intersection(_long_axes(jax.sharding.get_abstract_mesh())) if is_on_mesh else axes
    x = jax.lax.pcast(x, tuple(sorted(several)), to="varying") if several else x
    return _retyped(x, _varying(x) | axes)


def aligned_over_one_device(tree: Any, like: jax.Array) -> Any:
    """The tree's arrays, varying over the manual mesh axes of one device that `like` varies over."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = _varying(like).difference(_long_axes(mesh))
    return jax.tree.map(lambda x: cast(x, axes - _varying(x)), tree) if axes else tree


def on_devices(
    function: Callable[..., Any], *, mesh: Any = None, in_specs: Any, out_specs: Any, axis_names: Collection[str] = ()
) -> Callable[..., Any]:
    """The function in a `jax.shard_map` without `check_vma`, which may stand inside of one with it.

    `axis_names`: the axes that become Manual; `()` for all that are not yet.

    Inside, JAX does not follow what varies: its own attention kernels do not declare the axes that they vary over, and
    Hopper's loss kernels cannot write in place under `check_vma`. Outside, it may follow what varies over axes that are
    Manual already. Where any operand does, all operands are cast to vary over the same axes, so that the gradients of
    the others are summed over them, and the results are said to vary over these axes, too.
    """
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={*axis_names}, check_vma=False
    )

    def on_varying_arrays(*arrays):
        leaves, tree = jax.tree.flatten(arrays)
        varying = varying_axes(*leaves)
        if not varying:
            return mapped(*arrays)

        def run(*leaves):
            leaves = [_retyped(x, frozenset()) for x in align_varying(*leaves)]
            return jax.tree.map(lambda x: _retyped(x, varying), mapped(*jax.tree.unflatten(tree, leaves)))

        return jax.jit(run)(*leaves)  # outside of jit, JAX runs no shard_map that does not check within one that does

    return on_varying_arrays


def _retyped(x: jax.Array, varying: frozenset[str]) -> jax.Array:
    """The array with a type that says it varies over these axes. Nothing is summed in its transpose."""
    return x if _varying(x) == varying else _typed.bind(x, varying=varying)


_typed = Primitive("typed")
_typed.def_abstract_eval(lambda x, *, varying: x.update(manual_axis_type=ManualAxisType(varying=varying)))
_typed.def_impl(lambda x, **_: x)
ad.deflinear2(_typed, lambda cotangent, x, **_: [_retyped(cotangent, x.aval.manual_axis_type.varying)])
mlir.register_lowering(_typed, lambda _, x, **__: [x])
batching.primitive_batchers[_typed] = lambda args, dims, **names: (_typed.bind(*args, **names), dims[0])


def loss_call(op: str, axes: tuple[str, ...]) -> str:
    """The `jax.shard_map` to write around the loss of a batch that mesh axes split, as sentences; "" for another op."""
    if op not in _ARRAYS_OF_LOSS:
        return ""
    names, known = _ARRAYS_OF_LOSS[op], axes or ("data",)
    arrays, tokens = ", ".join(names), repr(known[0] if len(known) == 1 else known)
    heads = [name for name in names if name.endswith(("weight", "head"))]
    specs = ", ".join("P()" if name in heads else f"P({tokens})" for name in names)
    call, out = f"jax.lax.psum({op}({arrays}, reduction='sum'), {tokens}) / num_tokens", "P()"
    if op == "fused_linear_token_loss":
        call = f"jax.lax.psum({op}(loss_fn, {arrays}, denominator=num_tokens)[0], {tokens})"
    elif op == "fused_linear_log_probs":
        call, out = f"{op}({arrays})", f"P({tokens})"
    counted = ", where num_tokens is the number of tokens that are scored" if "num_tokens" in call else ""
    weighted = ""
    if "reduction=" in call:  # as "mean" divides
        weighted = " With token_weights or class_weights, divide by the sum of the weights of these tokens."
    if len(known) > 1:
        tokens_are = f"If the axes {tokens} all split the tokens (leave one out that holds the vocabulary, or nothing)"
    else:
        tokens_are = f"If {tokens} is what splits the tokens"
    return (
        f"{tokens_are}, write jax.shard_map(lambda {arrays}: {call}, mesh=mesh, "
        f"in_specs=({specs}), out_specs={out})({arrays}){counted}. P() gathers a {heads[0]} that is split: if another "
        "axis splits its vocabulary, name that axis in its in_spec and as vocab_axis=…, and not among the tokens'."
        f"{weighted} Under jit nobody knows how arrays are sharded over Auto axes, so arrays that every device has "
        "whole are refused, too."
    )


def axes_of(*arrays: Any) -> tuple[str, ...]:
    """The axes of several devices of the first mesh in the arrays' types, or in the context; () if none."""
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

    `axes`: for a loss, the axes of the mesh as `axes_of` finds them, for the message's `loss_call`.
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
        cure = " ".join(filter(None, (_CURE, loss_call(op, axes or ()), OF_MODELS)))
        raise ValueError(
            f"{op} would be partitioned over {num_devices} devices by the compiler, which gathers its inputs on "
            f"each of them. {cure}"
        )


ad.primitive_jvps[_opaque] = _differentiate
mlir.register_lowering(_opaque, _lower)
batching.primitive_batchers[_opaque] = lambda args, dims, **names: (_opaque.bind(*args, **names), dims[0])
