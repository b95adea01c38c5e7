"""The files of PEFT's adapters: adapter_config.json and adapter_model.safetensors.

PEFT stores A as (rank, in) and B as (out, rank), the transposes of ours, and one tensor for each layer.
"""

import dataclasses
import json
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from liger_jax.models.core.parameters import ADAPTER_TENSORS, EMBEDDING_TENSORS
from liger_jax.models.hugging_face import saving
from liger_jax.models.hugging_face.adapter_config import PREFIX, TO_WHOLE, AdapterConfig, cut, parse
from liger_jax.models.hugging_face.checkpoint import ADAPTERS, files_that_complete, own_file, weight_file
from liger_jax.models.hugging_face.weights import FLOATS, language_part, open_weights

CONFIG, (WEIGHTS,) = ADAPTERS.config, ADAPTERS.weights
EXPERTS = re.compile(r"\.experts\.(\d+\.|base_layer\.|lora_)")  # in names of experts' adapters
BASE = ".base_layer.weight"  # PEFT saves the table or the head, too, where it has an adapter


def write(
    folder: pathlib.Path,
    config: AdapterConfig,
    tensors: Mapping[str, np.ndarray],
    base_model: str | None,
    *,
    multimodal: bool,
    small_files: Mapping[str, bytes | None],
) -> None:
    """Writes both files and the small ones; a process killed meanwhile leaves the earlier adapters or the new ones.

    For the language model of a multimodal model the names are those of transformers' whole model. There
    `target_modules` are whole names, since its other modules have projections of the same names.
    """
    targets, patterns = config.targets.names, (config.rank_pattern, config.alpha_pattern)
    modules = config.modules
    if multimodal:
        tensors = {name.replace(*TO_WHOLE, 1): tensor for name, tensor in tensors.items()}
        targets = sorted(adapted_names(tensors))
        plain, whole = (prefix.removeprefix(PREFIX) for prefix in TO_WHOLE)
        modules = [name.replace(plain, whole, 1) for name in modules]
        patterns = [{name.replace(plain, whole, 1): value for name, value in pattern.items()} for pattern in patterns]
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "target_parameters": list(config.parameters) or None,
        "rank_pattern": dict(patterns[0]),
        "alpha_pattern": dict(patterns[1]),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "modules_to_save": list(modules) or None,
        "trainable_token_indices": dict(config.tokens) or None,
        "bias": config.bias,
        "fan_in_fan_out": False,
    }
    content = (json.dumps(fields, indent=2) + "\n").encode()
    saving.write_adapters(folder, tensors, {CONFIG: content, **small_files})


def read(folder: pathlib.Path) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    """Reads both files."""
    files = {CONFIG: own_file(folder, CONFIG), WEIGHTS: weight_file(folder, WEIGHTS)}
    if absent := [name for name, path in files.items() if path is None]:
        cure = "Pass the folder that PEFT saved."
        if missing := files_that_complete(folder, ADAPTERS):
            cure = f"A save into it was cut off. Save the adapters again, or move the files of {missing} to {folder}."
        raise FileNotFoundError(f"load_adapters: {folder} lacks {absent}. {cure}")
    config = parse(folder / CONFIG, files[CONFIG].read_bytes())
    with open_weights(files[WEIGHTS]) as file:
        names = language_part(file.keys())
        is_whole = any(there.startswith(TO_WHOLE[1]) for there in names.values())
        if is_whole:
            whole, plain = (prefix.removeprefix(PREFIX) for prefix in TO_WHOLE[::-1])
            modules = [name.replace(whole, plain, 1) for name in config.modules]
            tokens = {name.replace(whole, plain, 1): own for name, own in config.tokens.items()}
            config = dataclasses.replace(config, whole=True, modules=modules, tokens=tokens)
        others = sorted(set(file.keys()) - set(names.values()))
        dtypes = {name: file.get_slice(there).get_dtype() for name, there in names.items()}
        if wrong := [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]:
            raise ValueError(
                f"load_adapters: the tensors in {folder / WEIGHTS} must be of {list(FLOATS)}, and there are "
                f"{cut(', '.join(wrong))}."
            )
        tensors = {name: file.get_tensor(there) for name, there in names.items()}
    with np.errstate(over="ignore"):
        wrong = [name for name, tensor in tensors.items() if not np.isfinite(tensor.astype(np.float32)).all()]
    if wrong:
        raise ValueError(
            f"load_adapters: {folder / WEIGHTS} has numbers that are not finite float32, in {cut(', '.join(wrong))}. "
            "The training that made them has failed, or the file is damaged."
        )
    if others:
        warnings.warn(
            f"load_adapters: {folder} has {len(others)} tensors for other parts of a multimodal model, such as "
            f"{cut(others[0])}. They are ignored, like the weights of these other parts.",
            stacklevel=3,
        )
    if not adapted_names(tensors) and not any(map(EXPERTS.search, tensors)):
        raise ValueError(
            f"load_adapters: {folder / WEIGHTS} has no tensor whose name ends in .{ADAPTER_TENSORS['lora_a']}."
        )
    return config, tensors


def adapted_names(tensors: Iterable[str]) -> set[str]:
    """The names in a checkpoint of the modules that have an A among these tensors."""
    ends = tuple(f".{names['lora_a']}" for names in (ADAPTER_TENSORS, EMBEDDING_TENSORS))
    matches = ((name, end) for name in tensors for end in ends if name.endswith(end))
    # Those of experts are named by `lora.expert_files`.
    matches = ((name, end) for name, end in matches if not EXPERTS.search(name))
    return {name.removeprefix(PREFIX).removesuffix(end) for name, end in matches}


def tensor_name(name: str, kind: str | None = None) -> str:
    """The name in the file of a tensor with this name in a checkpoint, or of an adapter's A, B or magnitude."""
    if kind is None:
        return f"{PREFIX}{name}"
    tensors = EMBEDDING_TENSORS if name.endswith("embed_tokens") else ADAPTER_TENSORS
    return f"{PREFIX}{name}.{tensors[kind]}"


def targets_of(tensors: Iterable[str], projections: Iterable[str]) -> list[str]:
    """The `target_modules` by which PEFT adapts exactly those of these projections that have tensors."""
    adapted = adapted_names(tensors)
    ends = {name.rpartition(".")[2] for name in adapted}
    is_whole = adapted == {name for name in projections if name.rpartition(".")[2] in ends}
    return sorted(ends if is_whole else adapted)


def shapes(names: Sequence[str], widths: tuple[int, int], config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a projection's tensors: `names` in a checkpoint, `widths` of input and output."""
    in_width, out_width = widths
    result = {}
    for name in names:
        rank, _ = config.of(name)
        matrices = {"lora_a": (rank, in_width), "lora_b": (out_width, rank)}
        matrices |= {"magnitude": (out_width,)} if config.dora else {}
        result |= {tensor_name(name, kind): shape for kind, shape in matrices.items()}
    return result


def check(folder: pathlib.Path, tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError that lists all names and shapes that do not fit."""
    missing, left = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    shared = sorted(expected.keys() & tensors.keys())
    wrong = [
        f"{name} {tensors[name].shape}, expected {expected[name]}"
        for name in shared
        if tensors[name].shape != expected[name]
    ]
    if missing or left or wrong:
        raise ValueError(
            f"load_adapters: {folder} does not fit the model. Missing: {cut(str(missing or 'none'))}; left over: "
            f"{cut(str(left or 'none'))}; shapes: {cut('; '.join(wrong) or 'all fit')}. Do the adapters belong to "
            "this model?"
        )


def tensors(ranks: Sequence[tuple[str, int]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A projection's tensors, from arrays with a first axis of one entry for each (name, rank).

    A layer of rank 0 has no adapter.
    """
    result = {}
    for i, (name, rank) in enumerate(ranks):
        cut = {"lora_a": (..., slice(rank)), "lora_b": (slice(rank),), "magnitude": (...,)}
        own = {kind: np.ascontiguousarray(array[i][cut[kind]].T) for kind, array in arrays.items()}
        result |= {tensor_name(name, kind): array for kind, array in own.items()} if rank else {}
    return result


def stacked(tensors: Mapping[str, np.ndarray], names: Sequence[str], kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """One array of a projection in float32, with a first axis of one entry for each name; 0 where it has no tensor.

    `shape` is that of one entry. A tensor of a smaller rank is followed by zeros.
    """
    array = np.zeros((len(names), *shape), np.float32)
    for i, name in enumerate(names):
        if (own := tensors.get(tensor_name(name, kind))) is not None:
            array[(i, *map(slice, own.T.shape))] = own.T
    return array
