"""The checks that several ops share. Each message names argument, value, rule and cure."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np


@runtime_checkable
class HoldsArray(Protocol):
    """An object that JAX takes for the array in it: `nnx.Param` and every other `nnx.Variable`."""

    def __jax_array__(self) -> jax.Array: ...


# What the linear losses take, for messages about wrong arguments.
HIDDEN = (
    "the hidden states after the last norm, (..., D), and not a model's whole output: model.hidden_states(tokens) of a "
    "model here, or an attribute such as last_hidden_state of another library's output"
)
HEAD = (
    "the head's matrix, (V, D) or (D, V). The head of a model that ties it to its embedding is the embedding, (V, D); "
    "model.head is that of a model here"
)
ArrayLike = jax.Array | np.ndarray | HoldsArray  # types that public functions accept as arrays


def as_array(op: str, name: str, x: Any, wanted: str = "an array of numbers, of JAX or NumPy") -> jax.Array:
    """x as JAX's array. Raises a TypeError that says what is `wanted` unless JAX takes it for one."""
    reason = None
    try:
        if x is not None:
            return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        reason = error
    given = "None" if x is None else f"a {type(x).__name__}"
    raise TypeError(f"{op}: {name} is {given}, but must be {wanted}.") from reason


def as_real(op: str, name: str, x: Any) -> jax.Array:
    """x as JAX's array of real numbers or of bools, or a TypeError."""
    x = as_array(op, name, x)
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but must be real numbers; cast it.")
    return x


def floating(op: str, *optional: str, **arrays: Any) -> Iterator[jax.Array]:
    """The arguments as JAX's arrays. Raises a TypeError for the first that is not floating point.

    Those whose names are among `optional` may be None, which stays None.
    """
    may_be_none = lambda name, x: x is None and name in optional
    converted: dict[str, Any] = {
        name: None if may_be_none(name, x) else as_array(op, name, x) for name, x in arrays.items()
    }
    for name, x in converted.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{op}: {name} has dtype {x.dtype}, but must be floating point; "
                f"cast it, for example {name}.astype(jnp.float32)."
            )
    return iter(converted.values())


def check_shape(op: str, name: str, x: jax.Array | None, shape: tuple[int, ...], rule: str) -> None:
    """Raises a ValueError unless `x` is None or has `shape`; `rule` says where that shape comes from."""
    if x is not None and x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {x.shape}, but must have shape {shape}: {rule}.")


def check_choice(op: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises a ValueError unless `value` is among `choices`."""
    if isinstance(value, (jax.Array, np.ndarray)) or value not in choices:
        raise ValueError(f"{op}: {name}={value!r} is unknown; pass one of {choices}.")


def check_flag(op: str, **flags: Any) -> None:
    """Raises a TypeError for the first option that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, but must be True or False.")


def check_int(op: str, **numbers: Any) -> None:
    """Raises a TypeError for the first option that is not a Python int."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, but must be a Python int.")


def check_axes(op: str, axis: Any, ndim: int) -> None:
    """Raises a TypeError or ValueError unless `axis` is None, or names axes of an array, each once."""
    if axis is None:
        return
    axes = axis if isinstance(axis, tuple) else (axis,)
    check_int(op, **{"axis" if axis is not axes else f"axis[{i}]": each for i, each in enumerate(axes)})
    if not all(-ndim <= each < ndim for each in axes) or len({each % ndim for each in axes}) < len(axes):
        raise ValueError(f"{op}: axis={axis!r} must name different axes of the arrays, which have {ndim}.")


def check_bool(op: str, name: str, mask: jax.Array | None) -> None:
    """Raises a TypeError unless `mask` is None or bool."""
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"{op}: {name} has dtype {mask.dtype}, but must be bool; pass {name} != 0.")


def broadcast_mask(op: str, where: Any, shape: tuple[int, ...]) -> jax.Array:
    """A bool mask, broadcast to `shape`, or an error."""
    where = as_array(op, "where", where)
    check_bool(op, "where", where)
    fits = where.ndim <= len(shape) and all(
        here in (1, there) for here, there in zip(where.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{op}: where has shape {where.shape}, which does not broadcast to {shape}; add its axes.")
    return jnp.broadcast_to(where, shape)


def check_number(op: str, **numbers: Any) -> None:
    """Raises a TypeError for the first option that is not a Python number: programs are compiled for its value."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{op}: {name} is a {type(value).__name__}, but must be a Python number, because the program is "
                f"compiled for its value; pass float({name}) from outside of jit."
            )


def check_eps(op: str, eps: Any) -> None:
    """Raises unless a norm's eps is a Python number, finite and not negative."""
    check_number(op, eps=eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps={eps} must be finite and ≥ 0, since a root is taken of it; 1e-6 is usual.")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def constant(x: jax.Array, op: str, name: str) -> jax.Array:
    """Returns `x`; raises a TypeError where it is differentiated."""
    return x


@constant.defjvp
def _(op, name, primals, tangents):
    raise TypeError(
        f"{op}: {name} is a constant and has no gradient; pass jax.lax.stop_gradient({name}), or differentiate by "
        "other arguments."
    )


def check_rows(op: str, x: jax.Array, **columns: jax.Array | None) -> None:
    """Raises a ValueError unless `x` has a last axis to normalise, and each of `columns` is as long as that axis."""
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape (), but must have at least one axis to normalise; reshape it to (1,).")
    if x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {x.shape}, whose last axis must have elements to normalise; leave x out.")
    for name, column in columns.items():
        check_shape(op, name, column, x.shape[-1:], "one entry for each element of x's last axis")


def check_layout(op: str, weight_layout: str, prefix: str = "") -> None:
    """Raises a ValueError unless a weight has this layout; the argument's name begins with `prefix`."""
    check_choice(op, f"{prefix}weight_layout", weight_layout, ("vd", "dv"))


def check_mode(op: str, mode: str, chunk_size: int | None, memory_budget_bytes: Any) -> None:
    """Raises a TypeError or ValueError unless a linear loss has this mode, chunks of this size and such a budget."""
    if memory_budget_bytes is not None:
        check_number(op, memory_budget_bytes=memory_budget_bytes)
    check_choice(op, "mode", mode, ("auto", "fast", "lean"))
    if chunk_size is not None and (type(chunk_size) is bool or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"{op}: chunk_size={chunk_size!r} must be a Python int of at least 1; None chooses one.")


def linear_head(
    op: str, hidden: Any, weight: Any, bias: Any, weight_layout: str, prefix: str = "", split: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array | None, int]:
    """Hidden states, weight and bias of a linear loss as JAX's arrays that fit each other, and the vocabulary's size.

    The arguments' names begin with `prefix`. With a `HeadSplit`, the weight is this device's shard. Raises a TypeError
    or ValueError unless they fit.
    """
    as_array(op, f"{prefix}hidden", hidden, HIDDEN)
    as_array(op, f"{prefix}weight", weight, HEAD)
    arrays = {"hidden": hidden, "weight": weight, "bias": bias}
    hidden, weight, bias = floating(op, f"{prefix}bias", **{f"{prefix}{name}": x for name, x in arrays.items()})
    check_layout(op, weight_layout, prefix)
    if hidden.ndim == 0:
        raise ValueError(f"{op}: {prefix}hidden has shape (), but must be (..., D).")
    whole = weight if split is None else split.whole(weight, hidden)
    if whole.ndim != 2 or whole.shape[weight_layout.index("d")] != hidden.shape[-1]:
        wanted = "(V, D)" if weight_layout == "vd" else "(D, V)"
        is_v = whole.ndim == 2 and whole.shape[weight_layout.index("v")] == hidden.shape[-1]
        logits = f". If the last axis of {prefix}hidden is V, these are logits: take cross_entropy" if is_v else ""
        raise ValueError(
            f"{op}: {prefix}weight has shape {whole.shape}, but with {prefix}weight_layout={weight_layout!r} and "
            f"{prefix}hidden of width D={hidden.shape[-1]} it must be {wanted}; "
            f"the other layout is the other value of weight_layout{logits}."
        )
    if hidden.shape[-1] == 0:
        raise ValueError(f"{op}: {prefix}hidden has shape {hidden.shape}, whose last axis, D, must be at least 1.")
    vocab_size = whole.shape[weight_layout.index("v")]
    check_shape(op, f"{prefix}bias", bias, (vocab_size,), "one entry for each row of the vocabulary")
    return hidden, weight, bias, vocab_size


def current_precision(op: str, precision: Any) -> Any:
    """The precision of an op's products, fixed now: the backward is traced after a user's context manager is left.

    `precision`: as `jax.lax.dot_general` takes it; None for `jax.default_matmul_precision`.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]  # run time
    kinds = jax.lax.Precision, jax.lax.DotAlgorithmPreset, jax.lax.DotAlgorithm
    if precision is None or isinstance(precision, kinds):
        return precision
    if isinstance(precision, tuple) and len(precision) == 2:
        return tuple(current_precision(op, each) for each in precision)
    for made in (jax.lax.Precision, jax.lax.DotAlgorithmPreset.__getitem__) if isinstance(precision, str) else ():
        with contextlib.suppress(ValueError, KeyError):
            return made(precision)
    raise ValueError(
        f"{op}: precision={precision!r} is unknown; pass None, a jax.lax.Precision or its name, such as 'highest', or "
        "a jax.lax.DotAlgorithmPreset."
    )
