"""Adds adapters to a model, splits them off for training, and switches them."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
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
from liger_jax.models.hugging_face import adapter_targets
from liger_jax.models.hugging_face.adapter_targets import Targets, value_of
from liger_jax.models.lora import outside, whole
from liger_jax.models.lora.linear import (
    DropoutKey,
    LoRALinear,
    LoRAScale,
    become,
    names,
    scale_of,
    with_adapters_on,
    without_adapters,
)
from liger_jax.models.lora.outside import check_dense, parts, untie
from liger_jax.models.lora.vocabulary import EmbeddingAdapter, HeadAdapter, key_of, new_adapter
from liger_jax.models.lora.whole import whole_like

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Model = TypeVar("Model", bound=nnx.Module)
Found = tuple[tuple[Any, ...], Any]  # a projection with its path
_MOST_RANK, _MOST_ALPHA = 2**31 - 1, float(np.finfo(np.float32).max)


def add_lora(
    model: Model,
    rank: int,
    *,
    alpha: float | int,
    targets: Sequence[str] | str = TARGETS,
    exclude: Sequence[str] | str = (),
    layers: Sequence[int] = (),
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    dropout: float | int = 0.0,
    rslora: bool = False,
    dora: bool = False,
    rngs: nnx.Rngs,
) -> Model:
    """Adds an adapter to each projection of these names, in place.

    The arguments mean what PEFT's `LoraConfig` means by them, and names are those of a checkpoint, such as
    "model.layers.0.self_attn.q_proj". In a stack of layers A and B of a layer without an adapter are 0, and stay so.

    A starts uniform in ±1/√in, as in PEFT, and B at zero. Both are float32 and are converted to the computation's
    dtype where they are used. The numbers follow from the key and the projection's name, so scanned and unrolled
    layers get the same. On a mesh an adapter is split like the axis that it shares with its kernel.

    Args:
        model: a model of `liger_jax.models`.
        rank: at least 1. More than a projection's smaller width adds nothing, and PEFT allows it.
        alpha: numerator of the scale, more than 0.
        targets: names of projections, or ends of their names, such as "q_proj" or "1.self_attn.q_proj"; or a regular
            expression for whole names; or "all-linear".
        exclude: projections without an adapter, in the same forms.
        layers: the numbers of the layers that ends of names mean; none for all.
        rank_pattern: ranks of their own, by regular expressions for a name's end, such as `{"k_proj": 8}`.
        alpha_pattern: alphas of their own, in the same way.
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
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    check_options("add_lora", rank, alpha, dropout)
    wrong = problems_of_patterns(ranks, alphas) + adapter_targets.problems_of_layers(layers, ())
    for field, value in (("targets", targets), ("exclude", exclude)):
        wrong += adapter_targets.problems(field, value)
    if wrong:
        raise ValueError(f"add_lora: {'; '.join(wrong)}.")
    found, chosen = without_adapters("add_lora", model), Targets(targets, exclude, layers)
    check_targets("add_lora", found, chosen, [part.name for part in parts(model)])

    def own(name):
        if chosen.adapts(name):
            return value_of(ranks, name, rank), value_of(alphas, name, alpha)
        return None

    options = dict(dropout=dropout, rslora=rslora, dora=dora, key=rngs.params())
    add_outside("add_lora", model, own, **options)
    add_to(found, own, **options)
    return model


def check_options(caller: str, rank: int, alpha: float | int, dropout: float | int) -> None:
    """Raises a ValueError unless adapters can have these numbers."""
    if rank < 1:
        raise ValueError(f"{caller}: rank={rank} must be at least 1.")
    if alpha <= 0:
        raise ValueError(f"{caller}: alpha={alpha} must be more than 0; the adapters are scaled by alpha/rank.")
    if not 0 <= dropout < 1:
        raise ValueError(f"{caller}: dropout={dropout} must be in [0, 1); 0 drops nothing.")


def problems_of_patterns(ranks: Any, alphas: Any) -> list[str]:
    """Clauses for wrong entries of `rank_pattern` and `alpha_pattern`."""
    is_rank = lambda value: type(value) is int and 1 <= value <= _MOST_RANK
    is_alpha = lambda value: type(value) in (int, float) and 0 < value <= _MOST_ALPHA
    return adapter_targets.problems_of_pattern("rank_pattern", ranks, is_rank, "an int of at least 1") + (
        adapter_targets.problems_of_pattern("alpha_pattern", alphas, is_alpha, "a finite float32 above 0")
    )


def check_targets(caller: str, found: Sequence[Found], targets: Targets, outside: Sequence[str]) -> None:
    """Raises a ValueError unless each of the targets names a projection of the model, or one of the parts outside."""
    all_names = [*outside, *(name for path, projection in found for name in names(path, projection))]
    listed = [] if isinstance(targets.names, str) else targets.names
    if unknown := [end for end in listed if not any(Targets([end]).adapts(name) for name in all_names)]:
        raise ValueError(
            f"{caller}: targets={list(listed)}: no projection is called {unknown}. The model has "
            f"{sorted({name.rpartition('.')[2] for name in all_names})}."
        )
    if not any(map(targets.adapts, all_names)):
        shown = repr(targets.names) if isinstance(targets.names, str) else list(listed)
        others = "".join(
            f", {field}={value!r}"
            for field, value in (("exclude", targets.excluded), ("layers", targets.layers))
            if value
        )
        raise ValueError(f"{caller}: targets={shown}{others} must name one projection at least.")


def add_to(
    found: Sequence[Found],
    own: Callable[[str], tuple[int, float | int] | None],
    *,
    dropout: float | int,
    rslora: bool,
    dora: bool,
    key: Key[Array, ""],
) -> list[Found]:
    """Adds adapters to those of these projections to which `own` gives rank and alpha, by a layer's name.

    Returns:
        The projections that have adapters now.
    """
    chosen = []
    for path, projection in found:
        each = tuple(
            (rank, float(alpha)) for rank, alpha in map(lambda name: own(name) or (0, 0), names(path, projection))
        )
        if any(rank for rank, _ in each):
            chosen.append((path, projection))
            _add(path, projection, each, rslora, key, with_scales=dora and any(not rank for rank, _ in each))
            projection.dropout = float(dropout)
            become(projection, LoRALinear)
            if dora:  # the norm as `factor` takes it where B is zero: new adapters change nothing
                norm = jnp.linalg.norm(projection.rounded(projection.kernel[...]), axis=-2)
                projection.magnitude = nnx.LoRAParam(_placed(norm, projection, None))
    return chosen


def add_outside(
    caller: str,
    model: Any,
    own: Callable[[str], tuple[int, float | int] | None],
    *,
    dropout: float | int,
    rslora: bool,
    dora: bool,
    key: Key[Array, ""],
) -> None:
    """Adds adapters to the embedding and to the head, if `own` gives them rank and alpha. They are then no longer tied.

    Raises:
        ValueError: the weight is quantised, or DoRA is asked for on the embedding.
    """
    chosen = [part for part in parts(model) if own(part.name) is not None]
    for part in chosen:
        check_dense(caller, part)
        if dora and part.kind is EmbeddingAdapter:
            raise ValueError(
                f"{caller}: DoRA on {part.name} is not supported. Leave it out of the targets, or dora=False."
            )
    if chosen:
        untie(model)
    for part in chosen:
        rank, alpha = own(part.name) or (0, 0)
        weight = getattr(part.holder, part.weight)[...]
        options = dict(alpha=float(alpha), rslora=rslora, dropout=float(dropout) if part.kind is HeadAdapter else 0.0)
        adapter = new_adapter(part.kind, weight, rank, key_of(key, part.name), **options)
        if dora:
            adapter.magnitude = nnx.LoRAParam(jnp.ones(weight.shape[:1], jnp.float32))
            adapter.magnitude = nnx.LoRAParam(1 / adapter.factor(weight, model.model.dtype))
        for variable in (adapter.lora_a, adapter.lora_b, adapter.magnitude):
            if variable is not None:
                variable[...] = whole_like(variable[...], weight)
        setattr(part.holder, f"{part.weight}_adapter", adapter)


def _add(path, projection, each, rslora, key, *, with_scales):
    """A and B of a projection whose layers have these ranks and alphas; with scales for each if they differ."""
    *layers, in_width, out_width = projection.kernel.shape
    ranks, present = [rank for rank, _ in each], [options for options in each if options[0]]
    rank, bound = max(ranks), 1 / math.sqrt(in_width)
    keys = _keys(key, path, projection)
    a = jnp.zeros((*layers, in_width, rank), jnp.float32)
    for width in sorted(set(ranks) - {0}):  # each layer's numbers depend on its own rank alone
        uniform = functools.partial(
            jax.random.uniform, shape=(in_width, width), dtype=jnp.float32, minval=-bound, maxval=bound
        )
        drawn = jnp.vectorize(uniform, signature="()->(i,r)")(keys)
        if width == rank == min(ranks):
            a = drawn
        else:
            is_own = np.array([own == width for own in ranks]).reshape(*layers, 1, 1)
            a = jnp.where(is_own, jnp.pad(drawn, [(0, 0)] * (drawn.ndim - 1) + [(0, rank - width)]), a)
    projection.lora_a = nnx.LoRAParam(_placed(a, projection, -2))
    projection.lora_b = nnx.LoRAParam(_placed(jnp.zeros((*layers, rank, out_width), jnp.float32), projection, -1))
    projection.alpha, projection.rslora = present[0][1], rslora
    if len(set(each)) > 1:
        projection.each = each
        scales = [scale_of(*options, rslora) if options[0] else 0.0 for options in each]
        if with_scales or len({scale_of(*options, rslora) for options in present}) > 1 or present[0][0] != rank:
            projection.lora_scale = LoRAScale(_placed(jnp.asarray(scales, jnp.float32), projection, None))


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
    is_outside = outside.switch(model, on)
    whole.switch(model, on)
    if not adapted and not is_outside:
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
    for part in parts(model):
        if part.adapter is not None and part.adapter.on and part.adapter.dropout > 0:
            part.adapter.dropout_key = DropoutKey(key_of(key, part.name))
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
