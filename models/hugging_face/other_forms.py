"""Tensors that files hold in another form than the model: under other names, in pieces, or several in one."""

from typing import Any

import numpy as np

_OLD_NAMES = {  # of OLMo Hybrid
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
_CONVOLUTIONS = tuple(f".linear_attn.{x}_conv1d.weight" for x in "qkv")
_CONVOLUTION = ".linear_attn.conv1d.weight"
_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class Joined:
    """Tensors one after another along their first axis. They are small."""

    def __init__(self, tensors: list[Any]):
        self.tensors = tensors

    def get_shape(self) -> list[int]:
        """The shape of all of them."""
        first, *others = (list(tensor.get_shape()) for tensor in self.tensors)
        return [first[0] + sum(other[0] for other in others), *first[1:]]

    def get_dtype(self) -> str:
        """By safetensors' name."""
        return self.tensors[0].get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.concatenate([tensor[:] for tensor in self.tensors])[index]


class OfExpert:
    """Some rows of one expert's matrix, in a tensor (E, rows, columns) of all experts."""

    def __init__(self, whole: Any, expert: int, first: int, rows: int):
        self.whole, self.expert, self.first, self.rows = whole, expert, first, rows

    def get_shape(self) -> list[int]:
        """The shape of these rows."""
        return [self.rows, self.whole.get_shape()[2]]

    def get_dtype(self) -> str:
        """By safetensors' name."""
        return self.whole.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = rows.indices(self.rows)
        own = slice(self.expert, self.expert + 1), slice(self.first + begin, self.first + end)
        return self.whole[(*own, *(columns or [slice(None)]))][0]


def as_in_models(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the names and in the shapes of models here."""
    return _experts_one_by_one(_with_joined_convolutions(tensors))


def _with_joined_convolutions(tensors: dict[str, Any]) -> dict[str, Any]:
    """OLMo Hybrid's: the convolution's three tensors as one, and the norms by their other names."""
    stems = [name.removesuffix(_CONVOLUTIONS[0]) for name in tensors if name.endswith(_CONVOLUTIONS[0])]
    if not stems:
        return tensors
    joined = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_NAMES.items():
            name = name.replace(old, new)
        joined[name] = tensor
    for stem in stems:
        convolutions = [joined.pop(stem + name, None) for name in _CONVOLUTIONS]
        joined[stem + _CONVOLUTION] = Joined([tensor for tensor in convolutions if tensor is not None])
    return joined


def _experts_one_by_one(tensors: dict[str, Any]) -> dict[str, Any]:
    """Qwen3.5's: gate and up of all experts (E, 2F, D), and down (E, D, F), as tensors of each expert."""
    of_experts = dict(tensors)
    for name in tensors:
        if name.endswith((_GATE_UP, _DOWN)) and f"{name}_bias" not in tensors:  # gpt-oss has biases
            whole, stem = of_experts.pop(name), name.rpartition(".")[0]
            count, rows, _ = whole.get_shape()
            names = ("gate_proj", "up_proj") if name.endswith(_GATE_UP) else ("down_proj",)
            width = rows // len(names)
            for e in range(count):
                for i, own in enumerate(names):
                    of_experts[f"{stem}.{e}.{own}.weight"] = OfExpert(whole, e, i * width, width)
    return of_experts
