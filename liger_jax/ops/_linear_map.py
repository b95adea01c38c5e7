"""Linear maps with our own transpose: an op whose tangents are plain JAX, and whose gradients are kernels.

An op's `jax.custom_jvp` rule returns `linear_map(…)` as its tangent. Forward mode evaluates the map. `jax.grad`
transposes it and keeps only the residuals, so it costs as much as a `jax.custom_vjp`.
`jax.custom_derivatives.linear_call` has no derivatives with respect to residuals, which second derivatives need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Map = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def linear_map(forward: Map, transpose: Map, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """forward(residuals, tangents), which is linear in the tangents.

    `forward`: plain JAX, so that it has derivatives by the residuals. `transpose`: makes the tangents' cotangents from
    the residuals and the results' cotangents; it has derivatives. `tangents`: arrays that vary over the same mesh axes
    as the residuals do.
    """
    leaves, structure = jax.tree.flatten(tuple(residuals))
    num_residuals = len(leaves)
    flat = lambda *arrays: forward(structure.unflatten(arrays[:num_residuals]), arrays[num_residuals:])
    of_leaves = lambda leaves, cotangents: transpose(structure.unflatten(leaves), cotangents)
    return _bind(flat, of_leaves, leaves, tangents)


def _bind(flat, transpose, residuals, tangents):
    jaxpr = jax.make_jaxpr(flat)(*residuals, *tangents)
    return _map.bind(*residuals, *tangents, jaxpr=jaxpr, transpose=transpose, num_residuals=len(residuals))


def _run(*arrays, jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*arrays)


def _jvp(primals, tangents, *, num_residuals, **params):
    residuals, arrays = primals[:num_residuals], primals[num_residuals:]
    of_map = lambda arrays: _map.bind(*residuals, *arrays, num_residuals=num_residuals, **params)
    results, terms = of_map(arrays), []
    if any(type(t) is not ad.Zero for t in tangents[num_residuals:]):
        terms.append(of_map([ad.instantiate_zeros(t) for t in tangents[num_residuals:]]))
    moving = [
        i for i, t in enumerate(tangents[:num_residuals]) if type(t) is not ad.Zero and _is_floating(residuals[i])
    ]
    if moving:

        def of_residuals(*moved):
            merged = list(residuals)
            for i, x in zip(moving, moved, strict=True):
                merged[i] = x
            return _run(*merged, *arrays, **params)

        terms.append(jax.jvp(of_residuals, [residuals[i] for i in moving], [tangents[i] for i in moving])[1])
    return results, [sum(rest, first) for first, *rest in zip(*terms, strict=True)]


def _transpose(cotangents, *arrays, transpose, num_residuals, **_):
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]
    return [None] * num_residuals + list(transpose(arrays[:num_residuals], cotangents))


def _batch(arrays, dims, *, jaxpr, transpose, num_residuals):
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    is_linear = [i >= num_residuals for i in range(len(arrays))]

    def first(x, dim, linear):
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jnp.broadcast_to(x, (size, *x.shape)) if linear else x

    axes = [None if d is None and not linear else 0 for d, linear in zip(dims, is_linear, strict=True)]
    arrays = [first(*each) for each in zip(arrays, dims, is_linear, strict=True)]
    residual_axes = tuple(axes[:num_residuals])
    flat = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes)

    def batched(residuals, cotangents):
        of_one = lambda residuals, cotangents: list(transpose(residuals, cotangents))
        return jax.vmap(of_one, in_axes=(residual_axes, 0))(tuple(residuals), list(cotangents))

    results = _bind(flat, batched, arrays[:num_residuals], arrays[num_residuals:])
    return results, [0] * len(results)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


_map = Primitive("linear_map")
_map.multiple_results = True
_map.def_impl(_run)
_map.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[_map] = _jvp
ad.primitive_transposes[_map] = _transpose
batching.primitive_batchers[_map] = _batch
mlir.register_lowering(_map, mlir.lower_fun(_run, multiple_results=True))
