"""A multimodal checkpoint around a language model: its other modules are copied when the model is saved.

The model is trained on text alone. Tensors and fields of the other modules, such as a vision tower, stay as they are.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from liger_jax.models.hugging_face import checkpoint, nf4, weights
from liger_jax.models.hugging_face.checkpoint import Whole
from liger_jax.models.hugging_face.tensor_files import Tensors

# Files that turn images, video and sound into the inputs of the other modules.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE = ("rope_parameters", "rope_scaling")


def config(whole: Whole, values: Mapping[str, Any], same: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the whole model's config.json.

    `values`: those of the language model. `same`: whether they mean what the checkpoint's mean, which then stay as they
    are. `given`: fields that the caller of a save adds.
    """
    fields = json.loads(whole.config)
    before = fields["text_config"]
    text = before | given
    if not same:
        stay = {name: before[name] for name in ("model_type", "architectures") if name in before}
        text = {name: value for name, value in values.items() if name != "architectures"} | stay
        if of_images := _of_images(before):
            text["rope_scaling"] = {"rope_type": "default"} | text.get("rope_scaling", {}) | of_images
    for level in (fields, text):
        for name in ("dtype", "quantization_config"):
            level.pop(name, None)
    dtype = {"torch_dtype": values["torch_dtype"]}
    tied = {"tie_word_embeddings": values["tie_word_embeddings"]}
    ids = {name: given[name] for name in _IDS if name in given}
    return fields | dtype | tied | ids | {"text_config": text | dtype | (tied if "tie_word_embeddings" in text else {})}


def _of_images(text: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rotary embedding that divide its columns among time, height and width."""
    parameters = next((text[name] for name in _ROPE if text.get(name)), {})
    return {name: value for name, value in parameters.items() if name.startswith("mrope")}


def shards(whole: Whole, own: Iterable[Tensors], max_shard_bytes: int) -> Iterator[Tensors]:
    """Yields the language model's tensors by their names in the whole model, and then all others, as files hold them.

    `own`: groups of the language model's tensors. Each group of others has at most `max_shard_bytes`, unless one tensor
    has more.
    """
    folder = pathlib.Path(whole.folder)
    if why := checkpoint.why_no_weights(folder):
        raise FileNotFoundError(
            f"save_pretrained: {folder}, the multimodal checkpoint that the model came from, {why} Put it back, or set "
            "model.kept = dataclasses.replace(model.kept, whole=None) to save the language part alone."
        )
    return _shards(folder, own, max_shard_bytes)


def _shards(folder: pathlib.Path, own: Iterable[Tensors], max_shard_bytes: int) -> Iterator[Tensors]:
    with contextlib.ExitStack() as stack:
        files = weights.open_files(folder, stack)
        names = weights.language_part(files)
        for shard in own:
            yield {_name(name, names): x for name, x in shard.items()}
        others = {name: files[name].get_slice(name) for name in sorted(files.keys() - set(names.values()))}
        shard, size = {}, 0
        for name, view in nf4.with_dense_views(others).items():
            tensor = files[name].get_tensor(name) if view is others[name] else view[:]
            if shard and size + tensor.nbytes > max_shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[name], size = tensor, size + tensor.nbytes
        if shard:
            yield shard


def _name(own: str, names: Mapping[str, str]) -> str:
    """A tensor's name in the whole model; a head that its files lack has the name that transformers gives it."""
    if own in names:
        return names[own]
    embedding = names[weights.EMBEDDING]
    prefix = embedding.removesuffix(weights.EMBEDDING.removeprefix("model."))  # what stands for "model."
    if own.startswith("model."):
        return prefix + own.removeprefix("model.")
    return prefix.removesuffix("model.") + own if prefix.startswith("language_model.") else own


def processors(whole: Whole) -> dict[str, bytes]:
    """The files by which images and sound are prepared, as far as the checkpoint has them."""
    files = {name: checkpoint.own_file(pathlib.Path(whole.folder), name) for name in _PROCESSORS}
    return {name: path.read_bytes() for name, path in files.items() if path is not None}
