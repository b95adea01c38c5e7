"""Layers under tensor parallelism: how they run on one device's shard of their matrices.

All layers run inside one `jax.shard_map`, in which every axis is Manual. So kernels get one device's heads and its
shard of the feed-forward's width, and arrays are sent only by the collectives of `tensor_collectives`, and by those
here that turn a stored parameter into the columns that a device uses.

Between sublayers a device has its shard of the positions, and computes norms and sums for these alone. A parameter that
devices share is differentiated on each of them for its own tokens and heads; its gradients are summed where it entered.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.expert_shards import own_experts
from liger_jax.models.core.parallel.tensor_collectives import by_device
from liger_jax.models.core.parallel.tensor_shards import KEY_HEADS, TensorShards
from liger_jax.models.core.parameters import FUSED, SPLIT_INPUTS, ParameterInfo, parameter, path_of
from liger_jax.ops.layout import along
from liger_jax.ops.meshes import on_devices

_WIDE_NORMS = ("q_norm", "k_norm")


def run_layers(
    shards: TensorShards,
    stack: Any,
    layers: Any,
    last_layers: Any,
    x: jax.Array,
    inputs: Mapping[str, Sequence[Any]],
    dropout_words: jax.Array | None,
    config: Any,
) -> tuple[jax.Array, Any]:
    """Runs a `LayerStack` on every device's shard of the layers.

    Returns hidden states (B, T, D), which are sharded as `shards.between` says, and the layers' sums over the tokens of
    all devices.
    """
    (graph, state), (last_graph, last_state) = nnx.split(layers), nnx.split(last_layers)
    parameters = dict(layers=state, last_layers=last_state)
    leaves, tree = jax.tree.flatten((inputs, dropout_words))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

    def local(x, parameters, arrays):
        own = iter(arrays)
        whole = [next(own) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        inputs, words = jax.tree.unflatten(tree, whole)
        decoded = stack(
            nnx.merge(graph, parameters["layers"]),
            nnx.merge(last_graph, parameters["last_layers"]),
            x,
            inputs,
            gathered=lambda state, dtype: _of_layer(shards, state, dtype, config),
            dropout_words=None if words is None else by_device(words, shards.axis),
        )
        return decoded.hidden, jax.tree.map(lambda sums: jax.lax.psum(sums, shards.axes), decoded.aux)

    of_parameters = jax.tree_util.tree_map_with_path(lambda keys, x: _entry(shards, keys, x), parameters)
    of_arrays = [_of_input(shards, leaf) for leaf in arrays]
    specs = shards.between, of_parameters, of_arrays
    return on_devices(local, in_specs=specs, out_specs=(shards.between, P()))(x, parameters, arrays)


def _of_input(shards: TensorShards, x: Any) -> P:
    """How a layer's input is sharded: segments (B, T) of whole rows, (B, T, …) of tokens, or (1, T, R) of rows."""
    spec = shards.tokens if x.ndim == 3 else shards.rows
    return spec if x.shape[0] > 1 else P(None, *spec[1:])


def _entry(shards: TensorShards, keys: Any, x: Any) -> P:
    """How a layer's parameter enters the shard_map: fsdp's shards of vectors are gathered before."""
    info = parameter(path_of(keys), x.shape)
    spec = shards.spec(info, x.shape)
    is_gathered_inside = info.expert_axis is not None or shards.fsdp_axis(info, 0) is not None
    return spec if is_gathered_inside else along(spec, (shards.axis,))


def _of_layer(shards: TensorShards, state: Any, dtype: Any, config: Any) -> Any:
    """One layer's parameters as this device uses them: gathered over fsdp, with the columns of its own heads.

    Matrices are sent in the computation's dtype, and codes as they are.
    """

    heads = config.num_attention_heads  # whose results are the inputs of o_proj

    def of_leaf(keys, x):
        info = parameter(("layers", 0, *path_of(keys)), x.shape)
        x = x.astype(dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x
        if info.expert_axis is not None:
            return own_experts(shards, x, info, config)
        inputs = config.intermediate_size if info.is_in("down_proj") else heads * config.head_dim
        inputs = config.hidden_size if info.is_in(*FUSED) else inputs
        axis = shards.fsdp_axis(info, inputs)
        if axis is not None and shards.fsdp_size > 1:
            x = jax.lax.all_gather(x, shards.fsdp, axis=axis, tiled=True)
        if info.kind == "bias" and info.is_in(*SPLIT_INPUTS):
            return x / shards.size  # each device adds it to its summand
        return _own_columns(shards, x, info, config)

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def _own_columns(shards: TensorShards, x: jax.Array, info: ParameterInfo, config: Any) -> jax.Array:
    """The columns that this device computes, of a parameter whose columns are not stored as they are computed.

    Where the tensor axis does not divide the keys' heads, each is repeated so often that it does. A head's gradient
    is the sum of its copies'.
    """
    of_queries = config.num_attention_heads, config.head_dim
    of_keys = config.num_key_value_heads, config.head_dim
    if info.out_axis is None:
        return x
    if info.is_in("qkv_proj"):
        pieces = of_queries, of_keys, of_keys
    elif info.is_in("gate_up_proj"):
        pieces = ((config.intermediate_size, 1),) * 2
    elif info.kind == "sinks":
        pieces = ((config.num_attention_heads, 1),)
    elif config.qk_norm_is_wide and info.is_in(*_WIDE_NORMS):
        pieces = (of_queries if info.is_in("q_norm") else of_keys,)
    elif info.is_in(*KEY_HEADS) and config.num_key_value_heads % shards.size:
        pieces = (of_keys,)
        if x.shape[-1] < math.prod(of_keys):
            x = jax.lax.all_gather(x, shards.axis, axis=x.ndim - 1, tiled=True)
    else:
        return x
    x = shards.by_devices(x, pieces)
    if info.kind.startswith("kernel") and info.is_in(*FUSED):  # this device's rows, and all columns
        x = jax.lax.all_to_all(x, shards.axis, split_axis=x.ndim - 2, concat_axis=0, tiled=True)
        return x.squeeze(-2)
    return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(shards.axis), x.ndim - 2, keepdims=False)
