"""Forward mode: the error of an op that has gradients only, in place of JAX's error about a custom_vjp function.

`jax.grad` also asks for the op's tangents, which it transposes, but only forward mode computes them. So the check is a
primitive for tangents whose transpose is the identity, and which can be neither run nor lowered.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_only(inputs: Any, op: str, cure: str) -> Any:
    """Returns `inputs`, for a computation that has gradients but no forward-mode derivatives."""
    check = lambda x: _checked.bind(x, op=op, cure=cure) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(check, inputs)


def _jvp(primals: Any, tangents: Any, **names: str) -> Any:
    (x,), (tangent,) = primals, tangents
    x = _checked.bind(x, **names)
    return x, tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent, **names)


def _refuse(*_: Any, op: str, cure: str) -> Any:
    raise TypeError(
        f"{op} supports gradients (jax.grad, jax.vjp), but here not forward mode (jax.jvp, jax.linearize, jax.jacfwd): "
        f"its kernels compute no directional derivatives. {cure}"
    )


_checked = Primitive("reverse_only")
_checked.def_abstract_eval(lambda x, **_: x)
_checked.def_impl(lambda x, **_: x)
ad.primitive_jvps[_checked] = _jvp
mlir.register_lowering(_checked, lambda _, x, **__: [x])

_tangent = Primitive("tangent_of_reverse_only")
_tangent.def_abstract_eval(lambda x, **_: x)
_tangent.def_impl(_refuse)
ad.deflinear2(_tangent, lambda cotangent, _, **__: [cotangent])
mlir.register_lowering(_tangent, _refuse)

for _primitive in (_checked, _tangent):
    batching.primitive_batchers[_primitive] = lambda args, dims, _of=_primitive, **names: (
        _of.bind(*args, **names),
        dims[0],
    )
