"""Fully sharded parameters and split experts: how they and their optimizer state are sharded, and gathered."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.mesh_axes import does_not_divide
from liger_jax.models.core.parameters import ParameterInfo, parameter, path_of
from liger_jax.ops.layout import Names, devices_along, full_spec, gathered, partition
from liger_jax.ops.linear.split_head import HeadSplit, SplitHead, head_split
from liger_jax.ops.meshes import on_devices

# Adapters are small: every device has them whole.
_WHOLE = ("lora_a", "lora_b", "magnitude", "lora_scale", "dropout_key", "dropout_pieces", "token_rows")
_ADAPTERS_OF_EXPERTS = ("experts_lora_a", "experts_lora_b")
_LARGE = 65_536  # elements: a smaller array takes little memory, and every device may hold it whole without a warning


@dataclasses.dataclass(frozen=True)
class ParameterShards:
    """Mesh axes that split parameters, and one that splits experts."""

    fsdp: Names  # the axes that split parameters
    expert: str | None  # the axis that splits experts, or `None`
    batch: Names  # the axes that split the batch, of which an error names one
    sizes: Mapping[str, int]  # the devices along each axis of the mesh that is not Manual

    @property
    def splits_experts(self) -> bool:
        """Whether the mesh has several devices along the axis of experts."""
        return devices_along(self.expert, self.sizes) > 1

    def spec(self, info: ParameterInfo, shape: tuple[int, ...]) -> P:
        """How a parameter is sharded over the mesh."""
        if self.splits_experts and info.expert_axis is not None:
            return self._of_experts(info, shape)
        if (of_fsdp := self._of_fsdp(info, shape)) is not None:
            return of_fsdp
        shards = devices_along(self.fsdp, self.sizes)
        axis = _split_axis(info, shape, shards)
        others = next((name for name in self.batch if name not in self.fsdp), "an axis that splits the batch alone")
        padded = (
            " Layout(tensor=…) pads a vocabulary that its axis does not divide." if info.kind == "embedding" else ""
        )
        cure = f", and give the other devices to {others}.{padded}"
        raise ValueError(does_not_divide("·".join(self.fsdp), shards, axis, info, shape, cure))

    def gathered(self, parameters: Any, dtype: Any) -> Any:
        """A layer's parameters, whole on every device but for experts, as `Layout.gathered` promises them."""

        def gather(keys, x):
            is_of_split_experts = self.splits_experts and "experts" in path_of(keys)  # a layer's module of them
            if not jnp.issubdtype(x.dtype, jnp.floating):  # codes, which are gathered in 4 or 8 bits
                return jax.lax.with_sharding_constraint(x, P(self.expert) if is_of_split_experts else P())
            info = parameter(("layers", 0, *path_of(keys)), x.shape)
            x = x.astype(dtype) if x.ndim > 1 else x
            if is_of_split_experts:
                return _gathered(x, P(self.expert), self._of_experts(info, x.shape))
            spec = self._of_fsdp(info, x.shape)
            return _gathered(x, P(), P() if spec is None else spec)

        return jax.tree_util.tree_map_with_path(gather, parameters)

    def _of_experts(self, info: ParameterInfo, shape: tuple[int, ...]) -> P:
        """How a parameter of experts is sharded that are split over their axis.

        The other axes of fsdp split the experts of a device, too, or each one's input where they do not divide them.
        """
        axis, expert = info.expert_axis, self.expert
        assert axis is not None and expert is not None
        entries: list[Any] = [None] * len(shape)
        entries[axis] = expert
        if shape[axis] % self.sizes[expert]:
            raise ValueError(
                f"expert={expert!r} has {self.sizes[expert]} devices, which do not divide the {shape[axis]} "
                f"experts of {info.name}. Choose a number that does, and give the other devices to fsdp."
            )
        others = tuple(name for name in self.fsdp if name != expert)
        split = info.in_axis if info.kind == "experts" else info.out_axis
        shards = devices_along(others, self.sizes)
        if shards > 1 and split is not None and info.kind.startswith("experts"):
            if shape[axis] % (shards * self.sizes[expert]) == 0:
                entries[axis] = (expert, *others)
            elif shape[split] % shards == 0:
                entries[split] = others
        return partition(*entries)

    def _of_fsdp(self, info: ParameterInfo, shape: tuple[int, ...]) -> P | None:
        """How fsdp splits a parameter; `None` for a matrix that it does not divide."""
        shards = devices_along(self.fsdp, self.sizes)
        if shards == 1 or info.kind in _WHOLE:
            return P()
        axis = _split_axis(info, shape, shards)
        if shape[axis] % shards == 0:
            return partition(*[None] * axis, tuple(name for name in self.fsdp if name in self.sizes))
        is_small = info.in_axis is None or info.kind in _ADAPTERS_OF_EXPERTS or shape[axis] == 1
        return P() if is_small else None


def _split_axis(info: ParameterInfo, shape: tuple[int, ...], shards: int) -> Any:
    """The axis of a parameter that so many devices of fsdp split.

    Experts are gathered as they are. XLA would transpose a matrix's inputs, and does so for all layers at once.
    """
    experts = info.expert_axis
    if info.kind in _ADAPTERS_OF_EXPERTS or experts is not None and shape[experts] % shards == 0:
        return experts
    return info.in_axis if info.kind in ("embedding", "kernel", "router", "experts") else info.out_axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, used: P, stored: P) -> jax.Array:
    """An array that is sharded as `stored` says, as `used` says. Its gradient is sharded as `stored` says again."""
    return jax.lax.with_sharding_constraint(x, used)


_gathered.defvjp(
    lambda x, used, stored: (_gathered(x, used, stored), None),
    lambda used, stored, _, gradient: (jax.lax.with_sharding_constraint(gradient, stored),),
)


def on_shards(
    function: Callable[..., Any],
    split: tuple[Any, ...],
    whole: tuple[Any, ...],
    head: Any,
    spec: P | tuple[P, ...],
    out: Any,
    fsdp: Mapping[str, int],
) -> Any:
    """`function(*split, *whole, head)` on every device of the mesh in context, as `Layout.run` promises it.

    `whole`: arrays that are whole inside the function. A matrix enters split over `fsdp` if that divides its rows.
    Inside the function all axes of the mesh are Manual.
    """
    names, shards = tuple(fsdp), math.prod(fsdp.values())
    is_cut = [bool(names) and x is not None and x.ndim == 2 and x.shape[0] % shards == 0 for x in whole]
    # A quantised head is small, and enters whole.
    split_of_head = _split_of(head, fsdp) if isinstance(head, jax.Array) else None

    def local(own, others, head):
        others = [gathered(x, P(names)) if cut else x for x, cut in zip(others, is_cut, strict=True)]
        head = head if split_of_head is None else SplitHead(head, split_of_head)
        return function(*own, *others, *(() if head is None else (head,)))

    of_whole = tuple(P(names) if cut else P() for cut in is_cut)
    of_split = spec if isinstance(spec, tuple) else tuple(spec for _ in split)
    specs = of_split, of_whole, P() if split_of_head is None else split_of_head.spec
    return on_devices(local, in_specs=specs, out_specs=out)(tuple(split), tuple(whole), head)


def _split_of(head: jax.Array, fsdp: Mapping[str, int]) -> HeadSplit | None:
    """How mesh axes split a head (V, D): its vocabulary, or else its width. None where they divide neither."""
    names, shards = tuple(fsdp), math.prod(fsdp.values())
    if head.shape[0] % shards == 0:
        return head_split(P(names), fsdp)
    return head_split(P(None, names), fsdp) if head.shape[1] % shards == 0 else None


def state_shardings(optimizer: Any, state: Any, params: Any, of_params: Any, whole: NamedSharding) -> Any:
    """The shardings of an optimizer's state, whose arrays follow their parameters where they have axes of them."""

    def of_subtree(state, params, shardings):
        """The optimizer's state for a tree of parameters; for one parameter it may be a tree of arrays."""
        if isinstance(state, optax.MaskedNode):  # for a parameter or for a subtree
            return state
        children, structure = jax.tree.flatten(params, is_leaf=lambda x: x is not params)
        if jax.tree_util.treedef_is_leaf(structure):
            return jax.tree.map(lambda x: _Placed(sharding_like(_shape(x), params.shape, shardings), shardings), state)
        subtrees = zip(structure.flatten_up_to(state), children, structure.flatten_up_to(shardings), strict=True)
        return jax.tree.unflatten(structure, [of_subtree(*subtree) for subtree in subtrees])

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
    """The sharding; it warns of a large array that every device holds whole although its parameter is sharded."""
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


def sharding_like(shape: tuple[int, ...], of_param: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array held for a parameter: an axis that is one of the parameter's is split as it is.

    So is one that counts equal blocks of the parameter's axis, if the mesh divides them. Other axes are whole, and so
    is an array whose axes may be several of the parameter's.
    """
    if shape == of_param:
        return sharding
    entries = [*full_spec(sharding.spec, len(of_param))]
    if len(shape) > len(of_param):
        follows = shape[len(shape) - len(of_param) :] == of_param
        spec = [None] * (len(shape) - len(of_param)) + entries if follows else []
    elif len(shape) == len(of_param):
        shards = [devices_along(entry, sharding.mesh.shape) for entry in entries]
        fits = [n == size or size % n == 0 == n % split for n, size, split in zip(shape, of_param, shards, strict=True)]
        spec = [entry if fit else None for entry, fit in zip(entries, fits, strict=True)]
    else:  # a factor: the parameter's axes without some of them
        kept = itertools.combinations(range(len(of_param)), len(shape))
        specs = {tuple(entries[i] for i in axes) for axes in kept if tuple(of_param[i] for i in axes) == shape}
        spec = specs.pop() if len(specs) == 1 else []
    return NamedSharding(sharding.mesh, P(*spec), memory_kind=sharding.memory_kind)
