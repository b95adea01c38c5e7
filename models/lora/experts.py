"""Adapters of the experts of a mixture: how they are added, switched and merged."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from liger_jax.models.core.experts import ExpertWeights
from liger_jax.models.core.parameters import parameter
from liger_jax.models.hugging_face.adapter_targets import names_parameter
from liger_jax.models.lora.linear import scale_of
from liger_jax.models.lora.whole import whole_like


class Weight(NamedTuple):
    """A weight of all experts, of one layer or of stacked ones."""

    holder: ExpertWeights  # the module that holds it
    name: str  # its name there
    names: tuple[str, ...]  # what PEFT calls it in each layer, such as "model.layers.0.mlp.experts.gate_up_proj"
    # The names of its tensors in a checkpoint, for each layer; without their own experts, one.
    of_each: tuple[tuple[str, ...], ...]
    stacked: bool  # whether it has an axis of layers
    interleaved: bool  # whether columns of gate and up take turns in a checkpoint

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, in, out)."""
        return getattr(self.holder, self.name).shape[self.stacked :]

    @property
    def adapter(self) -> tuple[Any, Any]:
        """The variables of A and B, where it has an adapter."""
        return getattr(self.holder, f"{self.name}_lora_a"), getattr(self.holder, f"{self.name}_lora_b")

    @property
    def is_adapted(self) -> bool:
        """Whether it has an adapter, on or off."""
        return self.name in self.holder.adapted

    @property
    def rank(self) -> int:
        """The adapter's."""
        return getattr(self.holder, f"{self.name}_lora_a").shape[-1]

    @property
    def alpha(self) -> float:
        """The adapter's."""
        return getattr(self.holder, f"{self.name}_lora_alpha")

    @property
    def rslora(self) -> bool:
        """Whether the scale is alpha/√rank."""
        return getattr(self.holder, f"{self.name}_lora_scale") != scale_of(self.rank, self.alpha, False)


def weights_of(model: nnx.Module) -> list[Weight]:
    """The weights of experts in a model, each layer's gate and up before down."""
    weights = []
    for path, holder in nnx.iter_graph(model):
        if not isinstance(holder, ExpertWeights):
            continue
        for name in holder.names:
            shape = getattr(holder, name).shape
            info = parameter((*path, name), shape)
            layers = shape[0] if info.stacked else 1
            count = len(info.tensor_names) // layers
            of_each = tuple(info.tensor_names[i * count : (i + 1) * count] for i in range(layers))
            # transformers calls Mixtral's block "mlp" since its experts are one parameter.
            blocks = (own[0].partition(".experts.")[0].replace("block_sparse_moe", "mlp") for own in of_each)
            peft = tuple(f"{block}.experts.{name.removesuffix('_proj')}_proj" for block in blocks)
            weights.append(Weight(holder, name, peft, of_each, info.stacked, info.interleaved))
    return weights


def check_parameters(caller: str, model: nnx.Module, parameters: Sequence[str]) -> None:
    """Raises a ValueError unless each of these names is, or ends, that of experts' weights in the model."""
    if isinstance(parameters, str):
        raise ValueError(f"{caller}: parameters={parameters!r} must be a list of names.")
    there = [name for weight in weights_of(model) for name in weight.names]
    if unknown := [end for end in parameters if not any(names_parameter([end], name) for name in there)]:
        has = sorted({name.rpartition(".")[2] for name in there})
        raise ValueError(
            f"{caller}: parameters={list(parameters)}: no weight of experts is called {unknown}. They are {has}."
        )


def add(
    caller: str,
    model: nnx.Module,
    own: Callable[[str], tuple[int, float | int] | None],
    *,
    rslora: bool,
    key: Key[Array, ""],
) -> list[Weight]:
    """Adds adapters to those weights of experts to which `own` gives rank and alpha, by PEFT's name, in place."""
    chosen = []
    for weight in weights_of(model):
        each = {own(name) for name in weight.names}
        if each == {None}:
            continue
        if len(each) > 1 or None in each:
            raise ValueError(
                f"{caller}: {weight.names[0]} must have adapters of the same rank and alpha in all layers, or in none. "
                "Name the weight without a layer's number."
            )
        rank, alpha = own(weight.names[0]) or (0, 0)
        count, in_width, out_width = weight.shape
        numbers = np.array([zlib.crc32(name.encode()) for name in weight.names], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        bound, shape = 1 / math.sqrt(in_width), (count, in_width, rank)
        drawn = functools.partial(jax.random.uniform, shape=shape, dtype=jnp.float32, minval=-bound, maxval=bound)
        a = jax.vmap(drawn)(keys)
        b = jnp.zeros((len(numbers), count, rank, out_width), jnp.float32)
        put(weight, *((a, b) if weight.stacked else (a[0], b[0])), alpha=float(alpha), rslora=rslora)
        chosen.append(weight)
    return chosen


def put(weight: Weight, a: Any, b: Any, *, alpha: float, rslora: bool) -> None:
    """Gives a weight of experts this adapter, whole on every device of the weight's mesh, in place."""
    like = jax.tree.leaves(getattr(weight.holder, weight.name)[...])[0]
    setattr(weight.holder, f"{weight.name}_lora_a", nnx.LoRAParam(whole_like(a, like)))
    setattr(weight.holder, f"{weight.name}_lora_b", nnx.LoRAParam(whole_like(b, like)))
    setattr(weight.holder, f"{weight.name}_lora_alpha", alpha)
    setattr(weight.holder, f"{weight.name}_lora_scale", scale_of(a.shape[-1], alpha, rslora))


def adapted(model: nnx.Module) -> list[Weight]:
    """The weights of experts that have adapters, on or off."""
    return [weight for weight in weights_of(model) if weight.is_adapted]


def switch(model: nnx.Module, on: bool) -> bool:
    """Lets the adapters of experts count or not, in place. Returns whether there are any."""
    weights = adapted(model)
    for weight in weights:
        weight.holder.adapters_on = on
    return bool(weights)


def merge(model: nnx.Module) -> None:
    """Adds the products of the experts' adapters to the weights, in place, and removes the adapters."""
    for weight in adapted(model):
        holder, name = weight.holder, weight.name
        variable, (a, b) = getattr(holder, name), weight.adapter
        dense, dtype = variable[...], variable[...].dtype
        merged = _merged(dense, a[...], b[...], getattr(holder, f"{name}_lora_scale"))
        setattr(holder, name, nnx.Param(merged.astype(dtype)))
        for end in ("a", "b", "alpha", "scale"):
            delattr(holder, f"{name}_lora_{end}")


@jax.jit
def _merged(weight, a, b, scale):
    """W + scale·A·B in float32, rounded to the weight's dtype, one layer after another."""

    def of_layer(arrays):
        weight, a, b = arrays
        product = jnp.einsum("eir,ero->eio", a, b, precision="highest")
        return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)

    return jax.lax.map(of_layer, (weight, a, b)) if a.ndim > 3 else of_layer((weight, a, b))
