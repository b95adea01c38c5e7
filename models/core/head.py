"""Logits: the product of hidden states with the head, for calls that ask for them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops._mesh import align_varying


def logit_options_of(config: Any) -> dict[str, Any]:
    """How logits come from the head's product, as the losses take it."""
    return dict(logit_scale=config.logit_scale, logit_softcap=config.final_logit_softcapping)


def head_logits(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """hidden·weightᵀ in float32: both factors have hidden's dtype, and the accumulator is float32.

    The gradient's products take factors of hidden's dtype too, as in the fused loss. JAX's own derivative would compute
    them in float32, since the logits are float32.
    """
    return _head_logits(*align_varying(hidden, weight))


@jax.custom_vjp
def _head_logits(hidden, weight):
    return jnp.einsum("btd,vd->btv", hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _head_logits_backward(residuals, dlogits):
    hidden, weight = residuals
    dlogits = dlogits.astype(hidden.dtype)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, weight.astype(hidden.dtype))
    dweight = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32)
    return dhidden, dweight.astype(weight.dtype)


_head_logits.defvjp(lambda hidden, weight: (_head_logits(hidden, weight), (hidden, weight)), _head_logits_backward)
