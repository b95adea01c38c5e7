"""Reads an architecture from config.json, as transformers 4 and 5 write it, and writes it again."""

import dataclasses
import json
import math
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from liger_jax.models.core import config_fields
from liger_jax.models.hugging_face import mxfp4, nf4, rope_fields

Config = TypeVar("Config")
DTYPES = ("float32", "bfloat16", "float16", "float64")
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")  # of a multimodal model
# transformers once split each product into so many slices, and does not read the field any more.
_UNREAD = ("pretraining_tp",)
_MAY_BE_NULL = ("attention_bias", "mlp_bias", "mlp_only_layers")  # for False, or for none


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint by `loads`."""
    return loads(path.read_bytes(), path)


def loads(content: bytes, path: pathlib.Path) -> dict[str, Any]:
    """Reads the content of a JSON file of a checkpoint, which anyone may have written.

    If a name occurs twice the last one counts, as in transformers.
    """

    def finite(kind):
        def number(text):
            if not math.isfinite(float(text)):
                raise ValueError(f"{config_fields.short(text)} is no finite float64")
            return kind(text)

        return number

    try:
        text = content.decode("utf8")
        values = json.loads(text, parse_float=finite(float), parse_int=finite(int), parse_constant=finite(float))
    except RecursionError:
        raise ValueError(f"{path} is nested too deep.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, {{…}}, and holds {config_fields.short(values)}.")
    return values


def language_part(values: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The fields of the language model; a multimodal config.json has them in `text_config`."""
    text = {} if values.get("text_config") is None else values["text_config"]
    if not isinstance(text, dict):
        raise ValueError(f"{path}: text_config={config_fields.short(text)} must be an object, {{…}}.")
    shared = values
    if text:
        shared = {name: values[name] for name in _OF_THE_WHOLE if name in values}
        if shared.get("tie_word_embeddings"):  # the whole model's head is what counts, and its files say if it differs
            text = text | {"tie_word_embeddings": True}
    fields = {**shared, **text}
    if not isinstance(fields.get("model_type"), str | None):
        raise ValueError(f"{path}: model_type={config_fields.short(fields['model_type'])} must be a string.")
    return fields


def dtype_of(values: Mapping[str, Any], path: pathlib.Path) -> str:
    """The dtype of a checkpoint's parameters, which transformers 4 calls `torch_dtype`."""
    name = "dtype" if values.get("dtype") is not None else "torch_dtype"
    dtype = "float32" if values.get(name) is None else values[name]
    dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
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

    `fixed`: for fields that `config_type` lacks, the values that the model supports; an absent field means the first.
    """
    defaults = getattr(config_type, "defaults_of_type", {}).get(values.get("model_type"), {})
    values = {**defaults, **values}
    values, problems_of_layers = getattr(config_type, "as_published", lambda values: (values, []))(values)
    in_files = {other: own for own, other in getattr(config_type, "names_in_files", {}).items()}
    others = {**getattr(config_type, "other_names", {}), **in_files}
    values = {own: values[other] for other, own in others.items() if other in values} | dict(values)
    older = getattr(config_type, "older_names", {})
    values |= {own: values[other] for other, own in older.items() if other in values}
    rope, wrong = rope_fields.read(values, config_type)
    wrong += problems_of_layers
    wrong += [
        f"{name}={config_fields.short(values[name])} must be {allowed[0]!r}"
        for name, allowed in fixed.items()
        if name in values and values[name] not in allowed
    ]
    never = getattr(config_type, "never", ())
    _say_what_is_passed_over(values, never)
    if not mxfp4.is_mxfp4(values) and (problem := nf4.problem(values)) is not None:
        wrong.append(problem)
    fields = {field.name for field in dataclasses.fields(config_type)}
    values = {name: value for name, value in values.items() if not (value is None and name in _MAY_BE_NULL)}
    taken = fields - rope_fields.NAMES - set(never)
    arguments = {name: value for name, value in values.items() if name in taken} | rope
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
        arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
        config: Any = config_type(**arguments)
        if layer_types and tuple(layer_types) != config.layer_types:
            own = config_fields.short(list(config.layer_types))
            raise ValueError(f"layer_types={config_fields.short(layer_types)} must be {own}.")
    except ValueError as error:
        reason = str(error).removeprefix(f"{config_type.__name__}: ")
        raise ValueError(f"{config_type.__name__} cannot be read from {source}: {reason}") from None
    return config


def write(config: Any, fixed: Mapping[str, tuple[Any, ...]], architecture: str, dtype: str) -> dict[str, Any]:
    """Makes the fields of config.json from a config; transformers 4 and 5 read them."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    scale = values.pop("logit_scale")
    if config.divides_logits:
        values["logits_scaling"] = float(f"{1 / scale:.15g}")  # the number whose inverse it was
    elif scale != 1.0:  # which no other family's config.json has
        values["logit_scale"] = scale
    if values.get("router_z_loss_coef") == 0.0:  # which is ours alone
        del values["router_z_loss_coef"]
    for name in config.never:
        del values[name]
    values = {config.names_in_files.get(name, name): value for name, value in values.items()}
    values |= rope_fields.write(values.pop("rope_scaling"), config.max_position_embeddings)
    if (beta := values.pop("llama_4_scaling_beta", None)) is not None:
        values["rope_scaling"]["llama_4_scaling_beta"] = beta
    local = getattr(config, "rope_local_base_freq", None) or config.rope_theta
    follows = config.scales_full_layers and type(config).rope_local_base_freq is None
    if config.nests_rope or follows:
        plain = {"rope_type": "default", "rope_theta": config.rope_theta}  # transformers 5 reads one base here alone
        full = plain | values.get("rope_scaling", {})
        values["rope_parameters"] = {"full_attention": full, "sliding_attention": plain | {"rope_theta": local}}
    if follows:
        del values["rope_local_base_freq"]
    if config.nests_rope:
        values = {name: value for name, value in values.items() if name not in rope_fields.NAMES}
    if "use_sliding_window" in values:  # where it is false transformers has no window, whatever layer_types says
        values["use_sliding_window"] |= "sliding_attention" in config.layer_types
    divisor = values.get("query_pre_attn_scalar")
    if divisor is not None and float(divisor).is_integer():  # transformers takes no float
        values["query_pre_attn_scalar"] = int(divisor)
    always = {name: allowed[0] for name, allowed in fixed.items() if allowed[0] is not None}
    return {"architectures": [architecture], "torch_dtype": dtype, **always, **values}


def more_fields(fields: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that a save adds to those of the model, if they are JSON that leaves the model as it is."""
    for name, value in fields.items():
        given = f"save_pretrained: config_fields={{{name!r}: {config_fields.short(value)}}}"
        try:
            same = json.loads(json.dumps(own.get(name, value), allow_nan=False)) == json.loads(
                json.dumps(value, allow_nan=False)
            )
        except (TypeError, ValueError):
            raise ValueError(f"{given} must be JSON: texts, finite numbers, booleans, None, lists and dicts.") from None
        if not same or (name == "dtype" and value != own["torch_dtype"]):
            held = config_fields.short(own.get(name, own["torch_dtype"]))
            raise ValueError(f"{given} contradicts the model, which has {held}. Leave it out.")
    return fields


def not_in_transformers(config: Any, model_type: str) -> list[str]:
    """Finds the fields of a written config that transformers does not compute or does not read."""
    clauses, scaling = [], config.rope_scaling
    if getattr(config, "router_z_loss_coef", 0.0):
        clauses.append(f"it leaves out router_z_loss_coef={config.router_z_loss_coef} of the loss")
    if config.logit_scale != 1.0 and not config.divides_logits:
        clauses.append(f"it leaves out logit_scale={config.logit_scale}: its logits are larger by 1/logit_scale")
    if getattr(scaling, "truncate", True) is False and config.scales_full_layers:
        clauses.append("it leaves out truncate=False of rope_scaling in this family")
    if model_type in ("llama", "gemma2", "gemma3_text") and config.hidden_size % config.num_attention_heads:
        heads = f"num_attention_heads={config.num_attention_heads}"
        clauses.append(f"it refuses hidden_size={config.hidden_size}, which {heads} does not divide")
    if model_type == "llama" and config.initializer_range > 1:
        clauses.append(f"it refuses initializer_range={config.initializer_range}, which is more than 1")
    own_width = config.hidden_size // config.num_attention_heads
    if model_type == "phi3" and scaling is not None and config.head_dim != own_width:
        clauses.append(f"it refuses rope_scaling beside head_dim={config.head_dim}, which is not D/Q={own_width}")
    if not float(getattr(config, "query_pre_attn_scalar", 1)).is_integer():
        clauses.append(f"it refuses query_pre_attn_scalar={config.query_pre_attn_scalar}, which is no int")
    return clauses


def _say_what_is_passed_over(values: Mapping[str, Any], never: tuple[str, ...]) -> None:
    """Warns, in one line, of fields that ask for something which transformers does not compute either."""
    asked = [name for name in _UNREAD if values.get(name) not in (None, 1)] + [
        name for name in never if values.get(name)
    ]
    if asked:
        shown = ", ".join(f"{name}={config_fields.short(values[name])}" for name in asked)
        warnings.warn(f"config.json: {shown} changes nothing, here as in transformers.", stacklevel=2)


def unapplied_dropout(values: Mapping[str, Any]) -> str | None:
    """The line that a command prints before it trains a model whose config.json has dropout, which is not applied."""
    if not (share := values.get("attention_dropout")):
        return None
    share = config_fields.short(share)
    return f"attention_dropout={share} of config.json is not applied: training here drops nothing of the attention"
