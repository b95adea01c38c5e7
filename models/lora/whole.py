"""What is trained as a whole beside adapters: modules, biases, and vectors of single tokens, as in PEFT."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parameters import KEPT, parameter, projections
from liger_jax.models.hugging_face.adapter_config import BIASES
from liger_jax.models.lora.linear import names, of_layers
from liger_jax.models.lora.outside import adapt, check_dense, tables, untie, with_adapters_on
from liger_jax.models.lora.vocabulary import TokenRows
from liger_jax.models.quantized import is_quantized
from liger_jax.ops.layout import named_sharding

Model = TypeVar("Model", bound=nnx.Module)


class TrainedWeight(nnx.LoRAParam):
    """A weight, bias or norm that is trained as a whole. Its original is kept under its name with `_kept` appended."""


def train_more(
    model: Model,
    *,
    modules: Sequence[str] = (),
    tokens: Sequence[int] | Mapping[str, Sequence[int]] = (),
    bias: str = "none",
) -> Model:
    """Trains more than adapters, in place: whole modules, embeddings of single tokens, or biases.

    A float32 copy of each is trained, and the original is kept for `with_adapters(model, False)`. A tied head and
    embedding are untied if one of them is trained as a whole. With single tokens, they stay tied.

    Args:
        model: a model after `add_lora`.
        modules: PEFT's `modules_to_save`: ends of names of modules, such as "lm_head", "embed_tokens" or "norm".
        tokens: PEFT's `trainable_token_indices`: tokens of the embedding, and of a head that is tied to it; or a dict
            with tokens for "embed_tokens" and "lm_head".
        bias: "none", "all", or "lora_only" for the biases of projections with adapters.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no adapters, or `train_more` was called before; a module is not in the model, has an
            adapter or is quantised; a token is not in the vocabulary or occurs twice; or `bias` is unknown.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> from liger_jax.models.lora import add_lora, trainable
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> model = add_lora(model, 2, alpha=4, targets=["q_proj"], rngs=nnx.Rngs(1))
        >>> graph, adapters, base = trainable(train_more(model, modules=["lm_head"]))
        >>> [path[-1] for path, _ in nnx.to_flat_state(adapters)]
        ['lm_head', 'lora_a', 'lora_b']
    """
    with_adapters_on("train_more", model)
    if bias not in BIASES:
        raise ValueError(f"train_more: bias={bias!r} must be one of {BIASES}.")
    if wholes(model) or any(table.rows is not None for table in tables(model)):
        raise ValueError("train_more: it was called for this model before. Pass everything in one call.")
    if isinstance(modules, str):
        raise ValueError(f"train_more: modules={modules!r} must be a list of names.")
    adapted = {name for path, x in projections(model) if hasattr(x, "lora_a") for name in of_layers(path, x)}
    adapted |= {table.name for table in tables(model) if table.adapter is not None}
    _check_modules(model, modules, adapted)
    listed = tokens if isinstance(tokens, Mapping) else {"embed_tokens": tokens} if len(tokens) else {}
    _check_tokens(model, listed, modules)
    if any(_is_saved(table.name, modules) for table in tables(model)):
        untie(model)
    chosen = [(path, x) for path, x in _parameters(model) if _is_whole(path, x.shape, modules, bias, adapted)]
    for path, variable in chosen:
        holder = holder_of(model, path)
        setattr(holder, path[-1], TrainedWeight(variable[...].astype(jnp.float32)))
        setattr(holder, f"{path[-1]}{KEPT}", nnx.Param(variable[...]))
    for table in tables(model):
        own = next((listed[name] for name in listed if table.name.endswith(name)), ())
        if len(own):
            adapt(model)
            weight = getattr(table.holder, table.weight)[...]
            rows = weight[jnp.asarray(own)].astype(jnp.float32)
            setattr(table.holder, f"{table.weight}_rows", TokenRows(tuple(map(int, own)), whole_like(rows, weight)))
    return model


def wholes(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """The weights that are trained as a whole, with their paths, whose last names end in `_kept` if they are off."""
    return [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, TrainedWeight)]


def switch(model: nnx.Module, on: bool) -> bool:
    """Lets the trained weights count or their originals, in place. Returns whether there are any."""
    variables = wholes(model)
    for path, variable in variables:
        name = path[-1].removesuffix(KEPT)
        if (path[-1] == name) != on:
            holder, other = holder_of(model, path), name if path[-1] != name else f"{name}{KEPT}"
            original = getattr(holder, other)
            setattr(holder, other, variable)
            setattr(holder, path[-1], original)
    return bool(variables)


def merge(model: nnx.Module) -> None:
    """Puts the trained weights and tokens in the places of the originals, in place and in their dtype."""
    for path, variable in wholes(model):
        holder, original = holder_of(model, path), f"{path[-1]}{KEPT}"
        setattr(holder, path[-1], nnx.Param(variable[...].astype(getattr(holder, original).dtype)))
        delattr(holder, original)
    for table in tables(model):
        if table.rows is not None:
            weight = getattr(table.holder, table.weight)
            weight[...] = table.rows.of_table(weight[...])
            delattr(table.holder, f"{table.weight}_rows")


def tensor_names(model: nnx.Module, path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names that PEFT gives a whole weight's tensors: a bias beside an adapter is one of its base layer."""
    names = parameter(path, shape).tensor_names
    if path[-1].removesuffix(KEPT) != "bias" or not hasattr(holder_of(model, path), "lora_a"):
        return names
    return tuple(name.removesuffix("bias") + "base_layer.bias" for name in names)


def holder_of(model: Any, path: tuple[Any, ...]) -> Any:
    """The module that holds the variable at this path."""
    for key in path[:-1]:
        model = getattr(model, key) if isinstance(key, str) and hasattr(model, key) else model[key]
    return model


def _parameters(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The base weights that are no codes, with their paths."""
    return ((path, node) for path, node in nnx.iter_graph(model) if type(node) is nnx.Param)


def _module_names(path: tuple[Any, ...], shape: tuple[int, ...]) -> list[str]:
    """The names of the modules that hold the tensors at this path, one for each layer of a stack."""
    return [name.rpartition(".")[0] for name in parameter(path, shape).tensor_names]


def _is_saved(module: str, modules: Sequence[str]) -> bool:
    """Whether PEFT saves this module: its name, or that of one that holds it, ends with one of these."""
    words = module.split(".")
    return any(".".join(words[: n + 1]).endswith(tuple(modules)) for n in range(len(words))) if modules else False


def _is_whole(
    path: tuple[Any, ...], shape: tuple[int, ...], modules: Sequence[str], bias: str, adapted: Set[str]
) -> bool:
    """Whether a parameter is trained as a whole beside adapters of these names."""
    held_by = _module_names(path, shape)
    if path[-1] == "bias" and (bias == "all" or bias == "lora_only" and not adapted.isdisjoint(held_by)):
        return True
    saved = [_is_saved(name, modules) for name in held_by]
    if any(saved) and not all(saved):
        raise ValueError(
            f"train_more: modules={list(modules)} name some layers of {'.'.join(map(str, path))}, which are stacked. "
            "Load the model with scan_layers=False."
        )
    return any(saved)


def expected(
    model: Any, modules: Sequence[str], tokens: Mapping[str, Sequence[int]], bias: str, adapted: Set[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, by names, of all that `train_more` would train beside adapters of these names."""
    _check_modules(model, modules, adapted)
    _check_tokens(model, tokens, modules)
    shapes = {}
    for path, variable in _parameters(model):
        if _is_whole(path, variable.shape, modules, bias, adapted):
            info = parameter(path, variable.shape)
            of_base = lambda name, last=path[-1]: last == "bias" and name.removesuffix(".bias") in adapted
            for name in info.tensor_names:
                name = f"{name.removesuffix('bias')}base_layer.bias" if of_base(name) else name
                shapes[name] = info.tensor_shape(variable.shape)
    width = model.config.hidden_size if tables(model) else 0
    if tables(model) and model.config.tie_word_embeddings and _is_saved("lm_head", modules):
        shapes["lm_head.weight"] = (model.config.vocab_size, width)
    for name, own in tokens.items():
        table = next(table for table in tables(model) if f".{table.name}".endswith(f".{name}"))
        shapes[f"{table.name}.token_adapter.trainable_tokens_delta"] = (len(own), width)
    return shapes


def _check_modules(model: Any, modules: Sequence[str], adapted: Set[str]) -> None:
    known = {name for path, x in _parameters(model) for name in _module_names(path, x.shape)}
    known |= {table.name for table in tables(model)} | {
        name for path, x in projections(model) for name in names(path, x)
    }
    if unknown := [each for each in modules if not any(_is_saved(name, [each]) for name in known)]:
        raise ValueError(
            f"train_more: modules={list(modules)}: no module is called {unknown}. The model has "
            f"{sorted({name.rpartition('.')[2] for name in known})}."
        )
    for path, projection in projections(model):
        if any(_is_saved(name, modules) for name in names(path, projection)):
            where = ".".join(map(str, path))
            if is_quantized(projection.kernel[...]):
                raise ValueError(
                    f"train_more: {where} is quantised, and quantised weights cannot be trained. Leave it out."
                )
            if not adapted.isdisjoint(names(path, projection)):
                raise ValueError(f"train_more: {where} has an adapter. Train it as a whole or by an adapter, not both.")
    for table in tables(model):
        if _is_saved(table.name, modules):
            check_dense("train_more", table)
            if table.name in adapted:
                raise ValueError(
                    f"train_more: {table.name} has an adapter. Train it as a whole or by an adapter, not both."
                )


def _check_tokens(model: Any, listed: Mapping[str, Sequence[int]], modules: Sequence[str]) -> None:
    if not listed:
        return
    by_name = {table.name: table for table in tables(model)}
    for name, tokens in listed.items():
        table = next((by_name[each] for each in by_name if f".{each}".endswith(f".{name}")), None)
        if table is None:
            raise ValueError(f"train_more: tokens of {name!r}, which must be one of {list(by_name)}.")
        vocab_size = model.config.vocab_size
        if any(not 0 <= token < vocab_size for token in tokens) or len(set(tokens)) < len(tokens):
            raise ValueError(f"train_more: tokens={list(tokens)} must each be in [0, {vocab_size}), and occur once.")
        if table.adapter is not None or _is_saved(table.name, modules):
            raise ValueError(f"train_more: tokens of {name!r}, which is trained as a whole or by an adapter already.")
        check_dense("train_more", table)
    others = [table.name for table in tables(model) if table.adapter is not None or _is_saved(table.name, modules)]
    if others and (model.config.tie_word_embeddings or getattr(model, "untied", False)):
        raise ValueError(
            f"train_more: tokens={dict(listed)} of a head that is tied to the embedding, but {others} have an "
            "adapter or are trained as a whole. Choose one of them."
        )
    if model.config.tie_word_embeddings and any("lm_head" in name for name in listed):
        raise ValueError(
            "train_more: tokens of 'lm_head', which is tied to the embedding. Name them as tokens of 'embed_tokens'."
        )


def whole_like(x: jax.Array, like: Any) -> jax.Array:
    """The array, whole on every device of another's mesh."""
    sharding = named_sharding(like)
    return x if sharding is None else jax.device_put(x, NamedSharding(sharding.mesh, P()))
