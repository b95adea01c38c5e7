"""Hugging Face checkpoints: a folder with config.json and safetensors, one file or many, read and written.

A parameter's name in a checkpoint follows from its place in the model, since modules bear Hugging Face's names. A
linear layer's kernel is the transposed weight, and layers that are stacked for a scan are one tensor each.
"""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from liger_jax.models import config_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LANGUAGE_PART, _HEAD = "language_model.", "lm_head.weight"  # of a multimodal checkpoint
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}  # other leaves have a name of their own


@dataclasses.dataclass(frozen=True)
class Tensors:
    """What a parameter is in a checkpoint.

    Attributes:
        names: of its tensors: one, or one for each of the stacked layers.
        transposed: whether the tensors are (out, in) where the parameter is (in, out).
        stacked: whether the parameter has an axis of layers in front.
    """

    names: tuple[str, ...]
    transposed: bool
    stacked: bool

    def shape(self, parameter: Any) -> tuple[int, ...]:
        """Of each tensor."""
        shape = parameter.shape[1:] if self.stacked else parameter.shape
        return shape[::-1] if self.transposed else shape


def tensors_of(path: tuple[Any, ...], parameter: Any) -> Tensors:
    """The tensors of the parameter at this path of a model's state."""
    *modules, leaf = map(str, path)
    transposed = leaf == "kernel"
    if leaf not in _LEAVES:
        modules.append(leaf)
    leaf = _LEAVES.get(leaf, "weight")
    if "layers" not in modules:
        return Tensors((".".join([*modules, leaf]),), transposed, stacked=False)
    at = modules.index("layers") + 1  # a LayerStack, and at that place its own name for what it holds
    stack, layer = modules[:at], modules[at + 1 :]
    stacked = not (layer and layer[0].isdigit())
    numbers = range(parameter.shape[0]) if stacked else [layer.pop(0)]
    names = tuple(".".join([*stack, str(number), *layer, leaf]) for number in numbers)
    return Tensors(names, transposed, stacked)


def read(
    folder: pathlib.Path, graphdef: Any, state: Any, *, shardings: Any = None, ignored: tuple[str, ...] = ()
) -> Any:
    """The model whose abstract state this is, each parameter read by itself.

    Args:
        folder: holds the safetensors.
        graphdef: of the model.
        state: of the model, of `jax.ShapeDtypeStruct`: the dtypes that the parameters get.
        shardings: a list of one for each of them; `None` for the default device.
        ignored: names that a checkpoint may hold beside the model's.

    Raises:
        ValueError: a list of all names that are missing or left over and all shapes that differ.
        FileNotFoundError: there are no safetensors.
    """
    places = _places(folder)
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    wanted = [(tensors_of(_keys(path), parameter), parameter) for path, parameter in flat]
    opened: dict[pathlib.Path, Any] = {}
    try:
        for path in dict.fromkeys(path for path, _ in places.values()):
            opened[path] = safe_open(path, framework="numpy").__enter__()

        def slice_of(name):
            path, name_there = places[name]
            return opened[path].get_slice(name_there)

        _check(folder, places, wanted, ignored, slice_of)
        parameters = [
            _parameter(tensors, parameter, sharding, slice_of)
            for (tensors, parameter), sharding in zip(wanted, shardings or [None] * len(wanted), strict=True)
        ]
    finally:
        for file in opened.values():
            file.__exit__(None, None, None)
    return nnx.merge(graphdef, jax.tree.unflatten(tree, parameters))


def shardings_of(mesh: Mesh | None, partition_specs: Any, state: Any) -> list[NamedSharding] | None:
    """One for each parameter of a state, by what `from_pretrained` is given.

    Raises:
        ValueError: specs without a mesh, or not one for each parameter.
    """
    if mesh is None:
        if partition_specs is not None:
            raise ValueError("from_pretrained: partition_specs need a mesh: pass mesh=jax.make_mesh(…).")
        return None
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    if partition_specs is None:
        specs = [PartitionSpec()] * len(flat)
    elif callable(partition_specs):
        specs = [partition_specs(".".join(map(str, _keys(path))), parameter.shape) for path, parameter in flat]
    else:
        specs = jax.tree.leaves(partition_specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    if len(specs) != len(flat) or not all(isinstance(spec, PartitionSpec) for spec in specs):
        raise ValueError(
            f"from_pretrained: partition_specs must give a PartitionSpec for each of the model's {len(flat)} "
            f"parameters, and gave {specs}."
        )
    return [NamedSharding(mesh, spec) for spec in specs]


def write(folder: pathlib.Path, model: nnx.Module, config: Mapping[str, Any], *, max_shard_bytes: int) -> None:
    """Writes config.json and the safetensors, in files of at most so many bytes unless one tensor has more.

    The parameters are fetched one after the other, and each file is written as soon as it is full. Earlier files are
    replaced when all new ones are there: until then the disk holds both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        new = pathlib.Path(name)
        in_shard, total = {}, 0
        for i, shard in enumerate(_shards(nnx.state(model, nnx.Param), max_shard_bytes)):
            save_file(shard, new / str(i), metadata={"format": "pt"})
            in_shard |= dict.fromkeys(shard, i)
            total += sum(x.nbytes for x in shard.values())
        count = max(in_shard.values()) + 1
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]
        for i, file in enumerate(files):
            (new / str(i)).rename(new / file)
        if count > 1:
            weight_map = {tensor: files[i] for tensor, i in sorted(in_shard.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (new / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf8")
        (new / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf8")
        for old in (*folder.glob("model*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        for path in sorted(new.iterdir()):
            path.replace(folder / path.name)


def find(path_or_id: str | pathlib.Path) -> pathlib.Path:
    """The folder itself, or the one that `huggingface_hub` has downloaded for an id such as "org/name".

    Raises:
        FileNotFoundError: no folder has that name, and it is no id.
        ImportError: it may be an id, and huggingface_hub is not installed.
    """
    folder = pathlib.Path(path_or_id)
    if folder.is_dir():
        return folder
    name = str(path_or_id)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or not name:
        raise FileNotFoundError(f"from_pretrained: {name!r} is no folder, and no id of the form 'org/name'.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"from_pretrained: {name!r} is no folder here, and to fetch it by that id huggingface_hub is needed: "
            "pip install huggingface_hub."
        ) from error
    # Some repositories hold the weights a second time, under another name or in a folder.
    return pathlib.Path(snapshot_download(name, allow_patterns=[CONFIG, "model*.safetensors", INDEX]))


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """The `config_values` of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: as `config_values`.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"from_pretrained: {folder} has no {CONFIG}: it is no Hugging Face checkpoint.")
    return config_values(path)


def config_values(path: pathlib.Path) -> dict[str, Any]:
    """A config.json, whatever its file's name; of a multimodal model what it says of the language part.

    Raises:
        ValueError: it is damaged (`config_json.load`, `config_json.language_part`).
    """
    return config_json.language_part(config_json.load(path), path)


def shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """By a tensor's name in a language model, its shape in the files."""
    places, found = _places(folder), {}
    for path in dict.fromkeys(path for path, _ in places.values()):
        with safe_open(path, framework="numpy") as file:
            here = {name: name_there for name, (place, name_there) in places.items() if place == path}
            found |= {name: tuple(file.get_slice(name_there).get_shape()) for name, name_there in here.items()}
    return found


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Names and numbers on the way to a leaf; the variable's own value has none."""
    parts = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    return tuple(part for part in parts if part not in (None, "value"))


def _places(folder: pathlib.Path) -> dict[str, tuple[pathlib.Path, str]]:
    """By a tensor's name in a language model, its file and its name there.

    A multimodal checkpoint names its language part, "language_model.model.…" or "model.language_model.…", and all that
    the name does not stand in is of other parts, but for the head.
    """
    files = _files(folder)
    if not any(_LANGUAGE_PART in name for name in files):
        return {name: (file, name) for name, file in files.items()}
    own = {name: name.replace(_LANGUAGE_PART, "", 1) for name in files if _LANGUAGE_PART in name or name == _HEAD}
    return {own_name: (files[name], name) for name, own_name in own.items()}


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each tensor; one file alone is what Hugging Face takes, too, where an index is left of others."""
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    if not names and (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(f"from_pretrained: {folder} lacks {absent}, which its {INDEX} names.")
    files = {}
    for path in (folder / name for name in names):
        with safe_open(path, framework="numpy") as file:
            files.update(dict.fromkeys(file.keys(), path))
    if files:
        return files
    pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    hint = f" Its {pickled} are pickles, which can run code when read: convert them to safetensors." if pickled else ""
    raise FileNotFoundError(f"from_pretrained: {folder} has neither {WEIGHTS} nor {INDEX}.{hint}")


def _check(folder, places, wanted, ignored, slice_of) -> None:
    """Raises a ValueError that lists every name and every shape that does not fit."""
    names = {name for tensors, _ in wanted for name in tensors.names}
    missing, left = sorted(names - set(places)), sorted(set(places) - names)
    left = [name for name in left if not name.endswith(ignored)] if ignored else left
    wrong = []
    for tensors, parameter in wanted:
        expected = tensors.shape(parameter)
        shapes = {name: tuple(slice_of(name).get_shape()) for name in tensors.names if name in places}
        wrong += [f"{name} {shape}, expected {expected}" for name, shape in shapes.items() if shape != expected]
    if missing or left or wrong:
        raise ValueError(
            f"from_pretrained: {folder} does not fit the model. Missing: {missing or 'none'}; left over: "
            f"{left or 'none'}; shapes: {'; '.join(wrong) or 'all fit'}. Does config.json belong to these weights?"
        )


def _parameter(tensors: Tensors, parameter: Any, sharding: Any, slice_of: Any) -> jax.Array:
    """In its place and dtype; on the host are the parts of this machine's devices, and each tensor's for a moment."""

    def part(index):
        ranges = [range(*axis.indices(size)) for axis, size in zip(index, parameter.shape, strict=True)]
        whole = np.empty([len(axis) for axis in ranges], parameter.dtype)
        of_tensor = [slice(axis.start, axis.stop) for axis in (ranges[1:] if tensors.stacked else ranges)]
        stored = tuple(of_tensor[::-1] if tensors.transposed else of_tensor)
        for i, layer in enumerate(ranges[0] if tensors.stacked else [0]):
            tensor = slice_of(tensors.names[layer])[stored]
            whole[i if tensors.stacked else ...] = tensor.T if tensors.transposed else tensor
        return whole

    if sharding is None:
        return jax.device_put(part([slice(None)] * len(parameter.shape)))
    parts: dict[str, np.ndarray] = {}

    def part_once(index):
        """JAX asks for each device, and several may hold the same part."""
        if str(index) not in parts:
            parts[str(index)] = part(index)
        return parts[str(index)]

    return jax.make_array_from_callback(parameter.shape, sharding, part_once)


def _shards(state: Any, max_shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    shard, size = {}, 0
    for path, parameter in jax.tree_util.tree_flatten_with_path(state)[0]:
        tensors, whole = tensors_of(_keys(path), parameter), np.asarray(parameter)
        for i, name in enumerate(tensors.names):
            part = whole[i] if tensors.stacked else whole
            tensor = np.ascontiguousarray(part.T if tensors.transposed else part)
            if shard and size + tensor.nbytes > max_shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[name], size = tensor, size + tensor.nbytes
    yield shard
