"""Tensor parallelism: how a mesh axis splits a model's matrices, and how a layer runs on one device's part of them.

All layers run inside one `jax.shard_map`, in which every axis is Manual. So kernels see one device's heads and its part
of the feed-forward's width, and no array is sent but by the collectives here. Two stand around each sublayer:

    whole rows = `all_positions`(own positions)        own positions = `summed`(this device's summand of whole rows)

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

from liger_jax.models.core.on_parts import mapped
from liger_jax.models.core.parameters import SPLIT_INPUTS, ParameterInfo, parameter, path_of
from liger_jax.ops.layout import Names, along

_KEY_HEADS = ("k_proj", "v_proj")


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
        axes: all axes of the mesh that are not Manual.
        between: how activations (B, T, D) lie between blocks.
    """

    axis: str
    size: int
    fsdp: Names
    fsdp_size: int
    batch: Names
    axes: Names
    between: P

    @property
    def tokens(self) -> P:
        """How arrays (B, …) lie whose positions a device has whole."""
        return _trimmed([self.batch])

    def spec(self, info: ParameterInfo, shape: tuple[int, ...]) -> P:
        """How a parameter lies on the mesh.

        `tensor_axis` is split by the tensor axis, and a matrix's other axis by fsdp. Codes and scales of quantised
        weights are split by fsdp along the output, so that blocks stay whole. A vocabulary and
        key heads that the tensor axis does not divide are whole along it, and so is a vector that fsdp does not divide.

        Args:
            info: what the parameter is.
            shape: its shape.

        Returns:
            The partition.

        Raises:
            ValueError: the mesh does not divide a matrix, or nothing says how it is split.
        """
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
            raise ValueError(self._does_not_divide(self.axis, self.size, at, info, shape))
        is_vector = info.kind in ("bias", "norm")
        other = info.out_axis if is_vector else self._fsdp_axis(info)
        if other is not None and self.fsdp_size > 1:
            parts = self.fsdp_size * (self.size if entries[other] else 1)
            if shape[other] % parts == 0:
                entries[other] = (*entries[other], *self.fsdp)
            elif not is_vector:
                names = "·".join((*entries[other], *self.fsdp))
                raise ValueError(self._does_not_divide(names, parts, other, info, shape))
        return _trimmed(entries)

    def check(self, config: Any) -> None:
        """Raises a ValueError unless the axis can split an architecture, and divides its heads and its feed-forward."""
        if config.experts is not None:
            raise ValueError(
                f"tensor={self.axis!r} has {self.size} devices, and {type(config).__name__} has experts, which are not "
                "split yet. Give the devices to an axis of the batch."
            )
        if config.fused_projections or config.qk_norm_is_wide:
            what = "projections to several things at once" if config.fused_projections else "a norm over all heads"
            raise ValueError(
                f"tensor={self.axis!r} has {self.size} devices, and {type(config).__name__} has {what}, which is not "
                "split yet. Give the devices to an axis of the batch."
            )
        heads, width = config.num_attention_heads, config.intermediate_size
        for name, number in (("num_attention_heads", heads), ("intermediate_size", width)):
            if number % self.size:
                raise ValueError(
                    f"tensor={self.axis!r} has {self.size} devices, which do not divide {name}={number}. The nearest "
                    f"number that divides num_attention_heads={heads} and intermediate_size={width} is "
                    f"{nearest_divisor(math.gcd(heads, width), self.size)}."
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

    def run_layers(
        self,
        stack: Any,
        layers: Any,
        last_layers: Any,
        x: jax.Array,
        inputs: Mapping[str, Sequence[Any]],
        config: Any,
    ) -> jax.Array:
        """Runs a `LayerStack` on every device's part of the layers.

        Args:
            stack: the stack.
            layers: as the stack takes them.
            last_layers: as the stack takes them.
            x: (B, T, D), with a T that the axis divides.
            inputs: as the stack takes them.
            config: the architecture.

        Returns:
            Hidden states (B, T, D), which lie as `between` says.
        """
        self.check(config)
        (graph, state), (last_graph, last_state) = nnx.split(layers), nnx.split(last_layers)
        parameters = dict(layers=state, last_layers=last_state)
        _check_dense(parameters)
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
            return decoded.hidden

        of_parameters = jax.tree_util.tree_map_with_path(self._entry, parameters)
        of_arrays = [P() if leaf.shape[0] == 1 else self.tokens for leaf in arrays]
        specs = self.between, of_parameters, of_arrays
        return mapped(local, specs, self.between, self.axes)(x, parameters, arrays)

    def _entry(self, keys: Any, x: Any) -> P:
        """How a layer's parameter enters the shard_map: fsdp's parts of vectors are gathered before."""
        info = parameter(path_of(keys), x.shape)
        spec = self.spec(info, x.shape)
        return spec if self._fsdp_axis(info) is not None else along(spec, (self.axis,))

    def _fsdp_axis(self, info: ParameterInfo) -> int | None:
        """The axis of a matrix that fsdp splits, too."""
        if info.kind in ("kernel", "embedding", "head"):
            return info.in_axis if info.tensor_axis == info.out_axis else info.out_axis
        return info.out_axis if info.kind.endswith(("_codes", "_scales")) else None

    def _of_layer(self, state: Any, dtype: Any, config: Any) -> Any:
        """One layer's parameters as this device uses them: gathered over fsdp, with the keys' heads of its queries.

        Matrices are sent in the computation's dtype, and codes as they are.
        """

        def of_leaf(keys, x):
            info = parameter(("layers", 0, *path_of(keys)), x.shape)
            if info.kind == "dropout_key":
                axes = self._axes_of_inputs(info)
                return jax.random.fold_in(x, jax.lax.axis_index(axes)) if axes else x
            x = x.astype(dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x
            axis = self._fsdp_axis(info)
            if axis is not None and self.fsdp_size > 1:
                x = jax.lax.all_gather(x, self.fsdp, axis=axis, tiled=True)
            if info.kind == "bias" and _is_in(info, SPLIT_INPUTS):
                return x / self.size  # each device adds it to its summand
            return self._own_heads(x, info.tensor_axis, config) if _is_of_key_heads(info) else x

        return jax.tree_util.tree_map_with_path(of_leaf, state)

    def _own_heads(self, x: jax.Array, axis: int | None, config: Any) -> jax.Array:
        """The keys' heads of this device's queries, of a parameter of k_proj or v_proj.

        Where the tensor axis does not divide the heads, each is repeated so often that it does. A head's gradient is
        the sum of its copies'.
        """
        heads, width = config.num_key_value_heads, config.head_dim
        repeats = self.size // math.gcd(heads, self.size)
        if repeats == 1 or axis is None:
            return x
        if x.shape[axis] < heads * width:
            x = jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)
        number = heads * repeats // self.size  # of this device's
        own = (jax.lax.axis_index(self.axis) * number + jnp.arange(number)) // repeats
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = jnp.take(x.reshape(*before, heads, width, *after), own, axis=axis, mode="clip")
        return x.reshape(*before, number * width, *after)

    def _axes_of_inputs(self, info: ParameterInfo) -> Names:
        """The mesh axes that split the inputs of the projection that holds a parameter."""
        return (*self.batch, self.axis) if _is_in(info, SPLIT_INPUTS) else self.batch

    def _does_not_divide(self, names: str, parts: int, axis: int, info: ParameterInfo, shape: tuple[int, ...]) -> str:
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


def _check_dense(parameters: Any) -> None:
    """Raises a ValueError if a layer has what no rule splits."""
    for keys, _ in jax.tree_util.tree_leaves_with_path(parameters):
        path = path_of(keys)
        if path[-1] == "magnitude" and path[-2] in SPLIT_INPUTS:
            raise ValueError(
                f"{'.'.join(map(str, path))} is DoRA's, whose norm of a column would be that of one device's part of "
                "it. Tensor parallelism takes LoRA's adapters: add_lora(…, dora=False)."
            )


def _is_of_key_heads(info: ParameterInfo) -> bool:
    return _is_in(info, _KEY_HEADS)


def _is_in(info: ParameterInfo, modules: tuple[str, ...]) -> bool:
    return not {*modules}.isdisjoint(info.name.split("."))


def _trimmed(entries: Sequence[Names]) -> P:
    """A partition without its last empty entries; an axis that is alone stands by its name."""
    filled = [i for i, entry in enumerate(entries) if entry]
    one = lambda entry: entry[0] if len(entry) == 1 else entry or None
    return P(*(one(tuple(entry)) for entry in entries[: filled[-1] + 1])) if filled else P()
