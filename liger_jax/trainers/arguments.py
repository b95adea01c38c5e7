"""The arguments of a call (a model, rows and values), converted to the options of the command line."""

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import shutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax import _options
from liger_jax.models.hugging_face import source
from liger_jax.models.hugging_face.pretrained import Pretrained
from liger_jax.models.quantized import QuantizedParam
from liger_jax.trainers import result
from liger_jax.trainers.method import Method
from liger_jax.trainers.options import options_of
from liger_jax.trainers.other_words import ELSEWHERE, in_other_words, meant
from liger_jax.trainers.preference_losses import NAMES
from liger_jax.training import digests, identity, lock
from liger_jax.user_errors import Spelling, UserError, counted, in_python, of_option

GIVEN = ("model", "data", "eval_data", "out", "teacher", "reward")  # arguments of their own
OF_COMMANDS = ("distributed", "config", "no_cache")  # what only a command can do
_DTYPES = ("dtype", "param_dtype", "save_dtype")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Adapters that are trained instead of the weights, by the names of `models.lora.add_lora`.

    Attributes:
        rank: their rank.
        alpha: they are scaled by alpha/rank; `None` for twice the rank.
        targets: the modules with adapters: names such as `["q_proj", "v_proj"]`, "all-linear" or a regular expression;
            `None` for the seven projections of a layer.
        experts: whether the experts of a mixture get adapters, too.
        dropout: the probability with which an input of the adapters is dropped.
        rslora: whether they are scaled by alpha/√rank.
        dora: whether they are weight-decomposed, so that the norms of the weights' columns are trained, too.

    Example:
        >>> LoRA(16, targets=["q_proj", "v_proj"]).options()["lora_targets"]
        'q_proj,v_proj'
    """

    rank: int = 16
    _: dataclasses.KW_ONLY
    alpha: float | None = None
    targets: str | Sequence[str] | None = None
    experts: bool = False
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    def __new__(cls, *_: Any, **fields: Any):
        """Refuses a name that is no argument."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in (each for each in fields if each not in names):
            spelled = {f"--{each}": Spelling(each) for each in names}
            spelled |= {"--lora": Spelling("rank")} | {f"--lora-{each}": Spelling(each) for each in names}
            flag = f"--{name.replace('_', '-')}"
            hint = in_other_words(flag, [*spelled, "--fresh"]) or meant(flag, spelled)
            hint = in_python(hint, spelled) or f" There are {', '.join(names[:-1])} and {names[-1]}."
            raise TypeError(f"LoRA: {name} is no argument.{hint}")
        return super().__new__(cls)

    def options(self) -> dict[str, Any]:
        """The options of these adapters, by the names of a run's options."""
        targets: Any = self.targets
        if not isinstance(targets, str | None):
            if not isinstance(targets, Iterable) or not all(isinstance(each, str) for each in targets):
                raise TypeError(f"targets={targets!r} must be a text or a list of texts, the names of modules.")
            targets = ",".join(targets)
        return dict(
            lora=self.rank, lora_alpha=self.alpha, lora_targets=targets, lora_experts=self.experts,
            lora_dropout=self.dropout, rslora=self.rslora, dora=self.dora,
        )  # fmt: skip


_OF_LORA = tuple(LoRA().options())


def values_of(method: type[Method], adapters: LoRA | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run from the fields of a call, by name.

    Raises a `TypeError` for a name that is no option, and for a value of another type.
    """
    known = {_options.python_name(field): field for field in options_of(method).values()}
    names = [name for name, field in known.items() if field.name not in (*GIVEN, *OF_COMMANDS, *_OF_LORA)]
    taken = {*GIVEN, *(known[name].name for name in names)}  # as options or as arguments of their own
    for name in fields:
        if name in OF_COMMANDS:
            raise TypeError(f"{method.command}: {name} is an option of the command alone: liger-jax {method.command}.")
        if name in _OF_LORA:
            raise TypeError(f"{method.command}: {name} belongs to the adapters: pass adapters=trainers.LoRA(…).")
        if name not in names:
            flag, flags = f"--{name.replace('_', '-')}", [_options.flag(x) for x in known.values() if x.name in taken]
            if any(f"--{each.replace('_', '-')}" in ELSEWHERE.get(flag, ()) for each in _OF_LORA):
                raise TypeError(f"{method.command}: {name} belongs to the adapters: pass adapters=trainers.LoRA(…).")
            hint = in_other_words(flag, flags) or meant(flag, flags)
            raise TypeError(f"{method.command}: {name} is no option.{in_python(hint, spellings(method))}")
    if adapters is not None and not isinstance(adapters, LoRA):
        raise TypeError(f"{method.command}: adapters={adapters!r} must be a trainers.LoRA, as in adapters=LoRA(16).")
    values = dict(fields)
    if adapters is not None:
        usual = LoRA().options()
        values |= {name: x for name, x in adapters.options().items() if name == "lora" or x != usual[name]}
    return {known[name].name: _typed(known[name], value) for name, value in values.items() if value is not None}


def spellings(method: type[Method]) -> dict[str, Spelling]:
    """How a call spells the flags of a command."""
    own = {"lora": "adapters", "data": "rows", "reward": "rewards"}
    own |= {name: name.removeprefix("lora_") for name in _OF_LORA if name.startswith("lora_")}
    by_flag = _options.spellings(options_of(method).values(), own)
    if "--loss" in by_flag:
        by_flag["--loss"] = dataclasses.replace(by_flag["--loss"], choices=NAMES)
    return by_flag | {"--lora": Spelling("adapters", "LoRA({})"), "--tokenizer": Spelling("tokenizer")}


def stored(model: Any, tokenizer: Any, folder: Path, name: str = "model") -> str:
    """The path or id of a model. One in memory is written into a folder, where a later start finds it by its content.

    `name`: the argument's, in messages.
    """
    if isinstance(model, str | os.PathLike):
        return _path(model)
    if is_own(model):
        raise TypeError(
            f"{name} is {type(model).__name__}, a model of your own, which only finetune takes. Pass a folder, "
            "an id, or a model of liger_jax.models."
        )
    if not isinstance(model, Pretrained):
        if hasattr(model, "model") and hasattr(model, "metrics"):
            raise TypeError(f"{name} is the result of a run. Pass its model, or its folder.")
        raise TypeError(
            f"{name} is {type(model).__name__}, and must be a folder, an id, a model of liger_jax.models, or an NNX "
            "module with a method hidden_states(input_ids) and a head."
        )
    leaves = [variable for _, variable in nnx.iter_graph(model) if isinstance(variable, nnx.Variable)]
    if any(isinstance(variable, nnx.LoRAParam) for variable in leaves):
        raise ValueError(
            f"{name} has adapters already. Call models.lora.merge_lora({name}), or save them by save_adapters, and "
            "pass their folder to go on from them."
        )
    if any(isinstance(variable, QuantizedParam) for variable in leaves):
        raise ValueError(f"{name} is quantised in memory. Pass its folder or id, and quantize.")
    new = folder / f".{name}{_NEW}"
    with of_option("--tokenizer"):
        checkpoint = source.find(_path(tokenizer), weights=False)
    model.save_pretrained(new, tokenizer_from=checkpoint)
    written = source.Source(new)
    content = identity.of_whole_weights(new, written.weight_files) | identity.of_files(written.tokenizer)
    content["config"] = written.path.read_text()
    kept = folder / f"{_KEPT}{name}-{digests.of_json(content)[:12]}"
    if kept.exists():
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.rename(kept)
    return str(kept)


@contextlib.contextmanager
def copies_removed(folder: Path) -> Iterator[None]:
    """A context for a run. If it fails before its first checkpoint, the copies of its models are removed again."""
    was_there, before = folder.exists(), {*folder.glob(f"{_KEPT}*")}
    try:
        yield
    except BaseException as error:
        new = {*folder.glob(f"{_KEPT}*")} - before
        if not any((folder / result.CHECKPOINTS).glob("*")):
            for copy in new:
                shutil.rmtree(copy, ignore_errors=True)
            if not was_there and {path.name for path in folder.glob("*")} <= {lock.NAME}:
                shutil.rmtree(folder, ignore_errors=True)
        text, named = str(error), {str(copy): f"the {copy.name.split('-')[1]} in memory" for copy in new}
        if isinstance(error, UserError) and (found := [copy for copy in named if copy in text]):
            for copy in found:
                text = text.replace(copy, named[copy])
            raise UserError(text, error.in_python) from error.__cause__
        raise
    finally:
        for unfinished in folder.glob(f".*{_NEW}"):
            shutil.rmtree(unfinished, ignore_errors=True)


_KEPT, _NEW = "given-", ".new"  # what the folder of a model in memory is called, written and unfinished


def rewards_of(given: Any, weights: Sequence[float] | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Functions that score completions, or their names as the command takes them, with weights.

    Returns texts, as the command takes them; and the functions by their names in these.
    """
    given = [given] if callable(given) or isinstance(given, str) else given
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"rewards={given!r} must be functions that score completions.")
    given = list(given)
    if not given:
        raise ValueError("rewards is empty. Pass functions that score completions.")
    if weights is not None:
        if isinstance(weights, str) or not isinstance(weights, Iterable):
            raise TypeError(f"reward_weights={weights!r} must hold a number for each reward.")
        weights = list(weights)
        if wrong := [each for each in weights if not isinstance(each, numbers.Real) or isinstance(each, bool)]:
            raise TypeError(f"reward_weights holds {wrong[0]!r}, and must hold a number for each reward.")
        if endless := [each for each in weights if not math.isfinite(each)]:
            raise ValueError(f"reward_weights holds {float(endless[0])!r}, and must hold finite numbers.")
    if weights is not None and len(weights) != len(given):
        given_weights, of = counted(len(weights), "number"), counted(len(given), "reward")
        raise ValueError(f"reward_weights has {given_weights} for {of}. Pass one for each.")
    texts, functions = [], {}
    for i, reward in enumerate(given):
        if isinstance(reward, str):
            text = reward
        elif not callable(reward) or isinstance(reward, type):
            raise TypeError(f"rewards holds {reward!r}, and must hold functions, or objects that are called.")
        else:
            inner = reward.func if isinstance(reward, functools.partial) else reward
            owner = inner if hasattr(inner, "__qualname__") else type(inner)
            text = f"{owner.__module__}:{owner.__qualname__.rpartition('.')[2]}"
            if text in functions:
                name = owner.__qualname__.rpartition(".")[2]
                raise ValueError(
                    f"rewards has two functions {name!r}, whose figures would have the same name. Define one by def "
                    "under another name."
                )
            functions[text] = reward
        texts.append(text if weights is None else f"{text}={float(weights[i])!r}")
    return tuple(texts), functions


def is_own(model: Any) -> bool:
    """Whether a model is not of a family of ours, and has `hidden_states` and `head`."""
    is_ours, states = isinstance(model, Pretrained), getattr(model, "hidden_states", None)
    return isinstance(model, nnx.Module) and not is_ours and callable(states) and hasattr(model, "head")


def _path(given: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(given))


_CURES: dict[str | None, str] = dict.fromkeys(
    ("optimizer", "schedule", "learning_rate"), " An optimizer or a schedule of your own goes into training.make_step."
)


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value converted to the type of its option, from any type that means the same."""
    is_text, is_flag = isinstance(value, str), isinstance(value, bool | np.bool_)
    if field.name in _DTYPES and not is_text:
        with contextlib.suppress(TypeError):
            return jnp.dtype(value).name
    wanted: list[tuple[Any, str, bool, Callable[[Any], Any]]] = [
        (bool, "a bool", is_flag, bool),
        (int, "an int", isinstance(value, numbers.Integral) and not is_flag, int),
        (float, "a number", isinstance(value, numbers.Real) and not is_flag, float),
        (str, "a text", is_text, str),
    ]
    kinds = _options.kinds(field)
    of_kind = [each for each in wanted if each[0] in kinds]
    for _, _, is_right, made in of_kind:
        if is_right:
            return made(value)
    if not of_kind or any(typing.get_origin(kind) is not None for kind in kinds):  # several texts
        several = [value] if is_text or not isinstance(value, Iterable) else list(value)
        holds_numbers = any(float in typing.get_args(kind) for kind in kinds)
        if all(isinstance(each, numbers.Real if holds_numbers else str) for each in several):
            return tuple(map(float if holds_numbers else str, several))
        of_kind = [(tuple, "numbers" if holds_numbers else "a text or several", False, tuple)]
    name = "rank" if field.name == "lora" else _options.python_name(field).removeprefix("lora_")
    cure = _CURES.get(name, "") if callable(value) or isinstance(value, tuple) else ""
    raise TypeError(f"{name}={value!r} must be {' or '.join(each[1] for each in of_kind)}.{cure}")
