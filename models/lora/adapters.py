"""Adds adapters to a model, splits them off for training, switches them, and merges them into the weights."""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key, UInt32

from liger_jax.models.core.arguments import as_key
from liger_jax.models.core.parameters import projections
from liger_jax.models.lora.linear import (
    DropoutKey,
    LoRALinear,
    become,
    matching,
    names,
    with_adapters_on,
    without_adapters,
)

# All projections of most families. Phi-3 has qkv_proj and gate_up_proj in place of five of them.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Model = TypeVar("Model", bound=nnx.Module)


def add_lora(
    model: Model,
    rank: int,
    *,
    alpha: float | int,
    targets: Sequence[str] = TARGETS,
    dropout: float | int = 0.0,
    rslora: bool = False,
    dora: bool = False,
    rngs: nnx.Rngs,
) -> Model:
    """Adds an adapter to each projection of these names, in place.

    A starts uniform in ±1/√in, as in PEFT, and B at zero. Both are float32 and are converted to the computation's
    dtype where they are used. The numbers follow from the key and the projection's name, so scanned and unrolled
    layers get the same. On a mesh an adapter is split like the axis that it shares with its kernel.

    Args:
        model: a model of `liger_jax.models`.
        rank: at least 1. More than a projection's smaller width adds nothing, and PEFT allows it.
        alpha: numerator of the scale, more than 0.
        targets: names of projections, or ends of their names, such as "q_proj" or "self_attn.q_proj"; by default all.
        dropout: the share of an adapter's inputs that `with_dropout` drops, in [0, 1).
        rslora: scale by alpha/√rank rather than alpha/rank.
        dora: also train the length of each column of the weight, as DoRA does. Each call then computes W + scale·A·B.
        rngs: source of A, by its stream `params` or its default one.

    Returns:
        The same model.

    Raises:
        ValueError: a name matches no projection, an argument is out of its range, or the model has adapters already.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> model.model.layers.self_attn.q_proj.lora_a.shape
        (32, 8, 2)

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685); Kalajdzievski, "A Rank
        Stabilization Scaling Factor", 2023 (arXiv:2312.03732); Liu et al., "DoRA", 2024 (arXiv:2402.09353).
    """
    check_options("add_lora", rank, alpha, dropout)
    all_projections = without_adapters("add_lora", model)
    if targets is TARGETS:  # all, whatever their names are
        targets = sorted({path[-1] for path, _ in all_projections})
    found = matching("add_lora", all_projections, targets)
    add_to(found, rank, alpha=alpha, dropout=dropout, rslora=rslora, dora=dora, key=rngs.params())
    return model


def check_options(caller: str, rank: int, alpha: float | int, dropout: float | int) -> None:
    """Raises a ValueError unless adapters can have these numbers."""
    if rank < 1:
        raise ValueError(f"{caller}: rank={rank} must be at least 1.")
    if alpha <= 0:
        raise ValueError(f"{caller}: alpha={alpha} must be more than 0; the adapters are scaled by alpha/rank.")
    if not 0 <= dropout < 1:
        raise ValueError(f"{caller}: dropout={dropout} must be in [0, 1); 0 drops nothing.")


def add_to(
    found: Sequence[tuple[tuple[Any, ...], Any]],
    rank: int,
    *,
    alpha: float | int,
    dropout: float | int,
    rslora: bool,
    dora: bool,
    key: Key[Array, ""],
) -> None:
    """Adds an adapter to each of these projections, which come with their paths."""
    for path, projection in found:
        *layers, in_width, out_width = projection.kernel.shape
        bound = 1 / math.sqrt(in_width)
        uniform = functools.partial(
            jax.random.uniform, shape=(in_width, rank), dtype=jnp.float32, minval=-bound, maxval=bound
        )
        a = jnp.vectorize(uniform, signature="()->(i,r)")(_keys(key, path, projection))
        b = jnp.zeros((*layers, rank, out_width), jnp.float32)
        projection.lora_a = nnx.LoRAParam(_placed(a, projection, -2))
        projection.lora_b = nnx.LoRAParam(_placed(b, projection, -1))
        projection.alpha, projection.rslora, projection.dropout = float(alpha), rslora, float(dropout)
        become(projection, LoRALinear)
        if dora:  # the norm as `factor` takes it where B is zero: new adapters change nothing
            norm = jnp.linalg.norm(projection.rounded(projection.kernel[...]), axis=-2)
            projection.magnitude = nnx.LoRAParam(_placed(norm, projection, None))


def trainable(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Splits a model so that gradients and the optimizer's state exist for its adapters alone.

    A gradient with respect to the adapters takes no product for the gradient of a frozen weight.

    Args:
        model: a model with adapters.

    Returns:
        Graph, adapters, and all other state: `nnx.merge(graph, adapters, base)` is the model, and
        `make_step(graph, optimizer)` makes `step((adapters, optimizer.init(adapters)), batch, base)`.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> graph, adapters, base = trainable(add_lora(model, 2, alpha=4, targets=["q_proj"], rngs=nnx.Rngs(1)))
        >>> [path[-1] for path, _ in nnx.to_flat_state(adapters)]
        ['lora_a', 'lora_b']
    """
    with_adapters_on("trainable", model)
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    return graph, adapters, base


def with_adapters(model: Model, on: bool) -> Model:
    """The model with its adapters on or off, which shares all arrays with it.

    With the adapters off it runs as the model did before `add_lora`: the reference of DPO or GRPO, without a second
    copy of the weights.

    Args:
        model: a model with adapters, on or off. It stays as it is.
        on: whether the adapters of the result count.

    Returns:
        A model with the same arrays.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> policy = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> reference = with_adapters(policy, False)
        >>> reference.head is policy.head
        True
    """
    model = _sharing_arrays(model)
    adapted = [projection for _, projection in projections(model) if hasattr(projection, "lora_a")]
    if not adapted:
        raise ValueError("with_adapters: the model has no adapters. Add them: add_lora(model, …).")
    for projection in adapted:
        become(projection, LoRALinear if on else nnx.Linear)
    return model


def with_dropout(model: Model, key: Key[Array, ""] | UInt32[Array, "words"]) -> Model:
    """The model with keys for its adapters' dropout, which shares all arrays with it.

    Without keys nothing is dropped, as in evaluation. Give every step a key of its own, inside the loss function.

    Args:
        model: a model with adapters. It stays as it is.
        key: of `jax.random.key` or `jax.random.PRNGKey`; each adapter of each layer derives its own from it.

    Returns:
        A model with the same arrays.

    Raises:
        ValueError: the model has no adapters that are on, or there are several keys.
        TypeError: `key` is no key.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> model = add_lora(model, 2, alpha=4, dropout=0.1, rngs=nnx.Rngs(1))
        >>> with_dropout(model, jax.random.key(0)).model.layers.mlp.up_proj.dropout_key.shape
        (32,)
    """
    model, key = _sharing_arrays(model), as_key("with_dropout", key)
    for path, projection in with_adapters_on("with_dropout", model):
        if projection.dropout > 0:
            projection.dropout_key = DropoutKey(_keys(key, path, projection))
    return model


def merge_lora(model: Model) -> Model:
    """Adds the adapters' products to the weights, in place, and removes the adapters.

    W + scale·A·B is summed in float32 and rounded once, one projection after another. DoRA's norm is the one that the
    model with adapters has. Quantised weights become dense, in the dtype that they had. The model then saves, loads and
    runs as one that never had adapters.

    Args:
        model: a model with adapters.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no adapters that are on.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
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
        for name in ("lora_a", "lora_b", "magnitude", "dropout_key", "alpha", "rslora", "dropout"):
            if name in vars(projection):
                delattr(projection, name)
        become(projection, nnx.Linear)
    return model


def _keys(key: Key[Array, ""], path: tuple[Any, ...], projection: nnx.Linear) -> Key[Array, "*layers"]:
    """A key for each layer of the projection, stacked like the layers."""
    numbers = np.array([zlib.crc32(name.encode()) for name in names(path, projection)], np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers).reshape(projection.kernel.shape[:-2])


def _placed(array: jax.Array, projection: nnx.Linear, shared_axis: int | None) -> jax.Array:
    """The array on its kernel's mesh, split like the kernel along the axis that they share."""
    kernel = jax.tree.leaves(projection.kernel[...])[0]  # the codes of a quantised kernel are split like the kernel
    sharding = None if isinstance(kernel, Tracer) else kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    of_kernel = (*sharding.spec, *(None for _ in range(kernel.ndim - len(sharding.spec))))
    spec = [None] * array.ndim
    if shared_axis is not None:
        spec[shared_axis] = of_kernel[shared_axis]
    return jax.device_put(array, NamedSharding(sharding.mesh, P(*spec)))


def _sharing_arrays(model: Model) -> Model:
    """A model with variables of its own that hold the same arrays."""
    return nnx.merge(*nnx.split(model), copy=True)
