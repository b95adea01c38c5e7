"""Fused multiply-adds in Pallas-Triton.

When XLA compiles a Triton kernel, each product and each sum is a separate instruction. Other users of Triton
contract the two into one. Without that a norm's backward issues a third more instructions, and memory waits for them.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from liger_jax.pallas_kernels import _triton as pltriton

MultiplyAdd = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """x·y + z of float32 arrays of one shape, rounded once."""
    result = jax.ShapeDtypeStruct(z.shape, z.dtype)
    return pltriton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=(x, y, z), constraints="=f,f,f,f", pack=1, result_shape_dtypes=[result]
    )[0]


def contracted(formula: Callable[..., Any], multiply_add: MultiplyAdd = multiply_add) -> Callable[..., Any]:
    """The formula, with `multiply_add` for each float32 product that only one sum or difference uses."""

    @functools.wraps(formula)
    def wrapped(*args):
        jaxpr, types = jax.make_jaxpr(formula, return_shape=True)(*args)
        results = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args), multiply_add)
        return jax.tree.unflatten(jax.tree.structure(types), results)

    return wrapped


def _evaluate(jaxpr: Any, consts: list[Any], args: list[Any], multiply_add: MultiplyAdd) -> list[Any]:
    """The jaxpr's results. The product that a `multiply_add` replaces is still made, and the compiler drops it."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(x):
        return x.val if isinstance(x, core.Literal) else values[x]

    used = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    num_uses = collections.Counter(x for x in used if not isinstance(x, core.Literal))
    products = {}
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [read(x) for x in eqn.invars]
        free = [i for i, x in enumerate(eqn.invars) if not isinstance(x, core.Literal) and x in products]
        if name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, operands, multiply_add)
        elif name in ("add", "sub") and free:
            (x, y), z = products[eqn.invars[free[0]]], operands[1 - free[0]]
            if name == "sub":  # x·y − z or z − x·y
                x, z = (x, -z) if free[0] == 0 else (-x, z)
            shape = eqn.outvars[0].aval.shape
            results = [multiply_add(*(jnp.broadcast_to(jnp.float32(value), shape) for value in (x, y, z)))]
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values |= zip(eqn.outvars, results, strict=True)
        factors = _factors(eqn, operands)
        if factors and num_uses[eqn.outvars[0]] == 1:
            products[eqn.outvars[0]] = factors
    return [read(x) for x in jaxpr.outvars]


def _factors(eqn: Any, operands: list[Any]) -> tuple[Any, Any] | None:
    """The factors of a float32 product; None if the equation is something else."""
    if eqn.outvars[0].aval.dtype != jnp.float32:
        return None
    if eqn.primitive.name == "mul":
        return operands[0], operands[1]
    is_square = eqn.primitive.name == "square" or eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2
    return (operands[0], operands[0]) if is_square else None
