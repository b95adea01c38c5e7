"""Names of transformers that are not ours: the error says which of ours does the same."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

ARGUMENTS = {
    "position_ids": "pass positions",
    "inputs_embeds": "pass input_ids; your own embeddings go through model.model(input_ids, inputs_embeds=…)",
    "output_hidden_states": "call model.hidden_states(input_ids) for those after the last norm",
    "output_attentions": "attention's weights are never held",
    "past_key_values": "pass cache=model.init_cache(batch, length)",
    "use_cache": "pass cache=model.init_cache(batch, length) to a call; generate has one always",
    "return_dict": "leave it out: the result has named fields",
    "num_items_in_batch": "pass loss_normalizer",
    "num_logits_to_keep": "pass logits_to_keep",
    "torch_dtype": "pass dtype for the computation, and param_dtype for the parameters, such as jnp.bfloat16",
    "device_map": "pass mesh and partition_specs",
    "attn_implementation": "pass kernels=KernelOptions(attention=…)",
    "quantization_config": 'pass quantize="nf4" or "int8"',
    "load_in_4bit": 'pass quantize="nf4"',
    "load_in_8bit": 'pass quantize="int8"',
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "low_cpu_mem_usage": "leave it out: parameters are read one after another",
    "gradient_checkpointing": 'pass remat="full" to the constructor or to from_pretrained',
    "do_sample": "pass temperature above 0 and a key; temperature=0 takes the likeliest token",
    "max_length": "pass max_new_tokens",
    "generator": "pass key=jax.random.key(0)",
}
ATTRIBUTES = {
    "num_parameters": "sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))",
    "parameters": "nnx.state(model, nnx.Param)",
    "named_parameters": "nnx.to_flat_state(nnx.state(model, nnx.Param))",
    "state_dict": "nnx.state(model)",
    "load_state_dict": "nnx.update(model, state)",
    "gradient_checkpointing_enable": 'remat="full", which the constructor and from_pretrained take',
    "get_input_embeddings": "model.model.embed_tokens",
    "get_output_embeddings": "model.head",
    "to": "jax.device_put, or dtype and param_dtype of from_pretrained",
    "cuda": "jax.device_put(nnx.state(model), jax.devices('gpu')[0])",
}


def refusing_foreign_names(function: _Function) -> _Function:
    """The function, which answers transformers' names of arguments with a TypeError that names ours."""
    foreign = ARGUMENTS.keys() - inspect.signature(function).parameters.keys()
    caller = {"__init__": "the constructor", "__call__": "the model's call"}.get(function.__name__, function.__name__)

    @functools.wraps(function)
    def checked(*args: Any, **arguments: Any) -> Any:
        for name in filter(foreign.__contains__, arguments):
            raise TypeError(f"{caller}: {name} is the name in transformers. Here {ARGUMENTS[name]}.")
        return function(*args, **arguments)

    return cast(_Function, checked)


def no_attribute(model: Any, name: str) -> AttributeError:
    """The error that a model has no attribute of this name; for one of transformers' it names ours."""
    message = f"{type(model).__name__!r} object has no attribute {name!r}"
    if name in ATTRIBUTES:
        message += f", which is transformers'. Here it is {ATTRIBUTES[name]}"
    return AttributeError(message + ".", name=name, obj=model)
