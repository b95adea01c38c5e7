"""The stream between layers that take more than hidden states: each layer's own inputs, and keys of earlier layers."""

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.models.core.remat import INPUT


class Stream(NamedTuple):
    """Hidden states and further inputs of later layers, with the dtype and the shape of the hidden states."""

    hidden: Float[Array, "B T D"]
    own_inputs: tuple[Float[Array, "B T P"], ...] = ()  # of each layer to come, the next first
    # By the type of attention: the keys and values (B, T, K, H) of the last layer of this type that makes some.
    keys: dict[str, tuple[jax.Array, jax.Array]] = {}

    @property
    def dtype(self) -> Any:
        """The hidden states' dtype."""
        return self.hidden.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The hidden states' shape."""
        return self.hidden.shape


def as_input(x: Any) -> Any:
    """The input of a layer, whose hidden states have the name by which rematerialisation keeps them."""
    named = checkpoint_name(x.hidden if isinstance(x, Stream) else x, INPUT)
    return x._replace(hidden=named) if isinstance(x, Stream) else named
