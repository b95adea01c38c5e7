"""The rotary embedding's fields of config.json, read and written.

transformers 4 has `rope_theta`, `rope_scaling` and, for Gemma 3's sliding layers, `rope_local_base_freq`.
transformers 5 has `rope_parameters`, which in Gemma 3 and OLMo 3 holds an object for each type of layer. A file of
transformers 5 to which somebody adds `rope_scaling`, as model cards say, is read as transformers 5 reads it. If that
drops a field of `rope_parameters` which has another value, the file is refused.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from liger_jax.models.core import config_fields
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, LongRope, ProportionalRope, RopeScaling, YarnRope

NAMES = {"rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor", "llama_4_scaling_beta"}
_KINDS = {
    "linear": LinearRope, "dynamic": DynamicRope, "llama3": Llama3Rope, "yarn": YarnRope, "longrope": LongRope,
    "proportional": ProportionalRope,
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PART, _BETA = "partial_rotary_factor", "llama_4_scaling_beta"
_ORIGINAL, _MOST, _OUR_MOST = "original_max_position_embeddings", "max_position_embeddings", "max_positions"


def read(values: Mapping[str, Any], config_type: type) -> tuple[dict[str, Any], list[str]]:
    """Reads the fields of `NAMES` that a config has.

    Returns the config's arguments, and a clause for each problem. Fields of a scaling that change nothing in
    transformers are ignored with a warning.
    """
    given = {name: values.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, parameters in given.items():
        if not isinstance(parameters, dict):
            return {}, [f"{name}={config_fields.short(parameters)} must be an object, {{…}}, or null"]
    counts = given["rope_scaling"] or given["rope_parameters"]
    if getattr(config_type, "may_not_rotate", False) and counts.get("rope_theta", values.get("rope_theta", 1)) is None:
        return {"rope_theta": None, "rope_scaling": None}, []
    defaults = {field.name: field.default for field in dataclasses.fields(config_type)}
    defaults |= getattr(config_type, "rope_defaults", {})
    given = {name: _renamed(each, getattr(config_type, "rope_aliases", {})) for name, each in given.items()}
    is_there = values.get("rope_parameters") is not None  # if only as {}
    rotates_all = {_PART: 1.0} if _PART in values and values[_PART] is None else {}  # as null does in transformers
    values = defaults | {name: value for name, value in values.items() if value is not None} | rotates_all
    parameters, scaling = (_plain(each) for each in given.values())
    if _FULL in scaling or _SLIDING in scaling:
        return {}, ["rope_scaling must be one object for all layers; only rope_parameters may have one for each type"]
    of_types = getattr(config_type, "scales_full_layers", False)
    if defaults.get("rope_scaling") is not None and not (scaling or parameters or is_there and not of_types):
        # transformers has this family's own then
        return {}, [] if of_types else _turns_whole_heads(values.get(_PART, 1.0))
    if of_types:
        own_base = None if defaults["rope_local_base_freq"] else defaults["rope_theta"]
        return _of_types_of_layers(values, parameters, scaling, own_base)
    if _FULL in parameters or _SLIDING in parameters:
        return {}, ["rope_parameters must be one object for all layers: in this family their types share it"]
    taken = {"rope_theta": values["rope_theta"]} | (scaling or parameters)
    if _kind(taken) == "proportional":
        return {}, ["rope_type='proportional' must be another: only in Gemma 4 a share of each head's pairs turns"]
    wrong = _lost(parameters, taken) if scaling else []
    if getattr(config_type, "rope_sections", False):  # of images, which turn text alike
        taken = {name: value for name, value in taken.items() if not name.startswith("mrope")}
    of_queries = {}
    if _BETA in defaults:
        taken.pop(_MOST, None)  # the config's own once more
        of_queries = {_BETA: taken.pop(_BETA, None)}
    if getattr(config_type, "alpha_stretches_base", False) and taken.get("alpha") and _kind(taken) == "dynamic":
        taken, problems = _stretched(taken, values)
        wrong += problems
    rope = {"rope_theta": taken["rope_theta"]} | of_queries
    if _PART in defaults:  # in this family only some columns of each head may be rotated
        rope[_PART] = taken.pop(_PART, values[_PART])
        values = {name: value for name, value in values.items() if name != _PART}
    own_scaling, problems = _scaling_of("rope_scaling" if scaling else "rope_parameters", taken, values)
    rope["rope_scaling"] = own_scaling
    return rope | _our_most(own_scaling, values), wrong + problems


def write(scaling: RopeScaling | None, most: int) -> dict[str, Any]:
    """The fields of config.json that say a scaling, which transformers 4 and 5 read.

    For "dynamic" transformers takes `max_position_embeddings` as the length in training. So that field gets the
    scaling's own length, and the config's `most` goes to a field that `read` alone knows.
    """
    if scaling is None:
        return {}
    kind = next(name for name, scaling_type in _KINDS.items() if isinstance(scaling, scaling_type))
    fields = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    lengths = {}
    if kind == "longrope":  # Phi-3 reads it there alone
        lengths = {_ORIGINAL: fields[_ORIGINAL]}
    if kind == "dynamic":
        original = fields.pop(_ORIGINAL)
        lengths = {_MOST: original} | ({_OUR_MOST: most} if most != original else {})
    return lengths | {"rope_scaling": {"rope_type": kind} | fields}


def _of_types_of_layers(values, parameters, scaling, own_base: float | None) -> tuple[dict[str, Any], list[str]]:
    """Gemma 3's and OLMo 3's: `rope_scaling` changes fields of the layers with full attention.

    `own_base`: of a family whose layers may share a base, as OLMo 3, its default; `None` for a base of each type.
    """
    by_type = {kind: parameters.get(kind) or {} for kind in (_FULL, _SLIDING)}
    for kind, each in by_type.items():
        if not isinstance(each, dict):
            return {}, [f"rope_parameters of {kind!r}={config_fields.short(each)} must be an object, {{…}}, or null"]
    full, local = (_plain(each) for each in by_type.values())
    taken = {"rope_theta": values["rope_theta"]} | full | scaling
    wrong = _lost(full, taken) if scaling else []
    if not full and not local and _lost(parameters, taken):
        wrong.append(
            f"rope_parameters must hold an object for {_FULL!r} and one for {_SLIDING!r}: its fields are no others"
        )
    if "type" in scaling and scaling["type"] != taken.get("rope_type"):
        wrong.append("rope_scaling must have its type as rope_type, since transformers reads no type here")
    own_scaling, problems = _scaling_of(f"rope_parameters of {_FULL!r}" if full else "rope_scaling", taken, values)
    local_name = f"rope_parameters of {_SLIDING!r}"
    local_found, local_problems = _scaling_of(local_name, local, values)
    if local_found is not None:
        local_problems.append(f"{local_name} must have rope_type='default'")
    base, shared = local.get("rope_theta", own_base or values["rope_local_base_freq"]), taken["rope_theta"]
    if own_base and (given := values["rope_local_base_freq"]):
        wrong.append(
            f"rope_local_base_freq={config_fields.short(given)} must be absent: {local_name} says the base here"
        )
    if own_base and not full and not local:
        base = shared
        if shared != own_base:
            warnings.warn(
                f"config.json: rope_theta={config_fields.short(shared)} is the base of all layers, as in transformers "
                f"4. transformers 5 gives layers that slide {own_base} unless rope_parameters says a base for them.",
                stacklevel=2,
            )
    # Else transformers 5 gives layers that slide, where no object of theirs says it, the family's own base.
    base = None if own_base and base == shared else base
    rope = {"rope_theta": shared, "rope_local_base_freq": base, "rope_scaling": own_scaling}
    return rope | _our_most(own_scaling, values), wrong + problems + local_problems


def _our_most(scaling: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The config's own `max_position_embeddings`, if `write` had to leave the name to the scaling's length."""
    return {_MOST: values[_OUR_MOST]} if isinstance(scaling, DynamicRope) and _OUR_MOST in values else {}


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """An object without its nulls, which mean that a field is absent; for `truncate` alone transformers reads False."""
    return {name: value for name, value in parameters.items() if value is not None or name == "truncate"}


def _renamed(parameters: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """An object whose type has the name of today."""
    is_old = lambda name, value: name in ("type", "rope_type") and isinstance(value, str) and value in aliases
    return {name: aliases[value] if is_old(name, value) else value for name, value in parameters.items()}


def _stretched(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Hunyuan's: the base θ·alpha^(H/(H − 2)), which is all that `alpha` changes; and a list of problems."""
    theta, alpha = parameters["rope_theta"], parameters["alpha"]
    width, heads, head_dim = (values.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    numbers = {"rope_theta": theta, "alpha": alpha, "hidden_size": width, "num_attention_heads": heads}
    numbers |= {} if head_dim is None else {"head_dim": head_dim}
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 < number <= config_fields.MOST:
            return {"rope_theta": 10000.0}, [f"{name}={config_fields.short(number)} must be a number above 0"]
    size = head_dim or width // heads
    if size <= 2:
        return {"rope_theta": theta}, [f"head_dim={size} must be more than 2, since rope_scaling has an alpha"]
    return {"rope_theta": theta * alpha ** (size / (size - 2))}, []


def _kind(parameters: Mapping[str, Any]) -> Any:
    """The type, which was once called `type`."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def _lost(given: Mapping[str, Any], taken: Mapping[str, Any]) -> list[str]:
    """A clause if fields of `rope_parameters` have other values than those that transformers takes.

    A `rope_parameters` without a scaling says no more than the base.
    """
    names = {"rope_theta", "partial_rotary_factor"} if _kind(given) == "default" else set(given) - {"type", "rope_type"}
    lost = [name for name in sorted(names & set(given)) if taken.get(name) != given[name]]
    if _kind(given) not in ("default", _kind(taken)):
        lost.append("rope_type")
    if not lost:
        return []
    before, now = ({name: each.get(name) for name in lost} | {"rope_type": _kind(each)} for each in (given, taken))
    return [
        f"rope_parameters={config_fields.short(before)} disagrees with rope_scaling, by which transformers computes "
        f"with {config_fields.short(now)}: put all fields into rope_parameters, and delete rope_scaling"
    ]


def _scaling_of(name: str, parameters: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A `RopeScaling` or `None`, and a list of problems."""
    kind = _kind(parameters)
    fields = {key: value for key, value in parameters.items() if key not in ("type", "rope_type", "rope_theta")}
    for key in [key for key in fields if key.startswith("mrope_")]:  # which columns turn by place in an image
        del fields[key]
    if not (isinstance(kind, str) and kind in ("default", *_KINDS)):
        return None, [f"rope_type={config_fields.short(kind)} must be 'default' or one of {list(_KINDS)}"]
    rotated = 1.0 if kind == "proportional" else fields.pop(_PART, values.get(_PART, 1.0))
    wrong = _turns_whole_heads(rotated)
    scaling_type: Any = _KINDS.get(kind)
    known = dataclasses.fields(scaling_type) if scaling_type else ()
    if kind not in ("linear", "proportional") and scaling_type:
        wrong += _set_original(name, kind, fields, values)
    if kind == "longrope":
        _set_factor(fields, values)
    unknown = sorted(set(fields) - {field.name for field in known})
    if absent := sorted({field.name for field in known if field.default is dataclasses.MISSING} - set(fields)):
        other = f"has {config_fields.short(unknown)}, and takes {sorted(field.name for field in known)}"
        return None, [*wrong, f"{name} of type {kind!r} {other if unknown else f'lacks {absent}'}"]
    if unknown:
        warnings.warn(
            f"config.json: {name} of type {kind!r} has {config_fields.short(unknown)}, which change nothing, here as "
            "in transformers.",
            stacklevel=2,
        )
    fields = {key: value for key, value in fields.items() if key not in unknown}
    if not scaling_type:
        return None, wrong
    problems = config_fields.problems(scaling_type, fields)
    if not problems:
        lists = {name: value for name, value in fields.items() if isinstance(value, list)}
        fields |= config_fields.normal(scaling_type, lists)
        try:
            return scaling_type(**fields), wrong
        except ValueError as error:  # fields that do not fit together
            problems = [str(error).rstrip(".")]
    return None, wrong + [f"{name}: {problem}" for problem in problems]


def _turns_whole_heads(share: Any) -> list[str]:
    """A clause if the family does not rotate the share of a head's columns that a file asks for."""
    return (
        [] if share == 1 else [f"partial_rotary_factor={config_fields.short(share)} must be 1: whole heads are rotated"]
    )


def _set_original(name: str, kind: str, fields: dict[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Sets the length in training as transformers does, and returns a list of problems.

    It is `max_position_embeddings` for "dynamic", and for other types that lack it. A field of that name outside of the
    object, as some checkpoints have it, counts more than the object's.
    """
    most, given = values[_MOST], fields.get(_ORIGINAL)
    if kind == "dynamic":
        if given not in (None, most):
            warnings.warn(
                f"config.json: {name} of type 'dynamic' has {_ORIGINAL}={config_fields.short(given)}, for which "
                f"max_position_embeddings={config_fields.short(most)} is taken, as in transformers.",
                stacklevel=2,
            )
        fields[_ORIGINAL] = most
        return []
    outside = values.get(_ORIGINAL)
    fields[_ORIGINAL] = next(value for value in (outside, given, most) if value is not None)
    if None not in (outside, given) and outside != given:
        return [f"{_ORIGINAL}={config_fields.short(outside)} differs from {name}'s {config_fields.short(given)}"]
    return []


def _set_factor(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets LongRoPE's factor as transformers does where it is absent: by how much the context grew."""
    lengths = {_MOST: values[_MOST], _ORIGINAL: fields[_ORIGINAL]}
    if all(type(length) is int and 0 < length <= config_fields.MOST for length in lengths.values()):
        fields.setdefault("factor", lengths[_MOST] / lengths[_ORIGINAL])
