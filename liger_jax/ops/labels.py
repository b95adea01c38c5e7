"""Labels of tokens, as users and checkpoints give them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax.ops import checks

IGNORE_INDEX = -100  # Hugging Face's label of a position that is not scored


def as_labels(labels: Any, op: str = "", name: str = "labels") -> jax.Array:
    """Labels as signed integers of 32 bits or more: smaller types cannot hold V and -100, with which they are compared.

    `labels`: an array of JAX or NumPy. Arrays of other types pass, since the function that takes them checks that.
    Raises a ValueError where NumPy's do not fit into the 32 bits that JAX keeps of them; in an `op`, a TypeError for
    what is no array.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.itemsize == 8 and labels.dtype.kind in "iu":
        signed = labels.astype(np.int64)  # -100 may have been written without its sign
        wide = signed[signed != signed.astype(np.int32)]
        if wide.size and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
            raise ValueError(
                f"labels, or ids of tokens, hold {wide[0]}, of which JAX would keep 32 bits. They must be in [0, V), "
                "or the label that is ignored."
            )
    labels = checks.as_array(op, name, labels, "integers, of JAX or NumPy") if op else jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger) or labels.dtype in (jnp.int8, jnp.int16):
        return labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    return labels
