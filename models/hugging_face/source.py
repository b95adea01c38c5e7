"""A checkpoint's folder. Each of its files is read once, so that everything in a run uses the same model."""

import difflib
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from liger_jax.models.core.config_fields import short
from liger_jax.models.hugging_face import checkpoint, config_json, mxfp4
from liger_jax.models.hugging_face.checkpoint import (
    ADAPTERS,
    CONFIG,
    GENERATION,
    INDEX,
    SAVING,
    TEMPLATES,
    TOKENIZER,
    Kept,
    Whole,
)

# Fields of config.json that are not kept: `config_json.write` writes the first three under other names, the others name
# files that a save does not write, say how weights are quantised that a save writes dense, or ask a reader to run code
# that is not in them.
_CODE = ("auto_map", "trust_remote_code")
_MEDIA = re.compile(r"(image|video|audio|vision_start|vision_end|boi|eoi|boa|eoa)_token_(id|index)")
_OF_RUNS = ("settings.toml", "checkpoints", ".lock")  # what a run writes into its folder before its result
_RUNS = "runs"  # the folder in which the commands' runs are by default
_NOT_KEPT = ("dtype", "rope_parameters", "rope_scaling", "transformers_weights", "quantization_config", *_CODE)


class Source:
    """The description of a model by its folder. A file is read when it is first needed, and never again.

    So all parts of a run see the same files, whatever happens to the folder meanwhile. The weights are not read here.
    A link is followed within the folder, or from a snapshot in the hub's cache to its blobs; others are refused, but
    for files of weights.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.path = folder, folder / CONFIG

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The fields of config.json; of a multimodal model, those of the language model."""
        return checkpoint.language_values(self._whole_config, self.path)

    @functools.cached_property
    def multimodal(self) -> bool:
        """Whether config.json describes a multimodal model, of which only the language model is read."""
        return bool(self._whole_config.get("text_config"))

    @property
    def media_tokens(self) -> dict[int, str]:
        """The tokens in whose places, or around which, a multimodal model has images, video or sound: their fields."""
        whole = self._whole_config if self._has_config and self.multimodal else {}
        return {token: name for name, token in whole.items() if _MEDIA.fullmatch(name) and type(token) is int}

    @property
    def is_nf4(self) -> bool:
        """Whether the projections are bitsandbytes' nf4, by config.json; `config_json.read` refuses other kinds."""
        return bool(self.config.get("quantization_config")) and not mxfp4.is_mxfp4(self.config)

    @property
    def dtype(self) -> str:
        """The dtype of the weights by config.json."""
        return config_json.dtype_of(self.config, self.path)

    @functools.cached_property
    def generation(self) -> str | None:
        """The text of generation_config.json, or `None` if there is none."""
        path = self.folder / GENERATION
        if (content := self._content(GENERATION)) is None:
            return None
        _check_stops(path, config_json.loads(content, path))
        return content.decode("utf8")  # its line ends, too

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end a text, by generation_config.json or else by config.json."""
        return Kept("{}", self.generation).stops if self.is_tokenizer else self.kept(()).stops

    @property
    def is_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer and no model."""
        return not self._has_config and checkpoint.own_file(self.folder, "tokenizer.json") is not None

    def kept(self, own: Iterable[str]) -> Kept:
        """The fields of the JSON files that a save of the model writes again."""
        left = {name: value for name, value in self.config.items() if name not in (*own, *_NOT_KEPT)}
        _check_stops(self.path, left)
        whole = Whole(json.dumps(self._whole_config), str(self.folder.absolute())) if self.multimodal else None
        return Kept(json.dumps(left), self.generation, whole)

    @functools.cached_property
    def tokenizer(self) -> dict[str, bytes | None]:
        """The tokenizer's files by name, chat templates among them; `None` for files that it does not have."""
        return {name: self._content(name) for name in (*TOKENIZER, *chat_templates(self.folder))}

    def tokenizer_to_save(self) -> dict[str, bytes | None]:
        """The tokenizer's files as a save writes them: its config asks for no code that is not in the files."""
        files, name = dict(self.tokenizer), "tokenizer_config.json"
        content = files[name]
        if content is not None and any(field.encode() in content for field in _CODE):
            values = config_json.loads(content, self.folder / name)
            left = {field: value for field, value in values.items() if field not in _CODE}
            files[name] = content if left == values else (json.dumps(left, indent=2) + "\n").encode()
        return files

    @functools.cached_property
    def weight_files(self) -> list[str]:
        """The names of the files with the weights, as `checkpoint.weight_files` finds them."""
        return checkpoint.weight_files(self.folder)

    @property
    def weight_bytes(self) -> int:
        """The size of the files with the weights; those that are missing count as empty."""
        return sum(path.stat().st_size for name in self.weight_files if (path := self.folder / name).is_file())

    @property
    def _has_config(self) -> bool:
        return checkpoint.own_file(self.folder, CONFIG) is not None

    @functools.cached_property
    def _whole_config(self) -> dict[str, Any]:
        if (content := self._content(CONFIG)) is None:
            raise FileNotFoundError(_why_no_config(self.folder))
        return config_json.loads(content, self.path)

    def _content(self, name: str) -> bytes | None:
        """A file's content, `None` if there is no such file."""
        path = checkpoint.own_file(self.folder, name)
        return None if path is None else path.read_bytes()


def find(path_or_id: str | os.PathLike[str] | Source, *, weights: bool = True) -> Source:
    """Finds a checkpoint; for an id such as "org/name", `huggingface_hub` downloads it.

    A download takes the files of the model and of its tokenizer, or without `weights` all but those of the weights.
    """
    if isinstance(path_or_id, Source):
        return path_or_id
    name = os.fspath(path_or_id)
    if os.path.isdir(name):  # for pathlib, "" would be the current folder
        return Source(pathlib.Path(name))
    if os.path.exists(name):
        raise FileNotFoundError(f"from_pretrained: {name!r} is a file. Pass the folder that holds its {CONFIG}.")
    if not _may_be_id(name):
        meant = _near_folder(name) or " (An id has the form 'org/name'.)"
        if pathlib.PurePath(name).parts[:1] == (_RUNS,):
            meant = _near_folder(name) or " A run makes it: train first, or see where its --out is."
        raise FileNotFoundError(f"from_pretrained: no such folder: {name!r}.{meant}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ImportError(
            f"from_pretrained: {name!r} is not a folder, and downloading a model by its id needs huggingface_hub: "
            "pip install huggingface_hub."
        ) from error
    patterns = [CONFIG, GENERATION, ADAPTERS.config, *ADAPTERS.weights, *TOKENIZER, f"{TEMPLATES}/*.jinja"]
    if weights:  # some repositories hold them a second time, under another name or in a folder
        patterns += ["model*.safetensors", INDEX]
    try:
        return Source(pathlib.Path(snapshot_download(name, allow_patterns=patterns)))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        if meant := _near_folder(name):
            raise FileNotFoundError(f"from_pretrained: no such folder or id: {name!r}.{meant}") from error
        raise FileNotFoundError(
            f"from_pretrained: no such folder: {name!r}, and huggingface_hub did not get a model of that id: {error}"
        ) from error


def _near_folder(name: str) -> str:
    """A question for a folder with nearly that name, which stands where the name points to; empty if there is none."""
    parent, base = os.path.split(os.path.normpath(name))
    try:
        with os.scandir(parent or ".") as entries:
            beside = [entry.name for entry in entries if entry.is_dir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(base, beside, n=1, cutoff=0.7)
    return f" Did you mean {os.path.join(parent, near[0])!r}?" if near else ""


def _may_be_id(name: str) -> bool:
    """Whether a name may be an id. If its owner is the name of a folder here, it is rather a mistyped path."""
    organisation, slash, model = name.rpartition("/")
    is_id = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is not None
    is_folder = slash and os.path.isdir(organisation) or organisation == _RUNS  # where no run may have been yet
    return is_id and not is_folder and not model.endswith((".json", ".safetensors"))


def chat_templates(folder: pathlib.Path) -> list[str]:
    """The names of a folder's further chat templates, such as additional_chat_templates/tool_use.jinja."""
    return sorted(path.relative_to(folder).as_posix() for path in (folder / TEMPLATES).glob("*.jinja"))


def tokenizer_files(
    caller: str, tokenizer_from: str | os.PathLike[str] | Source, path: pathlib.Path
) -> dict[str, bytes | None]:
    """The tokenizer's files that a save into a folder writes."""
    source = tokenizer_from if isinstance(tokenizer_from, Source) else Source(pathlib.Path(tokenizer_from))
    if not source.folder.is_dir():
        raise ValueError(f"{caller}: tokenizer_from={str(source.folder)!r} is not a folder. Pass a tokenizer's folder.")
    if not any(source.tokenizer.values()):
        raise ValueError(
            f"{caller}: tokenizer_from={str(source.folder)!r} holds no tokenizer: none of {', '.join(TOKENIZER)}."
        )
    return dict.fromkeys(chat_templates(path)) | source.tokenizer_to_save()


def _why_no_config(folder: pathlib.Path) -> str:
    """A sentence for a folder without config.json."""
    if missing := checkpoint.files_that_complete(folder):
        return (
            f"from_pretrained: {folder} has no {CONFIG}, since a save into it was cut off. Save the model again, or "
            f"move the files of {missing} to {folder} to have the model whose weights are there."
        )
    if (folder / SAVING).is_dir():
        return (
            f"from_pretrained: {folder} has no {CONFIG}, since the first save into it was cut off. Save the model "
            "again."
        )
    results = (("model", CONFIG), ("adapters", ADAPTERS.config))  # of `liger-jax finetune`
    for name, config in results:
        if (folder / name / config).is_file():
            return f"from_pretrained: {folder} is the folder of a run. Its result is {folder / name}: pass that."
    if "checkpoints" in (folder.name, folder.parent.name):
        return (
            f"from_pretrained: {folder} has no {CONFIG}: it holds a run's state. The run's command with --result-of "
            "STEP makes a model of a checkpoint that is kept."
        )
    if any((folder / name).exists() for name in _OF_RUNS):
        return (
            f"from_pretrained: {folder} is the folder of a run that has no result yet. Its command, typed again, goes "
            "on with it, and with --result-of STEP writes the model of a checkpoint that is kept."
        )
    return f"from_pretrained: {folder} has no {CONFIG}: it is no Hugging Face checkpoint."


def _check_stops(path, values):
    stops = values.get("eos_token_id")
    stops_list = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if any(type(stop) is not int for stop in stops_list):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of ids, and is {short(stops)}.")
