"""Reads an architecture from config.json, as transformers 4 and 5 write it, and writes it again."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from liger_jax.models.core import config_fields
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope

Config = TypeVar("Config")
_ROPES = {"linear": LinearRope, "dynamic": DynamicRope, "llama3": Llama3Rope, "yarn": YarnRope}
_ROPE_FIELDS = {"rope_theta", "rope_local_base_freq", "rope_scaling"}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint, which anyone may have written.

    If a name occurs twice the last one counts, as in transformers.

    Args:
        path: the file.

    Returns:
        Names and values; all numbers are finite.

    Raises:
        ValueError: the file is not JSON, does not hold an object, is nested too deep, or has a number beyond float64.
        OSError: the file cannot be read.
    """

    def finite(kind):
        def number(text):
            if not math.isfinite(float(text)):
                raise ValueError(f"{config_fields.short(text)} is no finite float64")
            return kind(text)

        return number

    try:
        text = path.read_text(encoding="utf8")
        values = json.loads(text, parse_float=finite(float), parse_int=finite(int), parse_constant=finite(float))
    except RecursionError:
        raise ValueError(f"{path} is nested too deep.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, {{…}}, and holds {config_fields.short(values)}.")
    return values


def language_part(values: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The fields of the language model; a multimodal config.json has them in `text_config`.

    Args:
        values: the fields of config.json, as `load` returns them.
        path: the file, for messages.

    Returns:
        Names and values.

    Raises:
        ValueError: `text_config` is not an object, or `model_type` is not a string.
    """
    part = {} if values.get("text_config") is None else values["text_config"]
    if not isinstance(part, dict):
        raise ValueError(f"{path}: text_config={config_fields.short(part)} must be an object, {{…}}.")
    shared = values
    if part:
        shared = {name: values[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in values}
    found = {**shared, **part}
    if not isinstance(found.get("model_type"), str | None):
        raise ValueError(f"{path}: model_type={config_fields.short(found['model_type'])} must be a string.")
    return found


def dtype_of(values: Mapping[str, Any], path: pathlib.Path) -> str:
    """The dtype of a checkpoint's parameters, which transformers 4 calls `torch_dtype`.

    Args:
        values: the fields of config.json.
        path: the file, for messages.

    Returns:
        A name; "float32" if the file has none.

    Raises:
        ValueError: the dtype is none of `DTYPES`.
    """
    name = "dtype" if values.get("dtype") is not None else "torch_dtype"
    dtype = "float32" if values.get(name) is None else values[name]
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name}={config_fields.short(dtype)} must be one of {list(DTYPES)}.")
    return dtype


def read(
    values: Mapping[str, Any],
    config_type: type[Config],
    fixed: Mapping[str, tuple[Any, ...]],
    source: Any = "this config.json",
) -> Config:
    """Makes a config from the fields of config.json.

    Args:
        values: the fields. Those that do not affect the computation are ignored.
        config_type: a dataclass with Hugging Face's field names, `rope_theta` and `rope_scaling` among them.
        fixed: for fields that `config_type` lacks, the values that the model supports; an absent field means the first.
        source: the file, for messages.

    Returns:
        A `config_type`.

    Raises:
        ValueError: the model does not support some values; the message lists them all.
    """
    rope, wrong = _ropes_of(values)
    wrong += [
        f"{name}={config_fields.short(values[name])} must be {allowed[0]!r}"
        for name, allowed in fixed.items()
        if name in values and values[name] not in allowed
    ]
    fields = {field.name for field in dataclasses.fields(config_type)}
    arguments = {name: value for name, value in values.items() if name in fields - _ROPE_FIELDS}
    arguments |= {name: value for name, value in rope.items() if name in fields}
    if (divisor := values.get("logits_scaling")) is not None:  # Granite's
        problems = config_fields.problems(config_type, {"logit_scale": divisor})
        wrong += [problem.replace("logit_scale", "logits_scaling", 1) for problem in problems]
        arguments["logit_scale"] = 1.0 if problems else 1.0 / divisor
    wrong += config_fields.problems(config_type, arguments)
    layer_types = values.get("layer_types") or None
    if not (layer_types is None or isinstance(layer_types, list) or "layer_types" in fields):
        wrong.append(f"layer_types={config_fields.short(layer_types)} must be a list of strings")
    try:
        if wrong:
            raise ValueError("; ".join(wrong) + ".")
        if "layer_types" in fields:
            arguments["layer_types"] = layer_types and tuple(layer_types)
        config: Any = config_type(**arguments)
        if layer_types and tuple(layer_types) != config.layer_types:
            own = config_fields.short(list(config.layer_types))
            raise ValueError(f"layer_types={config_fields.short(layer_types)} must be {own}.")
    except ValueError as error:
        reason = str(error).removeprefix(f"{config_type.__name__}: ")
        raise ValueError(f"{config_type.__name__} cannot be read from {source}: {reason}") from None
    return config


def write(config: Any, fixed: Mapping[str, tuple[Any, ...]], architecture: str, dtype: str) -> dict[str, Any]:
    """Makes the fields of config.json from a config; transformers 4 and 5 read them.

    Args:
        config: a config, as `read` returns it.
        fixed: the supported values of other fields, as `read` takes them; the first of each is written.
        architecture: the name of the model's class, such as "LlamaForCausalLM".
        dtype: dtype of the parameters, such as "bfloat16".

    Returns:
        Field names and values for `json.dump`.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if values["logit_scale"] == 1.0:  # which no other family's config.json has
        del values["logit_scale"]
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        kind = next(name for name, scaling_type in _ROPES.items() if isinstance(scaling, scaling_type))
        values["rope_scaling"] = {"rope_type": kind} | {
            name: value for name, value in dataclasses.asdict(scaling).items() if value is not None
        }
    always = {name: allowed[0] for name, allowed in fixed.items() if allowed[0] is not None}
    return {"architectures": [architecture], "torch_dtype": dtype, **always, **values}


def _ropes_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments `rope_theta`, `rope_scaling` and `rope_local_base_freq`, and a list of problems with them.

    transformers 4 writes fields of these names. transformers 5 writes the first two in `rope_parameters`; if types of
    layers differ, `rope_parameters` has an object for each type, from which the third follows too.
    """
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    parameters = values.get(name) or {}
    if not (isinstance(parameters, dict) and "full_attention" in parameters):
        rope, wrong = _rope_of(values, name, parameters)
        if values.get("rope_local_base_freq") is not None:
            rope["rope_local_base_freq"] = values["rope_local_base_freq"]
        return rope, wrong
    rope, wrong = _rope_of(values, f"{name} of 'full_attention'", parameters["full_attention"])
    local_name = f"{name} of 'sliding_attention'"
    local, local_wrong = _rope_of({}, local_name, parameters.get("sliding_attention") or {})
    if "rope_theta" in local:
        rope["rope_local_base_freq"] = local["rope_theta"]
    if "rope_scaling" in local:
        local_wrong.append(f"{local_name} must have rope_type='default'")
    return rope, wrong + local_wrong


def _rope_of(values: Mapping[str, Any], name: str, parameters: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments `rope_theta` and `rope_scaling`, and a list of problems; `rope_type` was once called `type`."""
    if not isinstance(parameters, dict):
        return {}, [f"{name}={config_fields.short(parameters)} must be an object, {{…}}, or null"]
    scaling = dict(parameters)
    theta = scaling.pop("rope_theta", values.get("rope_theta"))
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    rope = {} if theta is None else {"rope_theta": theta}
    if kind == "default":
        return rope, []
    if not (isinstance(kind, str) and kind in _ROPES):
        return rope, [f"rope_type={config_fields.short(kind)} must be 'default' or one of {list(_ROPES)}"]
    fields = dataclasses.fields(_ROPES[kind])
    known, needed = {f.name for f in fields}, {f.name for f in fields if f.default is dataclasses.MISSING}
    if kind in ("dynamic", "yarn") and "max_position_embeddings" in values:
        scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    unknown, absent = sorted(set(scaling) - known), sorted(needed - set(scaling))
    if unknown:
        return rope, [f"{name} of type {kind!r} has {config_fields.short(unknown)}, and takes {sorted(known)}"]
    if absent:
        return rope, [f"{name} of type {kind!r} lacks {absent}"]
    wrong = config_fields.problems(_ROPES[kind], scaling)
    if not wrong:
        try:
            return rope | {"rope_scaling": _ROPES[kind](**scaling)}, []
        except ValueError as error:  # fields that do not fit together
            wrong = [str(error).rstrip(".")]
    return rope, [f"{name}: {problem}" for problem in wrong]
