"""Checks of a config's fields: by their annotations, and by bounds that are the same in all families.

A config may come from a file that anyone may have written. So every field is checked before anything is computed from
it, and before memory is reserved for it.
"""

import dataclasses
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

# JAX counts axes, positions and token ids in int32, and the models compute in float32.
MOST = 2**31 - 1
_MOST_FLOAT = float(np.finfo(np.float32).max)
# A config has an entry for each layer. The deepest transformer that was published has 1,000 (arXiv:2203.00555).
MOST_LAYERS = 10_000
_FROM_ZERO = {
    "initializer_range",
    "linear_a_log_min",
    "max_window_layers",
    "mscale",
    "mscale_all_dim",
    "no_rope_layers",
    "full_attn_idxs",
}
_FROM_ZERO |= {"router_aux_loss_coef", "router_z_loss_coef", "mlp_only_layers", "llama_4_scaling_beta"}
_FROM_ZERO |= {"num_kv_shared_layers", "hidden_size_per_layer_input", "partial_rotary_factor"}
_ABOVE_ONE = {"rope_theta", "rope_local_base_freq"}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def fixed_fields(model_type: str, **others: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Fields of config.json that a family's config lacks: the values that its model supports, the written one first."""
    return {"model_type": (model_type,), "hidden_act": ("silu", "swish"), "is_causal": (None, True), **others}


def short(value: Any) -> str:
    """A value as text for a message; long values are cut."""
    return _short.repr(value)


def problems(config_type: type, values: Mapping[str, Any]) -> list[str]:
    """Finds wrong values for the fields of a config.

    Returns a clause for each wrong value: its name, the value, and what it must be.
    """
    hints = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type) if field.name in values]
    return [problem for name in names for problem in _problems_of(name, values[name], _kinds(hints[name]))]


def normal(config_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts numbers to Python's int and float, and to float where a field does not take an int; lists to tuples."""
    hints, changed = typing.get_type_hints(config_type), {}
    for name, value in values.items():
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            kind = float if int not in _kinds(hints[name]) or not isinstance(value, numbers.Integral) else int
            changed |= {} if type(value) is kind else {name: kind(value)}
        elif isinstance(value, list | tuple) and (items := _items(_kinds(hints.get(name)))):
            normal_items = tuple(value if items == (str,) else map(items[0], value))
            changed |= {} if value is normal_items else {name: normal_items}
    return changed


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _items(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """The type of a list's items, if a list is among these types."""
    return next((typing.get_args(kind)[:1] for kind in kinds if typing.get_origin(kind) is tuple), ())


def _problems_of(name: str, value: Any, kinds: tuple[Any, ...]) -> list[str]:
    if value is None and types.NoneType in kinds:
        return []
    is_of_kind, holds, law = _law(name, value, kinds)
    if is_of_kind and holds:
        inner = problems(type(value), vars(value)) if dataclasses.is_dataclass(value) else []
        return [f"{name}: {problem}" for problem in inner]
    kind = "" if is_of_kind else f" ({type(value).__name__})"
    return [f"{name}={short(value)}{kind} must be {law}{', or None' if types.NoneType in kinds else ''}"]


def _law(name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[bool, bool, str]:
    """Whether a value has the right type, whether it is in range, and the rule in words."""
    least = 0 if name in _FROM_ZERO else 1
    if bool in kinds:
        return isinstance(value, bool), True, "True or False"
    if float in kinds:
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        as_float = _as_float(value) if number else math.nan
        if name in _FROM_ZERO:
            return number, 0 <= as_float <= _MOST_FLOAT, "a finite float32 of at least 0"
        bound = 1 if name in _ABOVE_ONE else 0
        return number, bound < as_float <= _MOST_FLOAT, f"a finite float32 above {bound}"
    if int in kinds:
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST
        number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return number, number and least <= int(value) <= most, f"an int from {least} to {most}"
    classes = [kind for kind in kinds if isinstance(kind, type) and kind is not types.NoneType]
    if any(dataclasses.is_dataclass(kind) for kind in classes):
        return isinstance(value, tuple(classes)), True, f"one of {', '.join(kind.__name__ for kind in classes)}"
    if (items := _items(kinds)) != (str,):
        laws = [_law(name, item, items) for item in value] if isinstance(value, list | tuple) else [(False, False, "")]
        _, _, law = _law(name, least, items)
        return all(kind for kind, _, _ in laws), all(holds for _, holds, _ in laws), f"a list, each item {law}"
    strings = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return strings, True, "a list of strings"


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int of hundreds of digits
        return math.inf
