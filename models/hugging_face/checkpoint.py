"""The files of a Hugging Face checkpoint: their names, and the contents that are kept for a later save."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Names(NamedTuple):
    """The files that one save replaces together."""

    config: str  # the file without which a reader finds nothing
    weights: tuple[str, ...]  # names that the weights may have. The rename of one of them is the moment of the change.
    saving: str  # the folder for files that are not in place yet


MODEL = Names(CONFIG, (WEIGHTS, INDEX), SAVING)
ADAPTERS = Names("adapter_config.json", ("adapter_model.safetensors",), ".saving_adapters")


@dataclasses.dataclass(frozen=True)
class Whole:
    """A multimodal checkpoint, of which the model is the language model."""

    config: str  # the text of its config.json
    folder: str  # from which a save reads the tensors of its other modules


@dataclasses.dataclass(frozen=True)
class Kept:
    """The fields of a checkpoint's JSON files that the model does not use, for a later save.

    They are text, because flax hashes what a module holds.
    """

    config: str = "{}"  # a JSON object with fields of config.json
    generation: str | None = None  # the text of generation_config.json, or `None` if the checkpoint has none
    whole: Whole | None = None  # the multimodal checkpoint that contains the model; `None` if there is none

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end a text, by generation_config.json or else by config.json."""
        for text in (self.generation or "{}", self.config):
            stops = json.loads(text).get("eos_token_id")
            if stops is not None:
                return tuple(stops) if isinstance(stops, list) else (stops,)
        return ()


def own_file(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """A file of a checkpoint's folder, where links lead to files of the same checkpoint only.

    Whoever made the folder may have put a link into it to another file of the reader's machine. What is read from the
    folder is written into results, which are given away.

    `folder`: the checkpoint's folder. It may itself be a link, since the reader named it. Returns the file's path
    without links, or `None` if there is no such file.
    """
    path = folder / name
    if not path.is_file():
        return None
    root, file = folder.resolve(), path.resolve()
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if file.is_relative_to(root) or file.parent in blobs:
        return file
    raise ValueError(
        f"{path} is a link to {short(str(file))}, which is outside of the checkpoint's folder, and the file would "
        f"be copied into results. Replace the link {path.name} by a copy if it belongs here; weights may be links."
    )


def weight_file(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """A file of a checkpoint's weights, which may be a link to a regular file anywhere, as on another disk.

    Only tensors are read from it: another file than safetensors is refused, and none of its bytes are used.
    """
    path = folder / name
    return path if path.is_file() else None


def files_that_complete(folder: pathlib.Path, names: Names = MODEL) -> pathlib.Path | None:
    """The folder with the JSON files that belong to the weights, if a save was interrupted without its config."""
    new, earlier = folder / names.saving / "new", folder / names.saving / "earlier"
    if any(path.is_symlink() for path in (new.parent, new, earlier)):  # no save makes links
        return None
    # One rename moves the weights out of `new`, and the folder then has the new model's weights. The config.json that
    # was written into `new` before them belongs to the folder from then on.
    if (new / names.config).is_file() and not any((new / name).is_file() for name in names.weights):
        return new
    return earlier if (earlier / names.config).is_file() else None


def config_values(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config.json under any file name; of a multimodal model, the fields of the language model.

    Ids of special tokens come from the whole model's fields, if it has them.
    """
    return language_values(config_json.load(path), path)


def language_values(values: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The fields of the language model, with the whole model's ids of special tokens."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: values[name] for name in names if values.get(name) is not None}
    return config_json.language_part(values, path) | ids


def weight_files(folder: pathlib.Path) -> list[str]:
    """The names of the files with a folder's weights; an empty list if there are no safetensors.

    If both model.safetensors and an index are there, the first counts, as in Hugging Face.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    path = folder / INDEX
    if (file := own_file(folder, INDEX)) is None:
        return []
    weight_map = config_json.loads(file.read_bytes(), path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: weight_map must be an object with a file for each tensor, and is {short(weight_map)}."
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", name):
            raise ValueError(
                f"{path}: the file of {short(tensor)} is {short(name)}, and must be the name of a .safetensors file "
                "in this folder, without a path."
            )
    return sorted(set(weight_map.values()))


def why_no_weights(folder: pathlib.Path) -> str | None:
    """Why a folder has no weights, or not all of them.

    Returns what to say after the folder's name, as sentences; `None` if all files are there.
    """
    names = weight_files(folder)
    for path in map(folder.joinpath, names or (WEIGHTS, INDEX)):
        if path.is_symlink() and not path.is_file():
            return f"has {path.name} as a link to {short(str(path.readlink()))}, where no file is."
    if absent := [name for name in names if weight_file(folder, name) is None]:
        return f"lacks {absent}, which its {INDEX} names."
    if names:
        return None
    pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    hint = f" Its {pickled} are pickles, which can run code when read: convert them to safetensors." if pickled else ""
    return f"has neither {WEIGHTS} nor {INDEX}.{hint}"
