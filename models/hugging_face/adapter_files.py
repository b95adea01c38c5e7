"""The files of PEFT's adapters: adapter_config.json and adapter_model.safetensors.

PEFT stores A as (rank, in) and B as (out, rank), the transposes of ours, and one tensor for each layer.
"""

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from liger_jax.models.core import config_fields
from liger_jax.models.core.parameters import ADAPTER_TENSORS, EMBEDDING_TENSORS
from liger_jax.models.hugging_face import adapter_targets, config_json, expressions, saving
from liger_jax.models.hugging_face.adapter_targets import Targets, value_of
from liger_jax.models.hugging_face.checkpoint import ADAPTERS, files_that_complete, own_file
from liger_jax.models.hugging_face.weights import FLOATS, language_part, open_weights

CONFIG, (WEIGHTS,) = ADAPTERS.config, ADAPTERS.weights
BIASES = ("none", "all", "lora_only")
BASE = ".base_layer.weight"  # PEFT saves the table or the head, too, where it has an adapter
_MOST_SAID = 4_000  # characters of what a file holds in one message
_PREFIX = "base_model.model."
_TO_WHOLE = (f"{_PREFIX}model.", f"{_PREFIX}model.language_model.")  # names in a language model and in a multimodal one
# What PEFT's fields must say, if they are there: other values change which weights are adapted, or how.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "ensure_weight_tying": (None, False),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    # The others begin from changed base weights, which are not in the files.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says.

    Attributes:
        rank: columns of A.
        alpha: numerator of the scale.
        targets: which modules are adapted.
        dropout: the share of inputs that training drops.
        rslora: whether the scale is alpha/√rank.
        dora: whether there are magnitudes.
        rank_pattern: ranks of their own, by expressions for a name's end.
        alpha_pattern: alphas of their own, in the same way.
        modules: `modules_to_save`.
        tokens: `trainable_token_indices`, by the ends of modules' names.
        bias: "none", "all" or "lora_only".
        whole: whether names in the config are those of a multimodal model.
    """

    rank: int
    alpha: float
    targets: Targets
    dropout: float
    rslora: bool
    dora: bool
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    modules: Sequence[str] = ()
    tokens: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    bias: str = "none"
    whole: bool = False

    def adapts(self, name: str) -> bool:
        """Whether PEFT gives this projection an adapter."""
        return self.targets.adapts(self._in_file(name))

    def of(self, name: str) -> tuple[int, float]:
        """Rank and alpha of this projection's adapter."""
        name = self._in_file(name)
        return value_of(self.rank_pattern, name, self.rank), value_of(self.alpha_pattern, name, self.alpha)

    def _in_file(self, name: str) -> str:
        plain, whole = (prefix.removeprefix(_PREFIX) for prefix in _TO_WHOLE)
        return f"{whole}{name.removeprefix(plain)}" if self.whole and name.startswith(plain) else name


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

    For the language part of a multimodal model the names are those of transformers' whole model. There
    `target_modules` are whole names, since the other parts have projections of the same names.
    """
    targets, patterns = config.targets.names, (config.rank_pattern, config.alpha_pattern)
    modules = config.modules
    if multimodal:
        tensors = {name.replace(*_TO_WHOLE, 1): tensor for name, tensor in tensors.items()}
        targets = sorted(adapted_names(tensors))
        to_whole = [prefix.removeprefix(_PREFIX) for prefix in _TO_WHOLE]
        modules = [name.replace(*to_whole, 1) for name in modules]
        patterns = [{name.replace(*to_whole, 1): value for name, value in pattern.items()} for pattern in patterns]
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
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
    """Reads both files.

    Raises:
        FileNotFoundError: one of them is absent.
        ValueError: one is damaged, or says something that is not supported.
    """
    files = {name: own_file(folder, name) for name in (CONFIG, WEIGHTS)}
    if absent := [name for name, path in files.items() if path is None]:
        cure = "Pass the folder that PEFT saved."
        if missing := files_that_complete(folder, ADAPTERS):
            cure = f"A save into it was cut off. Save the adapters again, or move the files of {missing} to {folder}."
        raise FileNotFoundError(f"load_adapters: {folder} lacks {absent}. {cure}")
    config = _config(folder / CONFIG, files[CONFIG].read_bytes())
    with open_weights(files[WEIGHTS]) as file:
        names = language_part(file.keys())
        is_whole = any(there.startswith(_TO_WHOLE[1]) for there in names.values())
        config = dataclasses.replace(config, whole=is_whole)
        others = sorted(set(file.keys()) - set(names.values()))
        dtypes = {name: file.get_slice(there).get_dtype() for name, there in names.items()}
        if wrong := [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]:
            raise ValueError(
                f"load_adapters: the tensors in {folder / WEIGHTS} must be of {list(FLOATS)}, and there are "
                f"{_cut(', '.join(wrong))}."
            )
        tensors = {name: file.get_tensor(there) for name, there in names.items()}
    with np.errstate(over="ignore"):
        wrong = [name for name, tensor in tensors.items() if not np.isfinite(tensor.astype(np.float32)).all()]
    if wrong:
        raise ValueError(
            f"load_adapters: {folder / WEIGHTS} has numbers that are no finite float32, in {_cut(', '.join(wrong))}. "
            "The training that made them has failed, or the file is damaged."
        )
    if others:
        warnings.warn(
            f"load_adapters: {folder} has {len(others)} tensors for other parts of a multimodal model, such as "
            f"{_cut(others[0])}. They are left out, as those parts' weights are.",
            stacklevel=3,
        )
    if not adapted_names(tensors):
        raise ValueError(
            f"load_adapters: {folder / WEIGHTS} has no tensor whose name ends in .{ADAPTER_TENSORS['lora_a']}."
        )
    return config, tensors


def _config(path: pathlib.Path, content: bytes) -> AdapterConfig:
    """What adapter_config.json says, every field of which is checked."""
    try:
        values = config_json.loads(content, path)
    except ValueError as error:
        raise ValueError(f"load_adapters: {path} is damaged: {error}") from error
    other = {name: values[name] for name, may in _FIXED.items() if name in values and values[name] not in may}
    if other:
        supported = {name: _FIXED[name][0] for name in other}
        raise ValueError(
            f"load_adapters: {path} has {_cut(str(other))}, and {supported} is what these fields must say. Merge the "
            "adapters in PEFT, and load the merged model."
        )
    as_list = lambda value: [] if value in (None, "") else value if isinstance(value, list) else [value]
    layers, layers_pattern = (as_list(values.get(name)) for name in ("layers_to_transform", "layers_pattern"))
    dropout = values.get("lora_dropout", 0.0)
    numbers = {name: values[name] for name in ("r", "lora_alpha", "use_rslora", "use_dora") if name in values}
    wrong = [f"{name} is missing" for name in ("r", "lora_alpha") if name not in values]
    wrong += config_fields.problems(_Numbers, numbers)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        wrong.append(f"lora_dropout={config_fields.short(dropout)} must be a number in [0, 1)")
    wrong += adapter_targets.problems_of_layers(layers, layers_pattern)
    for name in ("target_modules", "exclude_modules"):
        wrong += adapter_targets.problems(name, values.get(name))
    ranks, alphas = (values.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    is_rank = lambda value: not config_fields.problems(_Numbers, {"r": value})
    is_alpha = lambda value: not config_fields.problems(_Numbers, {"lora_alpha": value})
    wrong += adapter_targets.problems_of_pattern("rank_pattern", ranks, is_rank, "an int of at least 1")
    wrong += adapter_targets.problems_of_pattern("alpha_pattern", alphas, is_alpha, "a finite float32 above 0")
    tokens, modules = values.get("trainable_token_indices") or {}, values.get("modules_to_save") or []
    tokens = {"embed_tokens": tokens} if isinstance(tokens, list) else tokens
    is_tokens = lambda own: isinstance(own, list) and all(type(token) is int for token in own)
    if not isinstance(tokens, dict) or not all(map(is_tokens, tokens.values())):
        wrong.append(f"trainable_token_indices={config_fields.short(tokens)} must be lists of tokens")
    if not isinstance(modules, list) or not all(isinstance(name, str) and name for name in modules):
        wrong.append(f"modules_to_save={config_fields.short(modules)} must be a list of names")
    else:
        problems = ((name, expressions.problem(name)) for name in modules)
        wrong += [f"modules_to_save: {config_fields.short(name)} {problem}" for name, problem in problems if problem]
    if values.get("bias", "none") not in BIASES:
        wrong.append(f"bias={config_fields.short(values['bias'])} must be one of {BIASES}")
    if wrong:
        raise ValueError(f"load_adapters: {path} cannot be used: {'; '.join(wrong)}.")
    return AdapterConfig(
        rank=values["r"],
        alpha=float(values["lora_alpha"]),
        targets=Targets(
            values.get("target_modules") or (), values.get("exclude_modules") or (), layers, layers_pattern, modules
        ),
        modules=modules,
        tokens=tokens,
        bias=values.get("bias", "none"),
        dropout=float(dropout),
        rslora=values.get("use_rslora", False),
        dora=values.get("use_dora", False),
        rank_pattern=ranks,
        alpha_pattern={name: float(alpha) for name, alpha in alphas.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The types of fields of adapter_config.json, for `config_fields.problems`."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool


def _cut(text: str) -> str:
    """A text for a message, which may come from a file that anyone may have written."""
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} … ({len(text):,} characters)"


def adapted_names(tensors: Iterable[str]) -> set[str]:
    """The names in a checkpoint of the modules that have an A among these tensors."""
    ends = tuple(f".{names['lora_a']}" for names in (ADAPTER_TENSORS, EMBEDDING_TENSORS))
    found = ((name, end) for name in tensors for end in ends if name.endswith(end))
    return {name.removeprefix(_PREFIX).removesuffix(end) for name, end in found}


def tensor_name(name: str, part: str | None = None) -> str:
    """The name in the file of a tensor with this name in a checkpoint, or of a part of an adapter."""
    if part is None:
        return f"{_PREFIX}{name}"
    tensors = EMBEDDING_TENSORS if name.endswith("embed_tokens") else ADAPTER_TENSORS
    return f"{_PREFIX}{name}.{tensors[part]}"


def targets_of(tensors: Iterable[str], projections: Iterable[str]) -> list[str]:
    """The `target_modules` by which PEFT adapts, of all these projections, those that have tensors."""
    adapted = adapted_names(tensors)
    ends = {name.rpartition(".")[2] for name in adapted}
    is_whole = adapted == {name for name in projections if name.rpartition(".")[2] in ends}
    return sorted(ends if is_whole else adapted)


def shapes(names: Sequence[str], widths: tuple[int, int], config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a projection's tensors: `names` in a checkpoint, `widths` of input and output."""
    in_width, out_width = widths
    found = {}
    for name in names:
        rank, _ = config.of(name)
        parts = {"lora_a": (rank, in_width), "lora_b": (out_width, rank)}
        parts |= {"magnitude": (out_width,)} if config.dora else {}
        found |= {tensor_name(name, part): shape for part, shape in parts.items()}
    return found


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
            f"load_adapters: {folder} does not fit the model. Missing: {_cut(str(missing or 'none'))}; left over: "
            f"{_cut(str(left or 'none'))}; shapes: {_cut('; '.join(wrong) or 'all fit')}. Do the adapters belong to "
            "this model?"
        )


def tensors(ranks: Sequence[tuple[str, int]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A projection's tensors, from arrays with a first axis of one entry for each (name, rank).

    A layer of rank 0 has no adapter.
    """
    found = {}
    for i, (name, rank) in enumerate(ranks):
        cut = {"lora_a": (..., slice(rank)), "lora_b": (slice(rank),), "magnitude": (...,)}
        own = {part: np.ascontiguousarray(array[i][cut[part]].T) for part, array in arrays.items()}
        found |= {tensor_name(name, part): array for part, array in own.items()} if rank else {}
    return found


def stacked(tensors: Mapping[str, np.ndarray], names: Sequence[str], part: str, shape: tuple[int, ...]) -> np.ndarray:
    """One array of a projection in float32, with a first axis of one entry for each name; 0 where it has no tensor.

    `shape` is that of one entry. A tensor of a smaller rank is followed by zeros.
    """
    array = np.zeros((len(names), *shape), np.float32)
    for i, name in enumerate(names):
        if (own := tensors.get(tensor_name(name, part))) is not None:
            array[(i, *map(slice, own.T.shape))] = own.T
    return array
