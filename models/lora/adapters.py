"""Adds adapters to a model, splits them off for training, switches them, and merges them with the weights."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Integer, Key, UInt32

from liger_jax.models.core.arguments import as_key
from liger_jax.models.core.dropout import DropoutKey, DropoutPieces
from liger_jax.models.core.parameters import projections
from liger_jax.models.hugging_face import adapter_targets
from liger_jax.models.hugging_face.adapter_targets import Targets, value_of
from liger_jax.models.lora import experts, outside, whole
from liger_jax.models.lora.adding import (
    add_outside,
    add_to,
    check_options,
    check_targets,
    keys_of,
    of_all_layers,
    problems_of_patterns,
)
from liger_jax.models.lora.linear import LoRALinear, become, names
from liger_jax.models.lora.outside import Table, tables, unadapt, with_adapters_on, without_adapters
from liger_jax.models.lora.vocabulary import HeadAdapter, key_of

# The weights of experts, as `add_lora` takes `parameters`.
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")

Model = TypeVar("Model", bound=nnx.Module)
_ATTRIBUTES = (
    "lora_a", "lora_b", "magnitude", "lora_scale", "dropout_key", "alpha", "rslora", "each", "dropout",
    "has_kernels",
)  # fmt: skip


def add_lora(
    model: Model,
    rank: int,
    *,
    alpha: float | int,
    targets: Sequence[str] | str | None = None,
    parameters: Sequence[str] = (),
    exclude: Sequence[str] | str = (),
    layers: Sequence[int] = (),
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    dropout: float | int = 0.0,
    rslora: bool = False,
    dora: bool = False,
    rngs: nnx.Rngs,
) -> Model:
    """Adds an adapter to each projection that the targets name, in place.

    The arguments have the meaning that they have in PEFT's `LoraConfig`, and names are those of a checkpoint, such as
    "model.layers.0.self_attn.q_proj". In stacked layers, A and B of a layer without an adapter are 0, and stay 0.

    A is initialised uniformly in ±1/√in, as in PEFT, and B with zeros. Both are float32 and are converted to the
    computation's dtype where they are used. The random numbers are determined by the key and the projection's name, so
    scanned and unrolled layers get the same. On a mesh, an adapter is sharded like the axis that it shares with its
    kernel.

    Args:
        model: a model of `liger_jax.models`.
        rank: at least 1. A rank above a projection's smaller width is useless, but allowed, as in PEFT.
        alpha: numerator of the scale, more than 0.
        targets: names of projections, or ends of their names, such as "q_proj" or "1.self_attn.q_proj"; or a regular
            expression for whole names; or "all-linear". `None` means all projections of the layers, whatever a family
            calls them, and neither the head nor the embedding. Llama's seven names ("q_proj", "k_proj", "v_proj",
            "o_proj", "gate_proj", "up_proj" and "down_proj") mean the same when they are given together, so that they
            can be used for Phi-3, too. In an NNX model of another library, layers are stacked or numbered modules.
        parameters: PEFT's `target_parameters`: weights of a mixture's experts, by their names or ends of these:
            "gate_up_proj" and "down_proj", whatever a checkpoint calls them. Each expert gets an A and a B.
        exclude: projections without an adapter, in the same forms.
        layers: numbers of the layers to which ends of names apply; empty for all.
        rank_pattern: separate ranks, by regular expressions for a name's end, such as `{"k_proj": 8}`.
        alpha_pattern: separate alphas, in the same way.
        dropout: the dropout probability of an adapter's inputs, in [0, 1), applied after `with_dropout`; not for
            experts.
        rslora: scale by alpha/√rank rather than alpha/rank.
        dora: also train the norm of each column of the weight, as in DoRA. Each call then computes W + scale·A·B.
        rngs: random numbers for A, from the stream `params` or the default one.

    Returns:
        The same model.

    Raises:
        ValueError: a name matches no projection, `targets` is `None` and layers cannot be distinguished from the head,
            an argument is out of its range, the model has adapters already, or experts would have dropout, DoRA, or
            adapters that differ between stacked layers.

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
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    check_options("add_lora", rank, alpha, dropout)
    wrong = problems_of_patterns(ranks, alphas) + adapter_targets.problems_of_layers(layers, ())
    for field, value in (("targets", targets), ("exclude", exclude)):
        wrong += adapter_targets.problems(field, value)
    if wrong:
        raise ValueError(f"add_lora: {'; '.join(wrong)}.")
    candidates = without_adapters("add_lora", model)
    is_whole, named = adapter_targets.split(targets)
    if is_whole:
        inside = of_all_layers("add_lora", candidates)
        more = Targets(named)
        candidates = [
            (path, each) for path, each in candidates if path in inside or any(map(more.adapts, names(path, each)))
        ]
        named = [*sorted({str(path[-1]) for path in inside}), *named]
    chosen = Targets(named, exclude, layers)
    if len(named) > 0 or not parameters:
        check_targets("add_lora", candidates, chosen, [table.name for table in tables(model)])
    experts.check_parameters("add_lora", model, parameters)
    if parameters and (dropout or dora):
        raise ValueError(
            f"add_lora: parameters={list(parameters)} with dropout={dropout} and dora={dora}, which adapters of "
            "experts do not support. Leave them out."
        )

    def of_experts(name):
        if adapter_targets.names_parameter(parameters, name):
            return value_of(ranks, name, rank), value_of(alphas, name, alpha)
        return None

    def own(name):
        if chosen.adapts(name):
            return value_of(ranks, name, rank), value_of(alphas, name, alpha)
        return None

    options = dict(dropout=dropout, rslora=rslora, dora=dora, key=rngs.params())
    experts.add("add_lora", model, of_experts, rslora=rslora, key=options["key"])
    add_outside("add_lora", model, own, **options)
    add_to(candidates, own, **options, kernels=getattr(model, "kernels", None))
    return model


def trainable(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Splits a model so that only its adapters have gradients and optimizer state.

    Gradients with respect to the adapters are computed without gradients of frozen weights.

    Args:
        model: a model with adapters.

    Returns:
        Graph, adapters, and base, the rest of the state: `nnx.merge(graph, adapters, base)` is the model, and
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
    """A copy of the model with its adapters switched on or off, which shares all arrays with it.

    With its adapters off, it computes the same as before `add_lora`: the reference of DPO or GRPO, without a second
    copy of the weights.

    Args:
        model: a model with adapters, on or off. It is not changed.
        on: whether the adapters of the result are switched on.

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
    is_outside = outside.switch(model, on)
    whole.switch(model, on)
    of_experts = experts.switch(model, on)
    if not adapted and not is_outside and not of_experts:
        raise ValueError("with_adapters: the model has no adapters. Add them: add_lora(model, …).")
    for projection in adapted:
        become(projection, LoRALinear if on else nnx.Linear)
    return model


def with_dropout(
    model: Model,
    key: Key[Array, ""] | UInt32[Array, "words"],
    pieces: Integer[Array, "B"] | Integer[Array, "B T"] | None = None,
) -> Model:
    """A copy of the model with keys for its adapters' dropout, which shares all arrays with it.

    Without keys there is no dropout, as in evaluation. Call it inside the loss function, with a different key in every
    step.

    The dropped inputs are determined by the key, the projection, and the token's document and position in it, and not
    by where the token is computed. If `pieces` has the documents' numbers, a step drops the same inputs in whole
    batches and micro-batches, in packed and padded rows, and on any mesh. Without them, rows are numbered from 0 in
    each call, so that all micro-batches have the same masks.

    Args:
        model: a model with adapters. It is not changed.
        key: a key of `jax.random.key` or `jax.random.PRNGKey`, from which each adapter of each layer derives its own.
        pieces: (B, T), the number of each token's document, unique in a step; or (B,), the number of each row, whose
            documents are distinguished by `segment_ids`. `None` to number rows from 0.

    Returns:
        A model with the same arrays.

    Raises:
        ValueError: the model has no adapters that are on, there are several keys, or `pieces` has another shape; and
            from the model's call, if the shapes of `pieces` and tokens differ, or if there are no `pieces` inside of a
            `jax.shard_map`, where all devices would have the same masks.
        TypeError: `key` is not a key, or `pieces` are not integers.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> model = add_lora(model, 2, alpha=4, dropout=0.1, rngs=nnx.Rngs(1))
        >>> import jax
        >>> with_dropout(model, jax.random.key(0)).model.layers.mlp.up_proj.dropout_key.shape
        (32,)
    """
    model, key = _sharing_arrays(model), as_key("with_dropout", key)
    for path, projection in with_adapters_on("with_dropout", model):
        if projection.dropout > 0:
            projection.dropout_key = DropoutKey(keys_of(key, path, projection))
    for table in tables(model):
        if table.adapter is not None and table.adapter.on and table.adapter.dropout > 0:
            table.adapter.dropout_key = DropoutKey(key_of(key, table.name))
    holder: Any = model
    holder.dropout_pieces = None if pieces is None else DropoutPieces(_by_rows(pieces))
    return model


def _by_rows(pieces: Any) -> Any:
    """Numbers of pieces, (B, T) or (B, 1)."""
    pieces = jnp.asarray(pieces)
    if not jnp.issubdtype(pieces.dtype, jnp.integer):
        raise TypeError(f"with_dropout: pieces has dtype {pieces.dtype}; it must be an integer array.")
    if pieces.ndim not in (1, 2):
        raise ValueError(
            f"with_dropout: pieces has shape {pieces.shape}; it must be (B, T), the document of each token, or (B,), "
            "the number of each row."
        )
    return pieces if pieces.ndim == 2 else pieces[:, None]


def _sharing_arrays(model: Model) -> Model:
    """A model with variables of its own that hold the same arrays."""
    return nnx.merge(*nnx.split(model), copy=True)


def merge_lora(model: Model) -> Model:
    """Adds the adapters' products to the weights, in place, and removes the adapters.

    W + scale·A·B is summed in float32 and rounded once, one projection after another. DoRA uses the same norm as the
    model with adapters. Modules that are trained as a whole replace their originals. Quantised weights become dense, in
    their original dtype. The result is an ordinary model without adapters.

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
