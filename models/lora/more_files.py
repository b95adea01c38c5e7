"""What PEFT's files hold beside the adapters of projections: whole modules, biases, tokens, the head and the table."""

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from liger_jax.models.core.parameters import parameter
from liger_jax.models.hugging_face.adapter_config import AdapterConfig
from liger_jax.models.hugging_face.adapter_files import BASE, tensor_name
from liger_jax.models.hugging_face.weights import fetched
from liger_jax.models.lora import whole
from liger_jax.models.lora.linear import trained
from liger_jax.models.lora.outside import tables

Tensors = Mapping[str, np.ndarray]


def to_save(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields of `AdapterConfig` for what is trained beside adapters, and its tensors."""
    tensors, modules, biases = {}, [], []
    for path, variable in whole.wholes(model):
        info, holder = parameter(path, variable.shape), whole.holder_of(model, path)
        names = whole.tensor_names(model, path, variable.shape)
        values = fetched(variable[...])
        for name, value in zip(names, values if info.stacked else values[None], strict=True):
            tensors[tensor_name(name)] = np.ascontiguousarray(value.T if info.transposed else value)
        if path[-1] != "bias" or isinstance(getattr(holder, "kernel", None), whole.TrainedWeight):
            modules += [name.rpartition(".")[0] for name in info.tensor_names]
        else:
            biases.append(hasattr(holder, "lora_a"))
    tokens = {}
    for table in tables(model):
        if table.rows is not None:
            tensors[tensor_name(f"{table.name}.token_adapter.trainable_tokens_delta")] = fetched(table.rows.rows[...])
            tokens[table.weight] = list(table.rows.tokens)
        if table.adapter is not None:  # as PEFT saves it; the tensor counts where the vocabulary was changed
            tensors[tensor_name(f"{table.name}{BASE}")] = fetched(getattr(table.holder, table.weight)[...])
    bias = "none" if not biases else "lora_only" if all(biases) else "all"
    return dict(modules=sorted(set(modules)), tokens=tokens, bias=bias), tensors


def shapes(model: Any, config: AdapterConfig, adapted: Set[str], tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shapes that these tensors must have, by their names in the file."""
    expected = whole.expected(model, config.modules, config.tokens, config.bias, adapted)
    for table in tables(model):
        if table.name in adapted and tensor_name(f"{table.name}{BASE}") in tensors:
            expected[f"{table.name}{BASE}"] = (model.config.vocab_size, model.config.hidden_size)
    return {tensor_name(name): shape for name, shape in expected.items()}


def load(model: Any, config: AdapterConfig, tensors: Tensors) -> None:
    """Adds all this to a model whose adapters of the embedding and the head are there, in place."""
    for table in tables(model):
        if table.adapter is not None:
            for name, variable in trained(table.adapter).items():
                put(variable, tensors[tensor_name(table.name, name)].T)
            if (base := tensors.get(tensor_name(f"{table.name}{BASE}"))) is not None:
                weight = getattr(table.holder, table.weight)
                put(weight, base.astype(np.float32).astype(weight.dtype))


def load_whole(model: Any, config: AdapterConfig, tensors: Tensors) -> None:
    """Adds modules, biases and tokens to a model that has all its adapters, in place."""
    if not (config.modules or config.tokens or config.bias != "none"):
        return
    whole.train_more(model, modules=config.modules, tokens=config.tokens, bias=config.bias)
    for path, variable in whole.wholes(model):
        info = parameter(path, variable.shape)
        own = [tensors[tensor_name(name)] for name in whole.tensor_names(model, path, variable.shape)]
        put(variable, np.stack([each.T if info.transposed else each for each in own]))
    for table in tables(model):
        if table.rows is not None:
            put(table.rows.rows, tensors[tensor_name(f"{table.name}.token_adapter.trainable_tokens_delta")])


def put(variable: nnx.Variable, array: np.ndarray) -> None:
    """Gives a variable these numbers, on its own devices. Under `nnx.eval_shape` only shapes are asked for."""
    before = variable[...]
    array = array.reshape(before.shape).astype(before.dtype)
    variable[...] = jnp.asarray(array) if isinstance(before, Tracer) else jax.device_put(array, before.sharding)
