"""Quantised base weights: a model whose projections and experts, and perhaps its head, hold 4 or 8 bits a number.

The weights are frozen. Adapters beside them are trained, as in QLoRA: `add_lora(quantize(model, "nf4"), …)`. A layer
makes its weights anew where it uses them, in the forward and in the backward, so one dense layer exists at a time, and
of a layer's experts a few (`ops.experts.adapted_moe_mlp`).
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.experts import ExpertWeights
from liger_jax.models.core.parameters import projections
from liger_jax.ops.block_quantized import KINDS, BlockQuantized, block_quantized
from liger_jax.ops.layout import full_spec, named_sharding
from liger_jax.ops.meshes import on_devices

Model = TypeVar("Model", bound=nnx.Module)


class QuantizedParam(nnx.Variable):
    """A `BlockQuantized` weight. It is not an `nnx.Param`, so it gets no gradient and no update."""


def quantize(model: Model, kind: str, *, block_size: int = 64, head: bool = False) -> Model:
    """Quantises the weights of all projections and experts, in place, one after another.

    Embeddings, norms, biases and routers keep their dtype. Blocks are along a projection's input axis, as in
    bitsandbytes. On a mesh, each block is on one device: where a dense kernel is sharded along its input, the codes are
    sharded along their output.

    Args:
        model: a model of `liger_jax.models`, before `add_lora`. Weights that are already quantised are not changed.
        kind: "nf4", 4.25 bits a number, or "int8", 8.25.
        block_size: the number of values that share a scale; it must be even and divide each projection's input width.
        head: whether the head is quantised, too. The fused loss then dequantizes it in slices of the vocabulary.

    Returns:
        The same model.

    Raises:
        ValueError: the kind is unknown; the blocks do not divide a width; the model has
            adapters, or a head that is tied to the embedding and is to be quantised; or nothing is left to quantise.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_attention_heads=2)
        >>> model = quantize(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), "nf4")
        >>> model.model.layers.self_attn.q_proj.kernel[...].codes.shape
        (32, 32, 64)

    References:
        Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (arXiv:2305.14314).
    """
    check_kind("quantize", kind)
    if nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        raise ValueError("quantize: the model has adapters. Quantise it before add_lora, or merge_lora(model) first.")
    dense = [(layer, "kernel") for _, layer in projections(model)] + weights_of_experts(model)
    dense = [(holder, name) for holder, name in dense if not is_quantized(getattr(holder, name)[...])]
    causal_model: Any = model
    with_head = head and not _is_tied("quantize", model) and not is_quantized(causal_model.head)
    if not dense and not with_head:
        raise ValueError("quantize: all projections of this model are quantised already.")
    for holder, name in dense:
        setattr(holder, name, QuantizedParam(quantized(getattr(holder, name)[...], kind, block_size=block_size)))
    if with_head:
        dense_head = causal_model.lm_head[...]
        causal_model.lm_head = QuantizedParam(quantized(dense_head, kind, block_size=block_size, axis=-1))
    return model


def dequantize(model: Model) -> Model:
    """Dequantizes all quantised weights, in place, one after another, to their original dtype.

    Args:
        model: a model with quantised weights. It computes the same afterwards, and its weights can be trained.

    Returns:
        The same model.

    Raises:
        ValueError: no weight is quantised.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_attention_heads=2)
        >>> model = dequantize(quantize(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), "int8"))
        >>> model.model.layers.self_attn.q_proj.kernel.shape
        (32, 64, 64)
    """
    holders = [(layer, "kernel") for _, layer in projections(model)] + weights_of_experts(model) + [(model, "lm_head")]
    holders_and_names = [
        (holder, name) for holder, name in holders if isinstance(getattr(holder, name, None), QuantizedParam)
    ]
    if not holders_and_names:
        raise ValueError("dequantize: no weight of this model is quantised.")
    for holder, name in holders_and_names:
        setattr(holder, name, nnx.Param(_dense(getattr(holder, name)[...])))
    return model


def weights_of_experts(model: nnx.Module) -> list[tuple[Any, str]]:
    """The modules that hold weights of experts, each with the name of one of them."""
    modules = (module for _, module in nnx.iter_graph(model) if isinstance(module, ExpertWeights))
    return [(module, name) for module in modules for name in module.names]


def check_kind(caller: str, kind: Any) -> None:
    """Raises a ValueError unless weights can be quantised this way."""
    if kind not in KINDS:
        raise ValueError(f"{caller}: quantize={kind!r} must be one of {KINDS}.")


def frozen(model: Model) -> Model:
    """The model with each quantised weight as a `QuantizedParam`, whatever variable a checkpoint was read into."""
    for holder, name in [(layer, "kernel") for _, layer in projections(model)] + weights_of_experts(model):
        if is_quantized(getattr(holder, name)[...]):
            setattr(holder, name, QuantizedParam(getattr(holder, name)[...]))
    return model


def is_quantized(weight: Any) -> bool:
    """Whether a weight is codes and scales."""
    return isinstance(weight, BlockQuantized)


def quantized(weight: jax.Array, kind: str, *, block_size: int = 64, axis: int = -2) -> BlockQuantized:
    """A parameter quantised on its own devices, one matrix after another."""
    sharding = named_sharding(weight)
    if sharding is None or sharding.mesh.size == 1:
        return _quantized(weight, kind, block_size, axis)
    spec = [*full_spec(sharding.spec, weight.ndim)]
    other = -1 if axis == -2 else -2
    if spec[axis] is not None and spec[other] is None:
        spec[axis], spec[other] = None, spec[axis] if weight.shape[other] > 1 else None
    local = functools.partial(_quantized, kind=kind, block_size=block_size, axis=axis)
    mapped = on_devices(local, mesh=sharding.mesh, in_specs=P(*spec), out_specs=P(*spec))
    return jax.jit(mapped)(jax.device_put(weight, NamedSharding(sharding.mesh, P(*spec))))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantized(weight, kind, block_size, axis):
    return _of_matrices(functools.partial(block_quantized, kind=kind, block_size=block_size, axis=axis), weight)


@jax.jit
def _dense(weight: BlockQuantized) -> jax.Array:
    """The weight as an array, in the dtype that it had."""
    return _of_matrices(jnp.asarray, weight)


def _of_matrices(function: Callable[[Any], Any], weight: Any) -> Any:
    """The function's results for a weight's matrices, one after another: of layers, and of their experts."""
    if (leading := weight.shape[:-2]) == ():
        return function(weight)
    in_a_row = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), weight)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), jax.lax.map(function, in_a_row))


def _is_tied(caller: str, model: Any) -> bool:
    if model.config.tie_word_embeddings:
        raise ValueError(f"{caller}: head=True, but the head is the embedding, which stays dense. Leave it out.")
    return False
