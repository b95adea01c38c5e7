"""Tensor parallelism: how a mesh axis splits a model's matrices, and how a layer runs on one device's part of them.

All layers run inside one `jax.shard_map`, in which every axis is Manual. So kernels see one device's heads and its part
of the feed-forward's width, and no array is sent but by the collectives here. Two stand around each sublayer, and two
around the embedding and the head, where whole rows are needed:

    all tokens = `all_tokens`(own positions)           own positions = `summed_tokens`(this device's summand)
    whole rows = `all_positions`(own positions)        own positions = `summed`(this device's summand of whole rows)

All tokens lie one device's behind another's, as they come: products do not mind, and XLA would transpose what it
gathers and scatters along an axis that is not the first. Attention alone puts its heads `in_rows`.

Between sublayers a device has its part of the positions, for which alone it computes norms and sums. JAX derives the
backward: the derivative of one collective is the other, and a parameter that devices have in common is differentiated
on each of them for its own tokens and heads, and summed where it entered.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.expert_parts import EXPERTS, entries_of_experts, own_experts, width_field
from liger_jax.models.core.on_parts import mapped
from liger_jax.models.core.parameters import FUSED, SPLIT_INPUTS, ParameterInfo, parameter, path_of
from liger_jax.models.core.partitions import partition
from liger_jax.ops.layout import Names, along

_KEY_HEADS = ("k_proj", "v_proj")
_WIDE_NORMS = ("q_norm", "k_norm")


def all_positions(x: jax.Array, axis: str | None) -> jax.Array:
    """The rows (B, T, D) of the positions (B, own, D) that the devices of a mesh axis have.

    Args:
        x: this device's positions, inside `jax.shard_map`.
        axis: the mesh axis, or `None` for one device.

    Returns:
        The whole rows, the same on every device of the axis.
    """
    return x if axis is None else jax.lax.all_gather(x, axis, axis=1, tiled=True)


def summed(x: jax.Array, axis: str | None) -> jax.Array:
    """This device's positions (B, own, D) of the sum of rows (B, T, D) over the devices of a mesh axis.

    Args:
        x: this device's summand, inside `jax.shard_map`.
        axis: the mesh axis, or `None` for one device.

    Returns:
        The positions that the device has between sublayers.
    """
    return x if axis is None else jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)


def all_tokens(x: jax.Array, axis: str | None) -> jax.Array:
    """The positions (B, own, D) of all devices of a mesh axis, as rows (devices·B, own, D).

    Args:
        x: this device's positions, inside `jax.shard_map`.
        axis: the mesh axis, or `None` for one device.

    Returns:
        Device 0's rows, device 1's, …; the same on every device of the axis.
    """
    return x if axis is None else jax.lax.all_gather(x, axis, axis=0, tiled=True)


def summed_tokens(x: jax.Array, axis: str | None) -> jax.Array:
    """This device's positions (B, own, D) of a sum over the devices of a mesh axis.

    Args:
        x: this device's summand, as `all_tokens` has it.
        axis: the mesh axis, or `None` for one device.

    Returns:
        The positions that the device has between sublayers.
    """
    return x if axis is None else jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def in_rows(x: jax.Array, axis: str | None) -> jax.Array:
    """Whole rows (B, T, W) of what was computed from `all_tokens`.

    Args:
        x: (devices·B, own, W).
        axis: the mesh axis, or `None` for one device.

    Returns:
        The rows, each with its positions in order.
    """
    if axis is None:
        return x
    devices, width = jax.lax.axis_size(axis), x.shape[2]
    parts = x.reshape(devices, -1, *x.shape[1:])
    return jnp.swapaxes(parts, 0, 1).reshape(parts.shape[1], -1, width)


def by_device(x: jax.Array, axis: str | None) -> jax.Array:
    """The inverse of `in_rows`.

    Args:
        x: (B, T, W).
        axis: the mesh axis, or `None` for one device.

    Returns:
        (devices·B, own, W).
    """
    if axis is None:
        return x
    devices, width = jax.lax.axis_size(axis), x.shape[2]
    parts = x.reshape(x.shape[0], devices, -1, width)
    return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])


def product_of_parts(projection: Any, x: jax.Array, axis: str | None) -> jax.Array:
    """A sublayer's last projection, whose inputs a mesh axis splits.

    Args:
        projection: this device's rows of the kernel.
        x: their inputs (devices·B, own positions, own), as `all_tokens` has them.
        axis: the mesh axis, or `None` for one device.

    Returns:
        The positions of the sum over devices that this device has between sublayers.
    """
    if axis is not None and hasattr(type(projection), "magnitude"):  # DoRA's norms are those of whole columns
        return summed_tokens(projection(x, input_axis=axis), axis)
    return summed_tokens(projection(x), axis)


def axis_of_part(axis: str | None, projection: Any) -> str | None:
    """The mesh axis whose devices have the other inputs of a projection.

    Args:
        axis: the axis that splits such projections.
        projection: the last projection of a sublayer.

    Returns:
        The axis, or `None` if this device has the whole kernel.
    """
    return axis if projection.kernel.shape[-2] < projection.in_features else None


@dataclasses.dataclass(frozen=True)
class TensorParts:
    """A mesh axis that splits heads, feed-forwards and the vocabulary over several devices.

    Attributes:
        axis: its name.
        size: its devices, more than one.
        fsdp: the axes that split parameters once more.
        fsdp_size: the devices along these.
        batch: the axes that split the batch.
        sequence: the axis that splits rows, or `None`.
        axes: all axes of the mesh that are not Manual.
        between: how activations (B, T, D) lie between blocks.
        expert: the axis that splits experts, or `None`.
        expert_size: its devices.
    """

    axis: str
    size: int
    fsdp: Names
    fsdp_size: int
    batch: Names
    sequence: str | None
    axes: Names
    between: P
    expert: str | None = None
    expert_size: int = 1

    @property
    def others(self) -> Names:
        """The axes that split each expert's parameters once more: those of fsdp, but for the one of experts."""
        return tuple(name for name in self.fsdp if name != self.expert) if self.others_size > 1 else ()

    @property
    def others_size(self) -> int:
        """The devices along these."""
        return self.fsdp_size // (self.expert_size if self.expert in self.fsdp else 1)

    @property
    def tokens(self) -> P:
        """How arrays (B, T, …) lie of which all devices of the axis have the same positions."""
        return partition(self.batch, self._of_sequence)

    @property
    def _of_sequence(self) -> Names:
        return () if self.sequence is None else (self.sequence,)

    def spec(self, info: ParameterInfo, shape: tuple[int, ...]) -> P:
        """How a parameter lies on the mesh.

        `tensor_axis` is split by the tensor axis. A matrix's first axis, the inputs or the vocabulary, is split by
        fsdp: XLA transposes what it gathers along another one, gradients and state included. The second axis is split
        where both do not divide the first. Codes and scales of quantised weights are split by fsdp along the output, so
        that blocks stay whole. A vocabulary and key heads that the tensor axis does not divide are whole along it, and
        so is a vector that fsdp does not divide.

        Args:
            info: what the parameter is.
            shape: its shape.

        Returns:
            The partition.

        Raises:
            ValueError: the mesh does not divide a matrix, or nothing says how it is split.
        """
        if info.expert_axis is not None:
            return partition(*entries_of_experts(self, info, shape))
        entries: list[Names] = [() for _ in shape]
        at = info.tensor_axis
        if at is None and info.kind.startswith("kernel"):
            raise ValueError(
                f"{info.name} is a matrix of which nothing says how {self.axis}={self.size} splits it: tensor "
                f"parallelism knows the projections of dense models. Give the devices to an axis of the batch."
            )
        if at is not None and shape[at] % self.size == 0:
            entries[at] = (self.axis,)
        elif at is not None and info.kind not in ("embedding", "head") and not _is_of_key_heads(info):
            raise ValueError(self.does_not_divide(self.axis, self.size, at, info, shape))
        is_vector = info.kind in ("bias", "norm")
        other = info.out_axis if is_vector else self._fsdp_axis(info, shape[-2] if len(shape) > 1 else 0)
        if other is not None and self.fsdp_size > 1:
            parts = self.fsdp_size * (self.size if entries[other] else 1)
            if shape[other] % parts == 0:
                entries[other] = (*entries[other], *self.fsdp)
            elif not is_vector:
                names = "·".join((*entries[other], *self.fsdp))
                raise ValueError(self.does_not_divide(names, parts, other, info, shape))
        return partition(*entries)

    def check(self, config: Any) -> None:
        """Raises a ValueError unless the axis can split an architecture, and divides its heads and its feed-forward."""
        numbers = dict(num_attention_heads=config.num_attention_heads)
        if any(config.feed_forward_of(i) != EXPERTS for i in range(config.num_hidden_layers)):
            numbers["intermediate_size"] = config.intermediate_size
        if config.experts is not None:
            numbers[width_field(config)] = config.experts.width
        for name, number in numbers.items():
            if number % self.size:
                named = " and ".join(f"{name}={number}" for name, number in numbers.items())
                raise ValueError(
                    f"tensor={self.axis!r} has {self.size} devices, which do not divide {name}={number}. The nearest "
                    f"number that divides {named} is {nearest_divisor(math.gcd(*numbers.values()), self.size)}."
                )

    def padded(self, x: jax.Array) -> jax.Array:
        """Rows in which each device has as many positions as every other one.

        No position sees those that are added, which are behind it, and no largest position or id grows.

        Args:
            x: (B, T) or (1, T).

        Returns:
            The rows, with their last number repeated until the axis divides T.
        """
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.size)), mode="edge")

    def padded_ids(self, ids: jax.Array | None, input_ids: jax.Array, has_experts: bool) -> jax.Array | None:
        """The segments of padded rows. Routers count tokens, so that experts are told what is none.

        Args:
            ids: (B, T), or `None` where all tokens belong to one segment.
            input_ids: (B, T).
            has_experts: whether the model has experts.

        Returns:
            Rows as `padded` makes them; with experts those that are added have the id −1, as other padding.
        """
        missing = -input_ids.shape[1] % self.size
        if missing and has_experts:
            ids = jnp.zeros(input_ids.shape, jnp.int32) if ids is None else ids
            return jnp.pad(ids, ((0, 0), (0, missing)), constant_values=-1)
        return None if ids is None else self.padded(ids)

    def run_layers(
        self,
        stack: Any,
        layers: Any,
        last_layers: Any,
        x: jax.Array,
        inputs: Mapping[str, Sequence[Any]],
        config: Any,
    ) -> tuple[jax.Array, Any]:
        """Runs a `LayerStack` on every device's part of the layers.

        Args:
            stack: the stack.
            layers: as the stack takes them.
            last_layers: as the stack takes them.
            x: (B, T, D), with a T that the axis divides.
            inputs: as the stack takes them.
            config: the architecture.

        Returns:
            Hidden states (B, T, D), which lie as `between` says, and the layers' sums over the tokens of all devices.
        """
        self.check(config)
        (graph, state), (last_graph, last_state) = nnx.split(layers), nnx.split(last_layers)
        parameters = dict(layers=state, last_layers=last_state)
        leaves, tree = jax.tree.flatten(inputs)
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

        def local(x, parameters, arrays):
            own = iter(arrays)
            whole = [next(own) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
            decoded = stack(
                nnx.merge(graph, parameters["layers"]),
                nnx.merge(last_graph, parameters["last_layers"]),
                x,
                jax.tree.unflatten(tree, whole),
                gathered=lambda state, dtype: self._of_layer(state, dtype, config),
            )
            return decoded.hidden, jax.tree.map(lambda sums: jax.lax.psum(sums, self.axes), decoded.aux)

        of_parameters = jax.tree_util.tree_map_with_path(self._entry, parameters)
        of_arrays = [self._of_input(leaf) for leaf in arrays]
        specs = self.between, of_parameters, of_arrays
        return mapped(local, specs, (self.between, P()), self.axes)(x, parameters, arrays)

    def _of_input(self, x: Any) -> P:
        """How a layer's input lies: segments (B, T), whose rows are whole, or a table (1, T, R) or (B, T, R)."""
        batch = self.batch if x.shape[0] > 1 else ()
        return partition(batch, self._of_sequence) if x.ndim == 3 else partition(batch)

    def _entry(self, keys: Any, x: Any) -> P:
        """How a layer's parameter enters the shard_map: fsdp's parts of vectors are gathered before."""
        info = parameter(path_of(keys), x.shape)
        spec = self.spec(info, x.shape)
        is_gathered_inside = info.expert_axis is not None or self._fsdp_axis(info, 0) is not None
        return spec if is_gathered_inside else along(spec, (self.axis,))

    def _fsdp_axis(self, info: ParameterInfo, first: int) -> int | None:
        """The axis of a matrix that fsdp splits, too, by the size of its first axis."""
        if info.kind in ("embedding", "head"):
            return 0 if self.splits_vocabulary(first) else 1
        if info.kind == "router":
            return info.in_axis
        if info.kind == "kernel":
            both = info.tensor_axis == info.in_axis and first % (self.size * self.fsdp_size)
            return info.out_axis if both else info.in_axis
        return info.out_axis if info.kind.endswith(("_codes", "_scales")) else None

    def splits_vocabulary(self, vocab_size: int) -> bool:
        """Whether the tensor axis and fsdp split a vocabulary together; if not, fsdp splits its vectors."""
        return vocab_size % (self.size * self.fsdp_size) == 0

    def of_vocabulary(self, vocab_size: int, width: int) -> P:
        """How an embedding or a head (V, D) lies, padded so that the devices of the tensor axis have equal parts.

        A head with an adapter's columns may be of a width that fsdp does not divide.
        """
        if self.splits_vocabulary(vocab_size):
            return P((self.axis, *self.fsdp))
        return P(self.axis, self.fsdp if width % self.fsdp_size == 0 else None)

    def _of_layer(self, state: Any, dtype: Any, config: Any) -> Any:
        """One layer's parameters as this device uses them: gathered over fsdp, with the columns of its own heads.

        Matrices are sent in the computation's dtype, and codes as they are.
        """

        heads = config.num_attention_heads  # whose results are the inputs of o_proj

        def of_leaf(keys, x):
            info = parameter(("layers", 0, *path_of(keys)), x.shape)
            if info.kind == "dropout_key":
                axes = self._axes_of_inputs(info)
                return jax.random.fold_in(x, jax.lax.axis_index(axes)) if axes else x
            x = x.astype(dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x
            if info.expert_axis is not None:
                return own_experts(self, x, info, config)
            inputs = config.intermediate_size if _is_in(info, ("down_proj",)) else heads * config.head_dim
            inputs = config.hidden_size if _is_in(info, FUSED) else inputs
            axis = self._fsdp_axis(info, inputs)
            if axis is not None and self.fsdp_size > 1:
                x = jax.lax.all_gather(x, self.fsdp, axis=axis, tiled=True)
            if info.kind == "bias" and _is_in(info, SPLIT_INPUTS):
                return x / self.size  # each device adds it to its summand
            return self._own_columns(x, info, config)

        return jax.tree_util.tree_map_with_path(of_leaf, state)

    def _own_columns(self, x: jax.Array, info: ParameterInfo, config: Any) -> jax.Array:
        """The columns that this device computes, of a parameter whose columns do not lie as they are computed.

        Where the tensor axis does not divide the keys' heads, each is repeated so often that it does. A head's gradient
        is the sum of its copies'.
        """
        of_queries = config.num_attention_heads, config.head_dim
        of_keys = config.num_key_value_heads, config.head_dim
        if info.out_axis is None:
            return x
        if _is_in(info, ("qkv_proj",)):
            pieces = of_queries, of_keys, of_keys
        elif _is_in(info, ("gate_up_proj",)):
            pieces = ((config.intermediate_size, 1),) * 2
        elif info.kind == "sinks":
            pieces = ((config.num_attention_heads, 1),)
        elif config.qk_norm_is_wide and _is_in(info, _WIDE_NORMS):
            pieces = (of_queries if _is_in(info, ("q_norm",)) else of_keys,)
        elif _is_of_key_heads(info) and config.num_key_value_heads % self.size:
            pieces = (of_keys,)
            if x.shape[-1] < math.prod(of_keys):
                x = jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
        else:
            return x
        x = self.by_devices(x, pieces)
        if info.kind.startswith("kernel") and _is_in(info, FUSED):  # this device's rows, and all columns
            x = jax.lax.all_to_all(x, self.axis, split_axis=x.ndim - 2, concat_axis=0, tiled=True)
            return x.squeeze(-2)
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(self.axis), x.ndim - 2, keepdims=False)

    def by_devices(self, x: jax.Array, pieces: Sequence[tuple[int, int]]) -> jax.Array:
        """(…, columns) → (…, devices, own): of each piece of (heads, width) a device has as many heads as any other."""
        by_devices, start = [], 0
        for heads, width in pieces:
            piece = x[..., start : start + heads * width].reshape(*x.shape[:-1], heads, width)
            piece = jnp.repeat(piece, self.size // math.gcd(heads, self.size), axis=-2)
            by_devices.append(piece.reshape(*x.shape[:-1], self.size, -1))
            start += heads * width
        return jnp.concatenate(by_devices, axis=-1)

    def _axes_of_inputs(self, info: ParameterInfo) -> Names:
        """The mesh axes that split the inputs of the projection that holds a parameter."""
        axes = (*self.batch, *self._of_sequence)
        return (*axes, self.axis) if _is_in(info, SPLIT_INPUTS) else axes

    def does_not_divide(self, names: str, parts: int, axis: int, info: ParameterInfo, shape: tuple[int, ...]) -> str:
        """The sentence that says that so many devices do not divide an axis of a parameter of this shape."""
        return (
            f"{names}={parts} does not divide axis {axis} of {info.name}, whose shape is {tuple(shape)}. Choose a size "
            f"that divides {shape[axis]}; the nearest to {parts} is {nearest_divisor(shape[axis], parts)}."
        )


def nearest_divisor(number: int, size: int) -> int:
    """The divisor of a number that is nearest to a size; of two, the smaller one.

    Args:
        number: at least 1.
        size: at least 1.

    Returns:
        The divisor.

    Example:
        >>> nearest_divisor(32, 3), nearest_divisor(12, 5)
        (2, 4)
    """
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - size), n))


def _is_of_key_heads(info: ParameterInfo) -> bool:
    return _is_in(info, _KEY_HEADS)


def _is_in(info: ParameterInfo, modules: tuple[str, ...]) -> bool:
    return not {*modules}.isdisjoint(info.name.split("."))
