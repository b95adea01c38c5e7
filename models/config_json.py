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
    rope, problems = _rope_of(values)
    problems += [
        f"{name}={values[name]!r} must be {allowed[0]!r}"
        for name, allowed in fixed.items()
        if name in values and values[name] not in allowed
    ]
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"layer_types={values['layer_types']!r} must all be 'full_attention'")
    if problems:
        raise ValueError(f"{config_type.__name__} cannot be had from this config.json: {'; '.join(problems)}.")
    fields = {field.name for field in dataclasses.fields(config_type)} - {"rope_scaling", "rope_theta"}
    return config_type(**{name: values[name] for name in fields if name in values}, **rope)


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


def _rope_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments `rope_theta` and `rope_scaling`, and what is wrong with them.

    transformers 5 has both in `rope_parameters`, 4 has `rope_theta` and `rope_scaling`, whose type was called `type`.
    """
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
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
