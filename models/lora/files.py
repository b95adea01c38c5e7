"""Adapters as files, which PEFT reads and writes too."""

import os
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from flax import nnx

from liger_jax.models.core.config_fields import short
from liger_jax.models.core.parameters import kernel_of, projections
from liger_jax.models.hugging_face import adapter_files, checkpoint
from liger_jax.models.hugging_face.adapter_config import AdapterConfig
from liger_jax.models.hugging_face.adapter_targets import Targets, patterns_of
from liger_jax.models.hugging_face.source import Source, tokenizer_files
from liger_jax.models.hugging_face.weights import fetched
from liger_jax.models.lora import expert_files, experts, more_files
from liger_jax.models.lora.adding import add_outside, add_to, check_options
from liger_jax.models.lora.linear import names, of_layers, trained
from liger_jax.models.lora.outside import tables, with_adapters_on, without_adapters

Model = TypeVar("Model", bound=nnx.Module)
# In these families PEFT takes such names, whole ones too, for the weights of experts (its `_convert_peft_config_moe`).
_NAMES_OF_EXPERTS, _FUSED = (".gate_proj", ".up_proj", ".down_proj"), ("qwen3_moe", "qwen3_next")


def save_adapters(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    tokenizer_from: str | os.PathLike[str] | Source | None = None,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT and `load_adapters` read.

    `target_modules` has names such as "q_proj" if every layer has the adapter, and otherwise full names. If the process
    is killed during a save, the folder has the earlier adapters or the new ones, or no adapter_config.json, as with
    `save_pretrained`. `load_adapters` then says how to repair it, and the next save repairs it too.

    Args:
        model: a model with adapters.
        path: a folder, created if it does not exist. Earlier adapters in it are replaced.
        base_model: name or path of the model that the adapters belong to, for PEFT's `AutoPeftModel`. If it is a folder
            with the config.json of a multimodal model, the adapters' names are those of that model. If it is not a
            folder, names follow the checkpoint that `model` was loaded from.
        tokenizer_from: a folder with a tokenizer's files, or the result of `hugging_face.source.find`. These files, and
            the generation_config.json of the checkpoint that `model` was loaded from, then replace those in `path`.
            `None` to leave those in `path` unchanged.

    Raises:
        ValueError: the model has no adapters that are on, config.json in `base_model` is damaged, or `tokenizer_from`
            is not a folder with a tokenizer's files.
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> from liger_jax.models.lora import add_lora
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(model, folder)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    adapted = with_adapters_on("save_adapters", model)
    tensors, own = {}, {}
    for path_in_model, projection in adapted:
        arrays = {name: fetched(variable[...]) for name, variable in trained(projection).items()}
        if not kernel_of(path_in_model, projection).stacked:
            arrays = {name: array[None] for name, array in arrays.items()}
        of_projection = of_layers(path_in_model, projection)
        ranks = [(name, of_projection.get(name, (0, 0))[0]) for name in names(path_in_model, projection)]
        tensors, own = tensors | adapter_files.tensors(ranks, arrays), own | of_projection
    outside = [table for table in tables(model) if table.adapter is not None]
    for table in outside:
        arrays = {name: fetched(variable[...])[None] for name, variable in trained(table.adapter).items()}
        tensors |= adapter_files.tensors([(table.name, table.adapter.rank)], arrays)
        own[table.name] = table.adapter.rank, table.adapter.alpha
    of_experts, own_of_experts = expert_files.to_save(model)
    own |= own_of_experts
    rank, rank_pattern = patterns_of({name: rank for name, (rank, _) in own.items()})
    alpha, alpha_pattern = patterns_of({name: alpha for name, (_, alpha) in own.items()})
    others: list[Any] = [x for _, x in adapted] + [table.adapter for table in outside]
    first = max(others, key=lambda x: x.dropout, default=None)
    rslora = experts.adapted(model)[0].rslora if first is None else first.rslora
    fields, more = more_files.to_save(model)
    config = AdapterConfig(
        rank=rank,
        alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        targets=Targets(adapter_files.targets_of(tensors, _all_names(model))),
        dropout=0.0 if first is None else first.dropout,
        rslora=rslora,
        dora=first is not None and first.magnitude is not None,
        parameters=sorted({name.partition(".mlp.")[2] for name in own_of_experts}),
        **fields,
    )
    _say_what_peft_takes_for_experts(model, own.keys() - own_of_experts.keys())
    tensors |= more | of_experts
    folder, small_files = pathlib.Path(path), {}
    if tokenizer_from is not None:
        generation = getattr(model, "kept", checkpoint.Kept()).generation
        small_files = tokenizer_files("save_adapters", tokenizer_from, folder)
        small_files |= {checkpoint.GENERATION: None if generation is None else generation.encode()}
    is_multimodal = _is_multimodal(model, base_model)
    adapter_files.write(folder, config, tensors, base_model, multimodal=is_multimodal, small_files=small_files)


def load_adapters(model: Model, path: str | os.PathLike[str], *, dropout: float | int | None = None) -> Model:
    """Adds adapters that PEFT or `save_adapters` wrote, in place.

    The tensors' names determine which layers have adapters. In stacked layers, A and B of a layer without an adapter
    are 0: their gradients are 0, and `save_adapters` omits them.

    Args:
        model: the model that the adapters belong to, without adapters.
        path: a folder with adapter_config.json and adapter_model.safetensors.
        dropout: the dropout probability of an adapter's inputs, applied after `with_dropout`; `None` for that of
            adapter_config.json.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: the folder lacks one of the files.
        ValueError: a file is damaged; the adapters are of a kind that is not supported; or they do not fit the model,
            and the message lists what is missing, left over or of another shape. The model is then unchanged.

    Example:
        >>> import tempfile
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> from liger_jax.models.lora import add_lora
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> make = lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(add_lora(make(), 2, alpha=4, rngs=nnx.Rngs(1)), folder)
        ...     model = load_adapters(make(), folder)
        >>> model.model.layers.self_attn.q_proj.alpha
        4.0
    """
    folder = pathlib.Path(path)
    config, tensors = adapter_files.read(folder)
    dropout = config.dropout if dropout is None else dropout
    check_options("load_adapters", config.rank, config.alpha, dropout)
    adapted = adapter_files.adapted_names(tensors) | {name for name in _all_names(model) if config.adapts(name)}
    candidates, shapes = without_adapters("load_adapters", model), {}
    for path_in_model, projection in candidates:
        own = [name for name in names(path_in_model, projection) if name in adapted]
        shapes |= adapter_files.shapes(own, projection.kernel.shape[-2:], config)
    for table in tables(model):
        if table.name in adapted:
            shapes |= adapter_files.shapes([table.name], table.widths(model), config)
    shapes |= more_files.shapes(model, config, adapted, tensors)
    of_experts, stored = expert_files.parts_to_load(model, config, tensors)
    adapter_files.check(folder, tensors, shapes | of_experts)
    options = dict(dropout=dropout, rslora=config.rslora, dora=config.dora)
    own = lambda name: config.of(name) if name in adapted else None
    key, kernels = jax.random.key(0), getattr(model, "kernels", None)
    expert_files.load(model, config, stored, tensors)
    add_outside("load_adapters", model, own, **options, key=key)
    more_files.load(model, config, tensors)
    for path_in_model, projection in add_to(candidates, own, **options, key=key, kernels=kernels):
        for name, variable in trained(projection).items():
            of_layer = variable.shape[kernel_of(path_in_model, projection).stacked :]
            array = adapter_files.stacked(tensors, names(path_in_model, projection), name, of_layer)
            more_files.put(variable, array)
    more_files.load_whole(model, config, tensors)
    return model


def _all_names(model: nnx.Module) -> list[str]:
    """The names in a checkpoint of all that may have an adapter."""
    outside = [table.name for table in tables(model)]
    return outside + [name for path, projection in projections(model) for name in names(path, projection)]


def _say_what_peft_takes_for_experts(model: nnx.Module, adapted: Iterable[str]) -> None:
    """Warns of adapters of shared experts and of dense layers that PEFT does not load beside routed experts."""
    fixed = getattr(model, "config_fixed", {}).get("model_type", ())
    lost = sorted(name for name in adapted if name.endswith(_NAMES_OF_EXPERTS) and {*fixed} & {*_FUSED})
    if lost:
        warnings.warn(
            f"save_adapters: load_adapters reads the adapters of {short(lost)}, PEFT does not: for it these names are "
            "those of routed experts. Save the merged model (merge_lora) for others, or leave the projections out: "
            "add_lora(…, exclude=[…]).",
            stacklevel=3,
        )


def _is_multimodal(model: nnx.Module, base_model: str | None) -> bool:
    """Whether transformers builds a multimodal model from the checkpoint that adapters of this model belong to."""
    folder = None if base_model is None else pathlib.Path(base_model)
    if folder is not None and (folder / checkpoint.CONFIG).is_file():
        return Source(folder).multimodal
    return getattr(model, "kept", checkpoint.Kept()).whole is not None
