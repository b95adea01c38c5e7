"""Labels of tokens, as users and checkpoints give them."""

from typing import Any

import jax
import jax.numpy as jnp

IGNORE_INDEX = -100  # Hugging Face's label of a position that is not scored


def as_labels(labels: Any) -> jax.Array:
    """Labels as signed integers of 32 bits or more: smaller types cannot hold V and -100, with which they are compared.

    `labels`: an array of JAX or NumPy. Arrays of other types pass, since the function that takes them checks that.
    """
    labels = jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger) or labels.dtype in (jnp.int8, jnp.int16):
        return labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    return labels
