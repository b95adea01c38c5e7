"""How an optimizer's state is sharded over a mesh: like its parameters."""

import dataclasses
import itertools
import math
import warnings
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_LARGE = 65_536  # numbers: an array of less is no memory, and every device may have it whole without a word


def state_shardings(optimizer: Any, state: Any, params: Any, of_params: Any, whole: NamedSharding) -> Any:
    """The shardings of an optimizer's state, whose arrays follow their parameters where they have axes of them."""

    def of_subtree(state, params, shardings):
        """What an optimizer holds for a tree of parameters; for one of them it may be a tree of arrays."""
        if isinstance(state, optax.MaskedNode):  # for a parameter or for a subtree
            return state
        children, structure = jax.tree.flatten(params, is_leaf=lambda x: x is not params)
        if jax.tree_util.treedef_is_leaf(structure):
            return jax.tree.map(lambda x: _Placed(_like(_shape(x), params.shape, shardings), shardings), state)
        parts = zip(structure.flatten_up_to(state), children, structure.flatten_up_to(shardings), strict=True)
        return jax.tree.unflatten(structure, [of_subtree(*part) for part in parts])

    placed = optax.tree_map_params(
        lambda params: jax.eval_shape(optimizer.init, params),
        of_subtree,
        state,
        params,
        of_params,
        transform_non_params=lambda x: _Placed(whole, None),
        is_leaf=lambda _: True,
    )
    return jax.tree_util.tree_map_with_path(_told, placed, state)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """An array's sharding, and that of the parameter for which it is held."""

    sharding: NamedSharding
    of_param: NamedSharding | None


def _told(keys: tuple[Any, ...], placed: _Placed, x: Any) -> NamedSharding:
    """The sharding; it warns of a large array that every device has whole, though it is not its parameter's rule."""
    sharding, of_param = placed.sharding, placed.of_param
    is_ruled = of_param is not None and of_param.is_fully_replicated
    if math.prod(_shape(x)) >= _LARGE and sharding.is_fully_replicated and not is_ruled and sharding.mesh.size > 1:
        name = jax.tree_util.keystr(keys)
        warnings.warn(
            f"shardings: the optimizer's state has an array of shape {_shape(x)} at {name}, which has no axis of a "
            "parameter that the mesh splits. Every device holds it whole.",
            stacklevel=5,
        )
    return sharding


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))  # a state may hold Python numbers


def _like(shape: tuple[int, ...], of_param: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array held for a parameter: an axis that is one of the parameter's is split as it is.

    So is one that counts equal blocks of the parameter's axis, if the mesh divides them. Other axes are whole, and so
    is an array whose axes may be several of the parameter's.
    """
    if shape == of_param:
        return sharding
    entries = [*sharding.spec, *[None] * (len(of_param) - len(sharding.spec))]
    if len(shape) > len(of_param):
        follows = shape[len(shape) - len(of_param) :] == of_param
        spec = [None] * (len(shape) - len(of_param)) + entries if follows else []
    elif len(shape) == len(of_param):
        shards = [_shards(entry, sharding) for entry in entries]
        fits = [n == size or size % n == 0 == n % split for n, size, split in zip(shape, of_param, shards, strict=True)]
        spec = [entry if fit else None for entry, fit in zip(entries, fits, strict=True)]
    else:  # a factor: the parameter's axes without some of them
        kept = itertools.combinations(range(len(of_param)), len(shape))
        specs = {tuple(entries[i] for i in axes) for axes in kept if tuple(of_param[i] for i in axes) == shape}
        spec = specs.pop() if len(specs) == 1 else []
    return NamedSharding(sharding.mesh, P(*spec), memory_kind=sharding.memory_kind)


def _shards(entry: Any, sharding: NamedSharding) -> int:
    """Into how many shards an axis is split by an entry of a partition."""
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(sharding.mesh.shape[name] for name in names)
