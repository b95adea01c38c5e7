"""The adapter_config.json of PEFT's adapters, with checks of every field."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from liger_jax.models.core import config_fields
from liger_jax.models.hugging_face import adapter_targets, config_json
from liger_jax.models.hugging_face.adapter_targets import Targets, value_of

BIASES = ("none", "all", "lora_only")
PREFIX = "base_model.model."
TO_WHOLE = (f"{PREFIX}model.", f"{PREFIX}model.language_model.")  # names in a language model and in a multimodal one
_MOST_SAID = 4_000  # characters of what a file holds in one message
# What PEFT's fields must say, if they are there: other values change which weights are adapted, or how.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "ensure_weight_tying": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    # The others begin from changed base weights, which are not in the files.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The fields of adapter_config.json."""

    rank: int  # columns of A
    alpha: float  # numerator of the scale
    targets: Targets  # which modules are adapted
    dropout: float  # the share of inputs that training drops
    rslora: bool  # whether the scale is alpha/√rank
    dora: bool  # whether there are magnitudes
    # Separate ranks, by expressions for a name's end.
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)  # separate alphas, in the same way
    modules: Sequence[str] = ()  # `modules_to_save`
    # `trainable_token_indices`, by the ends of modules' names.
    tokens: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    bias: str = "none"  # "none", "all" or "lora_only"
    parameters: Sequence[str] = ()  # `target_parameters`, names of experts' weights, or ends of them
    whole: bool = False  # whether names in the config are those of a multimodal model

    def adapts(self, name: str) -> bool:
        """Whether PEFT gives this projection an adapter."""
        return self.targets.adapts(self.in_file(name))

    def of(self, name: str) -> tuple[int, float]:
        """Rank and alpha of this projection's adapter."""
        name = self.in_file(name)
        return value_of(self.rank_pattern, name, self.rank), value_of(self.alpha_pattern, name, self.alpha)

    def in_file(self, name: str) -> str:
        """A module's name as the file has it."""
        plain, whole = (prefix.removeprefix(PREFIX) for prefix in TO_WHOLE)
        return f"{whole}{name.removeprefix(plain)}" if self.whole and name.startswith(plain) else name


def parse(path: pathlib.Path, content: bytes) -> AdapterConfig:
    """Parses adapter_config.json, and checks every field."""
    try:
        values = config_json.loads(content, path)
    except ValueError as error:
        raise ValueError(f"load_adapters: {path} is damaged: {error}") from error
    other = {name: values[name] for name, may in _FIXED.items() if name in values and values[name] not in may}
    if other:
        supported = {name: _FIXED[name][0] for name in other}
        raise ValueError(
            f"load_adapters: {path} has {cut(str(other))}, and {supported} is what these fields must say. Merge the "
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
        problems = ((name, adapter_targets.problem_of_expression(name)) for name in modules)
        wrong += [f"modules_to_save: {config_fields.short(name)} {problem}" for name, problem in problems if problem]
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) and name for name in parameters):
        wrong.append(f"target_parameters={config_fields.short(parameters)} must be a list of names")
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
        parameters=parameters,
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


def cut(text: str) -> str:
    """A text for a message, which may come from a file that anyone may have written."""
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} … ({len(text):,} characters)"
