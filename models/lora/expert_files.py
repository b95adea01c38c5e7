"""Adapters of the experts of a mixture in PEFT's files.

PEFT adapts the one parameter of a layer's experts, `target_parameters`, by matrices of all experts in one: A (E·rank,
in) with the experts' rows one after another, and B (out, rank·E) in which the experts take turns. Files from before
transformers 5 have matrices of each expert. There gate and up have their own ranks, and become one adapter of twice
the rank, whose B has zeros between gate's half and up's.
"""

import re
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax.models.hugging_face import adapter_files
from liger_jax.models.hugging_face.adapter_config import AdapterConfig
from liger_jax.models.hugging_face.adapter_targets import names_parameter
from liger_jax.models.hugging_face.weights import fetched, interleaved
from liger_jax.models.lora.experts import Weight, adapted, put, weights_of

_OF_ONE = re.compile(r"\.experts\.\d+\.")  # in names of tensors of one expert


def to_save(model: nnx.Module) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, float]]]:
    """The tensors of the experts' adapters by their names in the file, and rank and alpha by PEFT's names."""
    tensors, own = {}, {}
    for weight in adapted(model):
        a, b = (fetched(variable[...]) for variable in weight.adapter)
        a, b = (a, b) if weight.stacked else (a[None], b[None])
        b = b[..., np.argsort(interleaved(b.shape[-1]))] if weight.interleaved else b
        for i, name in enumerate(weight.names):
            module = _module(name, [each.name for each in adapted(model) if each.holder is weight.holder])
            tensors[adapter_files.tensor_name(module, "lora_a")] = np.ascontiguousarray(
                a[i].swapaxes(1, 2).reshape(-1, a.shape[-2])
            )
            tensors[adapter_files.tensor_name(module, "lora_b")] = np.ascontiguousarray(
                b[i].transpose(2, 1, 0).reshape(b.shape[-1], -1)
            )
            own[name] = weight.rank, weight.alpha
    return tensors, own


def _module(name: str, adapted_names: Sequence[str]) -> str:
    """PEFT's module of an adapter: `down_proj`'s is around that of `gate_up_proj`, where both have one."""
    module, _, weight = name.rpartition(".")
    return f"{module}.base_layer" if weight == "gate_up_proj" and len(adapted_names) > 1 else module


def parts_to_load(
    model: nnx.Module, config: AdapterConfig, tensors: Mapping[str, np.ndarray]
) -> tuple[dict[str, tuple[int, ...]], list["_Stored"]]:
    """The shapes of the tensors that a file must have for experts, and how they become adapters."""
    if any(map(_OF_ONE.search, tensors)):
        stored_weights = [_Stored(weight, config, tuple(tensors)) for weight in weights_of(model)]
        stored_weights = [stored for stored in stored_weights if stored.is_there]
    else:
        is_named = lambda weight: names_parameter(config.parameters, config.in_file(weight.names[0]))
        named = [weight for weight in weights_of(model) if is_named(weight)]
        of_holder = lambda holder: [weight.name for weight in named if weight.holder is holder]
        stored_weights = [_Stored(weight, config, tuple(tensors), of_holder(weight.holder)) for weight in named]
    return {name: shape for stored in stored_weights for name, shape in stored.shapes().items()}, stored_weights


class _Stored:
    """An adapter of experts as a file has it.

    `of_all`: the names of the holder's weights that have adapters; `None` where each expert has its own.
    """

    def __init__(
        self, weight: Weight, config: AdapterConfig, names: tuple[str, ...], of_all: Sequence[str] | None = None
    ):
        self.weight, self.config, self.names, self.of_all = weight, config, names, of_all

    def _modules(self, layer: int) -> list[str]:
        """The modules in the file of one layer's adapter."""
        if self.of_all is not None:
            return [_module(self.weight.names[layer], self.of_all)]
        return [name.removesuffix(".weight") for name in self.weight.of_each[layer]]

    @property
    def is_there(self) -> bool:
        """Whether the file has any of its tensors."""
        return any(adapter_files.tensor_name(module, "lora_a") in self.names for module in self._modules(0))

    def own(self) -> tuple[int, float]:
        """Rank and alpha of the adapter that it becomes."""
        if self.of_all is not None:
            each = {self.config.of(name) for name in self.weight.names}
        else:
            each = {self.config.of(module) for i in range(len(self.weight.names)) for module in self._modules(i)}
        if len(each) > 1:
            raise ValueError(
                f"load_adapters: the experts of {self.weight.names[0]} in all layers have ranks and alphas {each}, and "
                "must have the same. Merge the adapters in PEFT, and load the merged model."
            )
        ((rank, alpha),) = each
        joined = self._joined
        # Of twice the rank, and of the same scale.
        return rank * joined, alpha * (joined**0.5 if self.config.rslora else joined)

    @property
    def _joined(self) -> int:
        """How many tensors of each expert are one adapter."""
        return 1 if self.of_all is not None else len(self.weight.of_each[0]) // self.weight.shape[0]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, by their names."""
        count, in_width, out_width = self.weight.shape
        rank, joined = self.own()[0], self._joined
        a, b = (rank * count, in_width), (out_width, rank * count)
        if self.of_all is None:
            a, b = (rank // joined, in_width), (out_width // joined, rank // joined)
        modules = [module for i in range(len(self.weight.names)) for module in self._modules(i)]
        tensor_name = adapter_files.tensor_name
        return {tensor_name(m, name): shape for m in modules for name, shape in (("lora_a", a), ("lora_b", b))}

    def arrays(self, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A and B in float32, with an axis of layers if the weight has one."""
        each = [self._of_layer(i, tensors) for i in range(len(self.weight.names))]
        a, b = (np.stack(arrays) for arrays in zip(*each, strict=True))
        if self.weight.interleaved:
            b = b[..., interleaved(b.shape[-1])]
        return (a, b) if self.weight.stacked else (a[0], b[0])

    def _of_layer(self, layer: int, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        count, in_width, out_width = self.weight.shape
        rank, joined = self.own()[0], self._joined
        stored = [
            [tensors[adapter_files.tensor_name(module, name)].astype(np.float32) for name in ("lora_a", "lora_b")]
            for module in self._modules(layer)
        ]
        if self.of_all is not None:
            ((a, b),) = stored
            return a.reshape(count, rank, in_width).swapaxes(1, 2), b.reshape(out_width, rank, count).transpose(2, 1, 0)
        a = np.zeros((count, in_width, rank), np.float32)
        b = np.zeros((count, rank, out_width), np.float32)
        own_rank, columns = rank // joined, out_width // joined
        for i, (own_a, own_b) in enumerate(stored):
            expert, place = divmod(i, joined)
            own = slice(place * own_rank, (place + 1) * own_rank)
            a[expert, :, own], b[expert, own, place * columns : (place + 1) * columns] = own_a.T, own_b.T
        return a, b


def load(
    model: nnx.Module, config: AdapterConfig, weights: Sequence[_Stored], tensors: Mapping[str, np.ndarray]
) -> None:
    """Gives the experts of a model the adapters of a file, in place."""
    for stored in weights:
        a, b = map(jnp.asarray, stored.arrays(tensors))
        put(stored.weight, a, b, alpha=stored.own()[1], rslora=config.rslora)
