"""Reads a model from a Hugging Face checkpoint, and writes one: `from_pretrained` and `save_pretrained`."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from liger_jax.models import quantized
from liger_jax.models.hugging_face import checkpoint, config_in_files, config_json, saving, weights


def read(
    model_class: Any,
    path_or_id: str | os.PathLike[str],
    *,
    dtype: Any,
    param_dtype: Any,
    mesh: Any,
    partition_specs: Any,
    quantize: str | None,
    **options: Any,
) -> Any:
    """Does the work of `CausalLM.from_pretrained` for a model class; `options` go to its constructor."""
    if quantize is not None:
        quantized.check_kind("from_pretrained", quantize)
    folder = checkpoint.find(path_or_id)
    config, stored_dtype, kept = _described(model_class, folder)
    config_in_files.check(config, weights.shapes(folder), folder)
    param_dtype = jnp.dtype(stored_dtype if param_dtype is None else param_dtype)
    dtype = param_dtype if dtype is None else dtype
    make = lambda: model_class(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0), **options)
    # A checkpoint may hold a tied head a second time, and old ones hold frequencies that the rotary embedding computes.
    ignored = ("rotary_emb.inv_freq",) + (("lm_head.weight",) if config.tie_word_embeddings else ())
    graph, state = nnx.split(nnx.eval_shape(make))
    shardings = weights.shardings_of(mesh, partition_specs, state)

    def kept_as(path, array):
        return array if quantize is None or path[-1] != "kernel" else quantized.quantized(array, quantize)

    model = weights.read(folder, graph, state, shardings=shardings, ignored=ignored, kept_as=kept_as)
    model.kept = kept
    return quantized.frozen(model)


def write(
    model: Any,
    path: str | os.PathLike[str],
    max_shard_bytes: int,
    config_fields: Mapping[str, Any] | None,
    tokenizer_from: str | os.PathLike[str] | None,
) -> None:
    """Does the work of `CausalLM.save_pretrained` for a model."""
    if max_shard_bytes < 1:
        raise ValueError(f"save_pretrained: max_shard_bytes={max_shard_bytes} must be positive.")
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    if added := [".".join(map(str, path)) for path, parameter in flat if type(parameter) is not nnx.Param]:
        raise ValueError(
            f"save_pretrained: {added} are parameters that Hugging Face's model does not have. Add adapters to the "
            "weights that they change, merge_lora(model), or save them alone, save_adapters(model, path); both are in "
            "liger_jax.models.lora."
        )
    model_class = type(model)
    values = json.loads(model.kept.config)
    values |= config_json.write(model.config, model.config_fixed, model_class.__name__, str(model.head.dtype))
    values |= config_fields or {}
    generation = model.kept.generation
    small_files = {
        checkpoint.CONFIG: (json.dumps(values, indent=2) + "\n").encode(),
        checkpoint.GENERATION: None if generation is None else generation.encode(),
    }
    if tokenizer_from is not None:
        small_files |= checkpoint.tokenizer_files(pathlib.Path(tokenizer_from))

    def meaning(folder):
        config, dtype, kept = _described(model_class, folder)
        return config, dtype, dataclasses.replace(kept, generation=None).stops

    shards = weights.shards(nnx.state(model, (nnx.Param, quantized.QuantizedParam)), max_shard_bytes)
    saving.write(pathlib.Path(path), shards, small_files, meaning)


def _described(model_class: Any, folder: pathlib.Path) -> tuple[Any, str, checkpoint.Kept]:
    """From a folder's JSON files: the config, the dtype of the weights, and the parts that a save writes again."""
    values, path = checkpoint.read_config(folder), folder / checkpoint.CONFIG
    config: Any = config_json.read(values, model_class.config_type, model_class.config_fixed, path)
    dtype = config_json.dtype_of(values, path)
    own = config_json.write(config, model_class.config_fixed, model_class.__name__, dtype)
    return config, dtype, checkpoint.kept_of(folder, values, own)
