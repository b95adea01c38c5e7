"""Reads a model from a Hugging Face checkpoint, and writes one: `from_pretrained` and `save_pretrained`."""

import dataclasses
import json
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from liger_jax.models import quantized
from liger_jax.models.core.config_fields import short
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import Remat
from liger_jax.models.core.stretched import stretched
from liger_jax.models.hugging_face import checkpoint, config_json, saving, weights, wrapper
from liger_jax.models.hugging_face.names import no_attribute, refusing_foreign_names
from liger_jax.models.hugging_face.source import Source, find, tokenizer_files
from liger_jax.models.hugging_face.weights import EMBEDDING

Model = TypeVar("Model", bound="Pretrained")


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class Pretrained(nnx.Module):
    """What `CausalLM` does with Hugging Face checkpoints: it reads one and writes one."""

    config_type: type
    config_fixed: Mapping[str, tuple[Any, ...]]
    config: Any
    kept: checkpoint.Kept
    head: Any  # its dtype goes to config.json

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __getattr__(self, name):
            raise no_attribute(self, name)

    @classmethod
    @refusing_foreign_names
    def from_pretrained(
        cls: type[Model],
        path_or_id: str | os.PathLike[str] | Source,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        mesh: Mesh | None = None,
        partition_specs: Callable[[str, tuple[int, ...]], PartitionSpec] | Any = None,
        quantize: str | None = None,
        kernels: KernelOptions = KernelOptions(),
        remat: Remat = "none",
        scan_layers: bool = True,
        length: int | None = None,
        rope_scaling: str | None = None,
    ) -> Model:
        """Reads a model from a Hugging Face checkpoint: config.json and safetensors, one file or many.

        Parameters are read one after another, directly to their devices. In addition to the model, a host holds one
        parameter at a time; on a mesh of several hosts, it reads only the shards of its devices.

        Args:
            path_or_id: a folder, or an id such as "org/name", which `huggingface_hub` downloads; or the result of
                `hugging_face.source.find`, whose files are not read again.
            dtype: dtype of the computation; `None` for the parameters' dtype.
            param_dtype: dtype of the parameters; `None` for config.json's, or float32 if that names none.
            mesh: the mesh of devices for the parameters; `None` for the default device.
            partition_specs: how parameters are sharded over the mesh. A function gets a parameter's name, such as
                "model.layers.mlp.up_proj.kernel", and its shape, and returns a `PartitionSpec`. A pytree of
                `PartitionSpec` has the structure of `nnx.state(model)`. `None` to shard them by the layout of
                `kernels`, or to replicate them if it names no axes.
            quantize: "nf4" or "int8" for projections and experts in 4 or 8 bits, as by `quantized.quantize`. Each is
                quantised before the next is read, so that a device holds one dense matrix, or one layer's dense
                experts, at a time. Projections that bitsandbytes has quantised to nf4 are kept bit for bit, also with
                `None`.
            kernels: which ops run as kernels.
            remat: what each layer keeps for the backward, as in the constructor.
            scan_layers: whether the layers' parameters are stacked and scanned.
            length: the longest row that the model should accept; `None` for the model's positions.
            rope_scaling: how the rotary embedding is scaled if the model's positions are fewer, as in
                `models.stretched`.

        Returns:
            The model. It keeps the other fields of config.json, and generation_config.json, for `generate` and
            `save_pretrained`. If config.json ties the head to the embedding, but the files have both and they differ,
            the model has both, with a warning.

        Raises:
            FileNotFoundError: the folder does not exist, or has no config.json or no safetensors. Pickled weights are
                not read. If a save into the folder was interrupted, the message says how to repair it.
            ValueError: a file is damaged; config.json has values that the model does not support, or disagrees with the
                tensors on the number of layers or tokens; tensors are missing, unexpected, of a wrong shape or not
                floats (the message lists all of them); `partition_specs` do not fit the parameters; `quantize` is
                unknown, or its blocks of 64 do not divide a projection's input; or the model does not accept rows of
                that `length`.
            ImportError: an id is given, and `huggingface_hub` is not installed.
            TypeError: an option has transformers' name instead of ours, which the message names.
        """
        source = find(path_or_id)
        if quantize is not None:
            quantized.check_kind("from_pretrained", quantize)
            if source.is_nf4 and quantize != "nf4":
                raise ValueError(
                    f"from_pretrained: quantize={quantize!r}, but {source.folder} is nf4 already. Leave it out."
                )
            quantize = None if source.is_nf4 else quantize
        folder = source.folder
        config, stored_dtype, kept = _described(cls, source)
        config = config if length is None else stretched(config, length, rope_scaling)
        _check_shapes(config, weights.shapes(folder), folder)
        if config.tie_word_embeddings and weights.has_a_head_of_its_own(folder):
            warnings.warn(
                f"from_pretrained: config.json of {folder} says tie_word_embeddings, and the files hold a head that "
                "differs from the embedding. The model has both, as in transformers: tie_word_embeddings=False.",
                stacklevel=2,
            )
            config = dataclasses.replace(config, tie_word_embeddings=False)
        param_dtype = jnp.dtype(stored_dtype if param_dtype is None else param_dtype)
        dtype = param_dtype if dtype is None else dtype
        options = dict(kernels=kernels, remat=remat, scan_layers=scan_layers)
        model_class: Any = cls  # CausalLM defines the constructor
        make = lambda: model_class(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0), **options)
        # A checkpoint may hold a tied head twice, and old ones hold frequencies that the rotary embedding computes.
        ignored = ("rotary_emb.inv_freq",) + (("lm_head.weight",) if config.tie_word_embeddings else ())
        graph, state = nnx.split(nnx.eval_shape(make))
        layout = kernels.mesh_layout
        by_layout = mesh is not None and partition_specs is None and layout.axes
        if mesh is not None and by_layout:
            layout.check(config, dict(mesh.shape))
            partition_specs = jax.tree.map(lambda sharding: sharding.spec, layout.shardings(state, mesh))
        shardings = weights.shardings_of(mesh, partition_specs, state)

        is_quantized = lambda info: info.kind in ("kernel", "experts")

        def kept_as(info, array):
            return quantized.quantized(array, quantize) if is_quantized(info) else array

        how: dict[str, Any] = {} if quantize is None else dict(kept_as=kept_as, by_layers=is_quantized)
        model = weights.read(folder, graph, state, shardings=shardings, ignored=ignored, **how)
        model.kept = kept
        model = quantized.frozen(model)
        if by_layout and quantize is not None:  # codes are laid out differently from dense kernels
            state = nnx.state(model)
            nnx.update(model, jax.device_put(state, layout.shardings(state, mesh)))
        return model

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int = 5 * 10**9,
        config_fields: Mapping[str, Any] | None = None,
        tokenizer_from: str | os.PathLike[str] | Source | None = None,
    ) -> None:
        """Writes config.json and safetensors that Hugging Face and `from_pretrained` read.

        Quantised weights are dequantised to their original dtype: the checkpoint computes the same as the model.

        If the model was loaded from a checkpoint, the other fields of its config.json, and its generation_config.json,
        are written again. From a multimodal checkpoint, all other tensors are read from its folder and written
        unchanged. To save only the language model, set `model.kept = dataclasses.replace(model.kept, whole=None)`
        before.

        An earlier model in the folder is replaced at the end, by one rename: if the process is killed, the folder has
        the earlier model or the new one. One case needs a repair: if config.json changes what is computed, or another
        small file changes, the folder may be left without config.json. `from_pretrained` then says how to repair it,
        and the next save repairs it too.

        Args:
            path: a folder, created if it does not exist. No other process may write to it at the same time. The
                safetensors and generation_config.json of an earlier model in it are deleted; until then the disk holds
                both models.
            max_shard_bytes: the most bytes of tensors in a file, unless a single tensor is larger.
            config_fields: more fields for config.json, such as `{"eos_token_id": 2}`.
            tokenizer_from: a folder with a tokenizer's files, such as tokenizer.json, tokenizer_config.json and
                chat_template.jinja, which replace those in `path`; or the result of `hugging_face.source.find`. `None`
                to leave those in `path` unchanged.

        Raises:
            FileNotFoundError: the folder of the multimodal checkpoint from which the model was loaded no longer exists.
            TypeError: `max_shard_bytes` is no integer.
            ValueError: `max_shard_bytes` is not positive, the model has adapters (`nnx.LoRAParam`;
                `lora.merge_lora` adds them to the weights) or a parameter that is not in float32, bfloat16, float16 or
                float64, `config_fields` are no JSON or contradict the model, or `tokenizer_from` is not a folder with a
                tokenizer's files.
        """
        if not isinstance(max_shard_bytes, int):
            raise TypeError(
                f"save_pretrained: max_shard_bytes={max_shard_bytes!r} must be an integer, such as 5 * 10**9."
            )
        if max_shard_bytes < 1:
            raise ValueError(f"save_pretrained: max_shard_bytes={max_shard_bytes} must be positive.")
        flat = nnx.to_flat_state(nnx.state(self, nnx.Param))
        if added := [".".join(map(str, path)) for path, parameter in flat if type(parameter) is not nnx.Param]:
            raise ValueError(
                "save_pretrained: the model has adapters, or other parameters that Hugging Face's model does not have. "
                "Add adapters to the weights that they change, merge_lora(model), or save them alone, "
                "save_adapters(model, path); both are in liger_jax.models.lora. "
                f"The first of {len(added)} is {added[0]}."
            )
        if odd := {str(parameter.dtype) for _, parameter in flat} - set(config_json.DTYPES):
            raise ValueError(
                f"save_pretrained: parameters are {', '.join(sorted(odd))}, and must be "
                f"{', '.join(config_json.DTYPES)}, since from_pretrained reads no others. Cast them before."
            )
        own = config_json.write(self.config, self.config_fixed, type(self).__name__, str(self.head.dtype))
        values = json.loads(self.kept.config) | own | config_json.more_fields(config_fields or {}, own)
        whole = self.kept.whole
        if different := config_json.not_in_transformers(self.config, values["model_type"]):
            warnings.warn(
                f"save_pretrained: from_pretrained reads this model, transformers does not: {'; '.join(different)}.",
                stacklevel=2,
            )
        if whole is not None:
            earlier = _config_of(type(self), json.loads(whole.config), pathlib.Path(whole.folder))
            values = wrapper.config(whole, values, earlier == self.config, config_fields or {})
        generation = self.kept.generation
        small_files = {
            checkpoint.CONFIG: (json.dumps(values, indent=2) + "\n").encode(),
            checkpoint.GENERATION: None if generation is None else generation.encode(),
        }
        if tokenizer_from is not None:
            small_files |= tokenizer_files("save_pretrained", tokenizer_from, pathlib.Path(path))

        def meaning(folder):
            config, dtype, kept = _described(type(self), Source(folder))
            others = None if kept.whole is None else kept.whole.config
            return config, dtype, dataclasses.replace(kept, generation=None).stops, others

        shards = weights.shards(nnx.state(self, (nnx.Param, quantized.QuantizedParam)), max_shard_bytes)
        if whole is not None:
            small_files |= wrapper.processors(whole)
            shards = wrapper.shards(whole, shards, max_shard_bytes)
        saving.write(pathlib.Path(path), shards, small_files, meaning)


def _config_of(model_class: Any, values: dict[str, Any], folder: pathlib.Path) -> Any:
    """The architecture of a language model by the fields of its multimodal checkpoint's config.json."""
    fields = checkpoint.language_values(values, folder)
    with warnings.catch_warnings(action="ignore"):  # they were given when the model was read
        return config_json.read(fields, model_class.config_type, model_class.config_fixed, folder)


def _described(model_class: Any, source: Source) -> tuple[Any, str, checkpoint.Kept]:
    """The config, the dtype of the weights, and the fields that a save writes again, from a folder's JSON files."""
    config: Any = config_json.read(source.config, model_class.config_type, model_class.config_fixed, source.path)
    own = config_json.write(config, model_class.config_fixed, model_class.__name__, source.dtype)
    return config, source.dtype, source.kept({*own, *config.older_names})


def _check_shapes(config: Any, shapes: Mapping[str, tuple[int, ...]], folder: pathlib.Path) -> None:
    """Raises an error if a config does not belong to these tensors.

    `weights.read` compares all other names and shapes with the model's own.
    """
    wrong, count = [], config.num_hidden_layers
    layers = sorted({int(match[1]) for match in map(_LAYER.match, shapes) if match})
    if layers != list(range(count)):
        wrong.append(f"num_hidden_layers={count}, and the tensors are of {len(layers)} layers: {short(layers)}")
    if EMBEDDING in shapes and shapes[EMBEDDING][:1] != (config.vocab_size,):
        wrong.append(f"vocab_size={config.vocab_size}, and {EMBEDDING} has the shape {shapes[EMBEDDING]}")
    if wrong:
        raise ValueError(
            f"from_pretrained: config.json of {folder} says {'; '.join(wrong)}. Does it belong to these weights?"
        )
