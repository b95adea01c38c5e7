"""How an optimizer's state lies on a mesh: like its parameters."""

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding


def state_shardings(optimizer: Any, state: Any, params: Any, of_params: Any, whole: NamedSharding) -> Any:
    """The shardings of an optimizer's state, whose leaves follow parameters or are scalars.

    Args:
        optimizer: the one that made it.
        state: the state.
        params: the parameters.
        of_params: their shardings.
        whole: the sharding of scalars.

    Returns:
        A tree of `NamedSharding` with the structure of the state.

    Raises:
        ValueError: a leaf is neither.
    """
    # A Variable has the attributes of its value.
    has_rule = lambda x: hasattr(x, "split_like") and not isinstance(x, nnx.Variable)
    unruled = object()
    shape_of = lambda x: getattr(x, "shape", ())  # a state may hold Python numbers
    of_other = lambda x: unruled if shape_of(x) else whole

    def like(x, param, sharding):
        if isinstance(x, optax.MaskedNode):
            return x
        if has_rule(x):
            return x.split_like(sharding)
        return sharding if shape_of(x) == param.shape else of_other(x)

    found = optax.tree_map_params(
        lambda params: jax.eval_shape(optimizer.init, params),
        like,
        state,
        params,
        of_params,
        transform_non_params=of_other,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode) or has_rule(x),
    )
    for keys, sharding in jax.tree_util.tree_leaves_with_path(found):
        if sharding is unruled:
            raise ValueError(
                f"shardings: the optimizer's state has an array at {jax.tree_util.keystr(keys)} that is neither a "
                "scalar nor of its parameter's shape, so that nothing says how it is split. Put it into an object with "
                "a method split_like(sharding), or hold another state."
            )
    return found
