"""Adds adapters to the weights that they change."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from liger_jax.models.lora import experts, whole
from liger_jax.models.lora.linear import become
from liger_jax.models.lora.outside import Table, tables, unadapt, with_adapters_on
from liger_jax.models.lora.vocabulary import HeadAdapter

Model = TypeVar("Model", bound=nnx.Module)
_ATTRIBUTES = (
    "lora_a", "lora_b", "magnitude", "lora_scale", "dropout_key", "alpha", "rslora", "each", "dropout",
)  # fmt: skip


def merge_lora(model: Model) -> Model:
    """Adds the adapters' products to the weights, in place, and removes the adapters.

    W + scale·A·B is summed in float32 and rounded once, one projection after another. DoRA's norm is the one that the
    model with adapters has. What is trained as a whole takes the place of its original. Quantised weights become dense,
    in the dtype that they had. The model then saves, loads and
    runs as one that never had adapters.

    Args:
        model: a model with adapters.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no adapters that are on.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> from liger_jax.models.lora import add_lora
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model).model.layers.self_attn.q_proj).__name__
        'Linear'
    """
    for _, projection in with_adapters_on("merge_lora", model):
        kernel, factor = projection.adapted_kernel, projection.factor()
        if factor is not None:
            kernel *= factor[..., None, :]
        kernel = kernel.astype(projection.kernel.dtype)
        if isinstance(projection.kernel, nnx.Param):
            projection.kernel[...] = kernel
        else:  # quantised
            projection.kernel = nnx.Param(kernel)
        for name in _ATTRIBUTES:
            if name in vars(projection):
                delattr(projection, name)
        become(projection, nnx.Linear)
    if "dropout_pieces" in vars(model):
        delattr(model, "dropout_pieces")
    experts.merge(model)
    whole.merge(model)
    for table in tables(model):
        if table.adapter is not None:
            _merge_outside(table, model)
    unadapt(model)
    return model


def _merge_outside(table: Table, model: Any) -> None:
    """Adds the adapter of the embedding or of the head to its weight."""
    adapter, weight = table.adapter, getattr(table.holder, table.weight)
    if table.kind is HeadAdapter:
        merged, factor = (
            weight[...].astype(jnp.float32) + adapter.product.T,
            adapter.factor(weight[...], model.model.dtype),
        )
        merged = merged if factor is None else factor[:, None] * merged
    else:
        merged = weight[...].astype(jnp.float32) + adapter.product
    weight[...] = merged.astype(weight.dtype)
    delattr(table.holder, f"{table.weight}_adapter")
