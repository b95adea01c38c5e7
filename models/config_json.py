"""What config.json says of an architecture, as transformers 4 and 5 write it, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope

Config = TypeVar("Config")
_ROPES = {"linear": LinearRope, "dynamic": DynamicRope, "llama3": Llama3Rope, "yarn": YarnRope}


def read(values: Mapping[str, Any], config_type: type[Config], fixed: Mapping[str, tuple[Any, ...]]) -> Config:
    """The config of a checkpoint.

    Args:
        values: config.json. Fields that say nothing of the computation are passed over.
        config_type: a dataclass with Hugging Face's field names, `rope_theta` and `rope_scaling` among them.
        fixed: by field, the values with which alone the model computes; absent fields mean the first.

    Returns:
        A `config_type`.

    Raises:
        ValueError: a list of all fields whose values the model does not support.
    """
    rope, problems = _ropes_of(values)
    problems += [
        f"{name}={values[name]!r} must be {allowed[0]!r}"
        for name, allowed in fixed.items()
        if name in values and values[name] not in allowed
    ]
    if problems:
        raise ValueError(_cannot(config_type, "; ".join(problems)))
    fields = {field.name for field in dataclasses.fields(config_type)}
    read_as_is = fields - {"rope_theta", "rope_local_base_freq", "rope_scaling", "layer_types"}
    arguments = {name: values[name] for name in read_as_is if name in values}
    arguments |= {name: value for name, value in rope.items() if name in fields}
    layer_types = values.get("layer_types")
    if layer_types and "layer_types" in fields:
        arguments["layer_types"] = tuple(layer_types)
    config: Any = config_type(**arguments)
    if layer_types and tuple(layer_types) != config.layer_types:
        raise ValueError(_cannot(config_type, f"layer_types={layer_types!r} must be {list(config.layer_types)!r}"))
    return config


def _cannot(config_type: type, problems: str) -> str:
    return f"{config_type.__name__} cannot be had from this config.json: {problems}."


def write(config: Any, fixed: Mapping[str, tuple[Any, ...]], architecture: str, dtype: str) -> dict[str, Any]:
    """What config.json says of this config; transformers 4 and 5 read it.

    Args:
        config: as `read` returns it.
        fixed: as `read` takes it.
        architecture: the model class, such as "LlamaForCausalLM".
        dtype: of the parameters, such as "bfloat16".

    Returns:
        Field names and values for `json.dump`.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        kind = next(name for name, scaling_type in _ROPES.items() if isinstance(scaling, scaling_type))
        values["rope_scaling"] = {"rope_type": kind} | {
            name: value for name, value in dataclasses.asdict(scaling).items() if value is not None
        }
    always = {name: allowed[0] for name, allowed in fixed.items() if allowed[0] is not None}
    return {"architectures": [architecture], "torch_dtype": dtype, **always, **values}


def _ropes_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments `rope_theta`, `rope_scaling` and `rope_local_base_freq`, and what is wrong with them.

    transformers 5 has the first two in `rope_parameters`, and all three there by types of layers where these differ;
    4 has fields of these names.
    """
    parameters = values.get("rope_parameters") or {}
    if "full_attention" not in parameters:
        rope, problems = _rope_of(values, dict(parameters or values.get("rope_scaling") or {}))
        if values.get("rope_local_base_freq") is not None:
            rope["rope_local_base_freq"] = float(values["rope_local_base_freq"])
        return rope, problems
    rope, problems = _rope_of(values, dict(parameters["full_attention"]))
    local, local_problems = _rope_of({}, dict(parameters.get("sliding_attention") or {}))
    if "rope_theta" in local:
        rope["rope_local_base_freq"] = local["rope_theta"]
    if "rope_scaling" in local:
        local_problems.append("rope_parameters of 'sliding_attention' must have rope_type='default'")
    return rope, problems + local_problems


def _rope_of(values: Mapping[str, Any], scaling: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments `rope_theta` and `rope_scaling`, and what is wrong with them; the type was once called `type`."""
    theta = scaling.pop("rope_theta", values.get("rope_theta"))
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    rope = {} if theta is None else {"rope_theta": float(theta)}
    if kind == "default":
        return rope, []
    if kind not in _ROPES:
        return rope, [f"rope_type={kind!r} must be 'default' or one of {list(_ROPES)}"]
    known = {field.name for field in dataclasses.fields(_ROPES[kind])}
    if kind in ("dynamic", "yarn") and "max_position_embeddings" in values:
        scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    unknown = sorted(set(scaling) - known)
    if unknown:
        return rope, [f"rope_scaling of type {kind!r} has {unknown}, and takes {sorted(known)}"]
    try:
        return rope | {"rope_scaling": _ROPES[kind](**scaling)}, []
    except (TypeError, ValueError) as error:
        return rope, [f"rope_scaling: {error}"]
