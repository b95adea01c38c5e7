"""Which modules of a model PEFT adapts, and what a pattern gives each: PEFT's rules for names."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from liger_jax.models.core.config_fields import short

ALL_LINEAR = "all-linear"
# A layer's projections in Llama and most other families. Phi-3 has qkv_proj and gate_up_proj in place of five of them.
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OUTSIDE = ("embed_tokens", "lm_head")  # what PEFT adapts beside the projections of layers
Value = TypeVar("Value")
_MOST_REPEATS, _MOST_CHOICES = 8, 40  # of an expression that is sure to end soon
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|*+]|\{\d*,?\d*\}|.", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Targets:
    """Which modules are adapted."""

    # PEFT's `target_modules`: names of modules, or ends of their names; or a regular expression for whole names; or
    # "all-linear" for all projections of layers.
    names: Sequence[str] | str
    excluded: Sequence[str] | str = ()  # `exclude_modules`, in the same forms; it takes precedence
    layers: Sequence[int] = ()  # the numbers of the layers that ends of names mean; none for all
    # What stands before a layer's number in names, regular expressions; none for any name.
    layers_pattern: Sequence[str] = ()
    saved: Sequence[str] = ()  # `modules_to_save`, which are never adapted

    def adapts(self, name: str) -> bool:
        """Whether PEFT gives this module an adapter.

        `name`: its name in a checkpoint, such as "model.layers.0.self_attn.q_proj".
        """
        if _is_named(self.excluded, name) or saves(self.saved, name):
            return False
        if self.names == ALL_LINEAR:
            return name.rpartition(".")[2] not in OUTSIDE
        if not _is_named(self.names, name):
            return False
        return not self.layers or isinstance(self.names, str) or name in self.names or self._number(name) in self.layers

    def _number(self, name: str) -> int | None:
        """The layer's number in a name: the first number, or the one after the first pattern that occurs."""
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        match = next((match for each in patterns if (match := re.match(each, name))), None)
        return None if match is None else int(match[1])


def split(names: Sequence[str] | str | None) -> tuple[bool, Sequence[str] | str]:
    """Whether names are those of all projections of layers, as `None` and all of `LAYER` are; and the other names."""
    if names is None:
        return True, ()
    if isinstance(names, str) or not {*LAYER} <= {*names}:
        return False, names
    return True, [name for name in names if name not in LAYER]


def saves(modules: Sequence[str], name: str) -> bool:
    """Whether PEFT trains this module, or a submodule of it, as a whole."""
    return any(re.match(rf"(^|.*\.){each}($|\..*)", name) for each in modules)


def names_parameter(targets: Sequence[str], name: str) -> bool:
    """Whether PEFT adapts a parameter by these `target_parameters`: its name, or an end of it.

    `name`: of the parameter, such as "model.layers.0.mlp.experts.gate_up_proj".
    """
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _is_named(names: Sequence[str] | str, name: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(f".{name}".endswith(f".{end}") for end in names)


def value_of(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    """What `rank_pattern` or `alpha_pattern` gives a module: the first of its expressions that matches counts.

    `patterns`: values by regular expressions for a name or for its end.
    """
    return next((value for each, value in patterns.items() if re.match(rf"(.*\.)?({each})$", name)), default)


def patterns_of(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]]:
    """The commonest of the modules' values, and a pattern by which `value_of` finds the others.

    Returns the default and the pattern, by the last components of names where all modules of that name agree.
    """
    all_values = list(values.values())
    default = max(all_values, key=all_values.count)
    ends: dict[str, set[Value]] = {}
    for name, value in values.items():
        ends.setdefault(name.rpartition(".")[2], set()).add(value)
    pattern: dict[str, Value] = {}
    for name, value in values.items():
        end = name.rpartition(".")[2]
        if value != default:
            pattern[end if len(ends[end]) == 1 else name] = value
    return default, pattern


def problems(field: str, names: Any) -> list[str]:
    """A clause if a value neither names modules nor is a regular expression."""
    if isinstance(names, str):
        problem = None if names == ALL_LINEAR else problem_of_expression(names)
        return [] if problem is None else [f"{field}={short(names)} {problem}"]
    if names is None or isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        return []
    return [f"{field}={short(names)} must be a list of names, or one regular expression"]


def problems_of_layers(layers: Any, layers_pattern: Any) -> list[str]:
    """Clauses for wrong values of `layers_to_transform` and `layers_pattern`."""
    wrong = []
    if any(type(layer) is not int or layer < 0 for layer in layers):
        wrong.append(f"layers_to_transform={short(list(layers))} must be numbers of layers")
    for each in layers_pattern:
        problem = (
            problem_of_expression(each) if isinstance(each, str) else "must be a regular expression, or a list of them"
        )
        if problem is not None:
            wrong.append(f"layers_pattern={short(each)} {problem}")
    return wrong


def problems_of_pattern(field: str, pattern: Any, is_value: Any, law: str) -> list[str]:
    """Clauses for wrong entries of `rank_pattern` or `alpha_pattern`."""
    if not isinstance(pattern, Mapping):
        return [f"{field}={short(pattern)} must hold values by names"]
    wrong = [
        f"{field}: {short(key)} {problem}" for key in pattern if (problem := problem_of_expression(key)) is not None
    ]
    return wrong + [f"{field}: {short({k: v})} must be {law}" for k, v in pattern.items() if not is_value(v)]


def problem_of_expression(expression: str) -> str | None:
    """Finds what is wrong with a regular expression from a file that anyone may have written.

    Python tries one way after another to match a name, and there may be more of them than anyone can wait for. That
    needs a repeated group with a choice or a repetition inside, or many repetitions in a row.
    """
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    # Of each open group; of the group that was closed last.
    has_choice, closed, repeats, choices, before = [False], False, 0, 0, ""
    for token in _TOKEN.findall(expression):
        if token == "(":
            has_choice.append(False)
        elif token in ("*", "+") or len(token) > 2 and token[0] == "{":
            if closed:
                return "may take too long: a repeated group has a choice or a repetition inside"
            has_choice[-1], repeats = True, repeats + 1
        elif token == "|":
            has_choice[-1], choices = True, choices + 1
        elif token == "?" and before not in ("(", "*", "+", "?") and before[-1:] != "}":
            has_choice[-1], repeats = True, repeats + 1
        inside = token == ")" and len(has_choice) > 1 and has_choice.pop()
        has_choice[-1] |= inside
        closed, before = inside, token
    is_long = repeats > _MOST_REPEATS or choices > _MOST_CHOICES
    return f"may take too long: it has {repeats} repetitions and {choices} choices" if is_long else None
