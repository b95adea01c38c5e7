"""The folder of a Hugging Face checkpoint: how it is found, its JSON files, and the names of its weights' files."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from liger_jax.models.core.config_fields import short
from liger_jax.models.hugging_face import config_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder of further chat templates, each NAME.jinja
# A folder inside a checkpoint's folder, during a save: "new" holds new files, "earlier" files that they replace.
SAVING = ".saving"
# Fields of config.json that are not kept: `config_json.write` writes the first three under other names, and the last
# names files that a save does not write.
_NOT_KEPT = ("dtype", "rope_parameters", "rope_scaling", "transformers_weights")


@dataclasses.dataclass(frozen=True)
class Kept:
    """The parts of a checkpoint's JSON files that the model does not compute with, for a later save.

    They are text, because flax hashes what a module holds.

    Attributes:
        config: a JSON object with fields of config.json.
        generation: the text of generation_config.json, or `None` if the checkpoint has none.
        multimodal: whether the model is the language part of a multimodal checkpoint.
    """

    config: str = "{}"
    generation: str | None = None
    multimodal: bool = False

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end a text, by generation_config.json or else by config.json."""
        for text in (self.generation or "{}", self.config):
            stops = json.loads(text).get("eos_token_id")
            if stops is not None:
                return tuple(stops) if isinstance(stops, list) else (stops,)
        return ()


def find(path_or_id: str | os.PathLike[str], *, weights: bool = True) -> pathlib.Path:
    """Finds a checkpoint's folder; for an id such as "org/name", `huggingface_hub` downloads it.

    A download takes the files of the model and of its tokenizer, or without `weights` all but those of the weights.

    Raises:
        FileNotFoundError: no folder has that name, and it is not an id of a model on the hub.
        ImportError: the name may be an id, and huggingface_hub is not installed.
    """
    name = os.fspath(path_or_id)
    if os.path.isdir(name):  # for pathlib, "" would be the current folder
        return pathlib.Path(name)
    if os.path.exists(name):
        raise FileNotFoundError(f"from_pretrained: {name!r} is a file. Pass the folder that holds its {CONFIG}.")
    if not _may_be_id(name):
        raise FileNotFoundError(f"from_pretrained: no such folder: {name!r}. (An id has the form 'org/name'.)")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ImportError(
            f"from_pretrained: {name!r} is no folder here, and to fetch it by that id huggingface_hub is needed: "
            "pip install huggingface_hub."
        ) from error
    patterns = [CONFIG, GENERATION, *TOKENIZER, f"{TEMPLATES}/*.jinja"]
    if weights:  # some repositories hold them a second time, under another name or in a folder
        patterns += ["model*.safetensors", INDEX]
    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise FileNotFoundError(
            f"from_pretrained: no such folder: {name!r}, and huggingface_hub did not get a model of that id: {error}"
        ) from error


def _may_be_id(name: str) -> bool:
    """Whether a name may be an id. If its first part is a folder here, it is rather a path with a typing error."""
    organisation, slash, model = name.rpartition("/")
    is_id = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is not None
    return is_id and not (slash and os.path.isdir(organisation)) and not model.endswith((".json", ".safetensors"))


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json by `config_values`.

    Raises:
        FileNotFoundError: there is none. If a save was interrupted, the message says how to repair the folder.
        ValueError: the file is damaged.
    """
    path, saving = folder / CONFIG, folder / SAVING
    if path.is_file():
        return config_values(path)
    if missing := files_that_complete(folder):
        raise FileNotFoundError(
            f"from_pretrained: {folder} has no {CONFIG}, since a save into it was cut off. Save the model again, or "
            f"move the files of {missing} to {folder} to have the model whose weights are there."
        )
    if saving.is_dir():
        raise FileNotFoundError(
            f"from_pretrained: {folder} has no {CONFIG}, since the first save into it was cut off. Save the model "
            "again."
        )
    raise FileNotFoundError(f"from_pretrained: {folder} has no {CONFIG}: it is no Hugging Face checkpoint.")


def files_that_complete(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder with the JSON files that belong to the weights, if a save was interrupted without config.json."""
    new, earlier = folder / SAVING / "new", folder / SAVING / "earlier"
    # One rename moves the weights out of `new`, and the folder then has the new model's weights. The config.json that
    # was written into `new` before them belongs to the folder from then on.
    if (new / CONFIG).is_file() and not any((new / name).is_file() for name in (WEIGHTS, INDEX)):
        return new
    return earlier if (earlier / CONFIG).is_file() else None


def config_values(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config.json under any file name; of a multimodal model, the fields of the language part.

    Ids of special tokens come from the whole model's fields, if it has them.

    Raises:
        ValueError: the file is damaged (`config_json.load`, `config_json.language_part`).
    """
    values = config_json.load(path)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: values[name] for name in names if values.get(name) is not None}
    return config_json.language_part(values, path) | ids


def is_multimodal(folder: pathlib.Path) -> bool:
    """Whether a checkpoint's config.json describes a multimodal model, of which we have the language part."""
    return bool(config_json.load(folder / CONFIG).get("text_config"))


def kept_of(folder: pathlib.Path, values: Mapping[str, Any], own: Iterable[str]) -> Kept:
    """The parts of a checkpoint's JSON files that a save of the model will write again.

    Args:
        folder: the checkpoint's folder.
        values: the fields of its config.json.
        own: names of fields that a save writes from the model's own config.

    Raises:
        ValueError: generation_config.json does not hold a JSON object, or an `eos_token_id` is neither a token nor a
            list of tokens.
    """
    left = {name: value for name, value in values.items() if name not in (*own, *_NOT_KEPT)}
    _check_stops(folder / CONFIG, left)
    path, generation = folder / GENERATION, None
    if path.is_file():
        _check_stops(path, config_json.load(path))
        generation = path.read_bytes().decode("utf8")  # its line ends, too
    return Kept(json.dumps(left), generation, is_multimodal(folder))


def tokenizer_files(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Reads a tokenizer's files, by name; `None` for files that this tokenizer does not have.

    Raises:
        ValueError: the folder does not exist, or has none of them.
    """
    if not folder.is_dir():
        raise ValueError(f"save_pretrained: tokenizer_from={str(folder)!r} is no folder. Pass a tokenizer's folder.")
    files = {name: folder / name for name in (*TOKENIZER, *chat_templates(folder))}
    contents = {name: path.read_bytes() if path.is_file() else None for name, path in files.items()}
    if not any(contents.values()):
        raise ValueError(
            f"save_pretrained: tokenizer_from={str(folder)!r} holds no tokenizer: none of {', '.join(TOKENIZER)}."
        )
    return contents


def chat_templates(folder: pathlib.Path) -> list[str]:
    """The names of a folder's further chat templates, such as additional_chat_templates/tool_use.jinja."""
    return sorted(path.relative_to(folder).as_posix() for path in (folder / TEMPLATES).glob("*.jinja"))


def _check_stops(path, values):
    stops = values.get("eos_token_id")
    stops_list = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if any(type(stop) is not int for stop in stops_list):
        raise ValueError(f"{path}: eos_token_id must be a token's number or a list of them, and is {short(stops)}.")


def weight_files(folder: pathlib.Path) -> list[str]:
    """The names of the files with a folder's weights; an empty list if there are no safetensors.

    If both model.safetensors and an index are there, the first counts, as in Hugging Face.

    Raises:
        ValueError: the index has no `weight_map`, or its `weight_map` names something that is not a safetensors file of
            the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    path = folder / INDEX
    if not path.is_file():
        return []
    weight_map = config_json.load(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be an object of tensors and files, and is {short(weight_map)}.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", name):
            raise ValueError(
                f"{path}: the file of {short(tensor)} is {short(name)}, and must be the name of a .safetensors file "
                "in this folder, without a path."
            )
    return sorted(set(weight_map.values()))


def weight_bytes(folder: pathlib.Path) -> int:
    """The size of the files with a folder's weights; those that are missing count as empty."""
    return sum(path.stat().st_size for name in weight_files(folder) if (path := folder / name).is_file())
