"""Weights of experts in MXFP4, as gpt-oss's checkpoints hold them, read as bfloat16: no number is rounded.

The tensor `<weight>_blocks` (E, out, in/32, 16) has two codes in a byte, the even one in the low bits. The tensor
`<weight>_scales` (E, out, in/32) has the exponent of each 32 values, plus 127. A value is

    w = code_book[code]·2^(scale − 127),   of a weight (E, in, out).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_BLOCKS, _SCALES = "_blocks", "_scales"
_BOOK = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SIZE, _BIAS = 32, 127  # values with one scale; of its exponent


def is_mxfp4(values: Mapping[str, Any]) -> bool:
    """Whether config.json says that the experts' weights are MXFP4."""
    given = values.get("quantization_config")
    return isinstance(given, dict) and given.get("quant_method") == "mxfp4"


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """A weight that is read like a safetensors slice: it has the weight's shape and numbers."""

    name: str  # the weight's, for messages
    blocks: Any  # a slice of the codes
    scales: Any  # a slice of the exponents

    def __post_init__(self):
        blocks, scales = (tuple(x.get_shape()) for x in (self.blocks, self.scales))
        kinds = self.blocks.get_dtype(), self.scales.get_dtype()
        if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _SIZE // 2 or kinds != ("U8", "U8"):
            raise ValueError(
                f"from_pretrained: the MXFP4 weight {self.name} has blocks of shape {blocks} and scales of shape "
                f"{scales}, of {kinds}, and must have (E, out, in/32, 16) and (E, out, in/32) of bytes."
            )

    def get_shape(self) -> list[int]:
        """The weight's shape (E, in, out)."""
        experts, outer, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * _SIZE, outer]

    def get_dtype(self) -> str:
        """The weight's dtype by safetensors' name."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of the weight, dequantised expert by expert."""
        experts, inner, outer = index
        numbers = range(*experts.indices(self.get_shape()[0]))
        return np.stack([self._expert(e, outer)[inner] for e in numbers])

    def _expert(self, e: int, outer: slice) -> np.ndarray:
        """Columns of one expert's weight (in, out)."""
        codes, scales = (x[e : e + 1, outer][0] for x in (self.blocks, self.scales))
        values = _BOOK[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*scales.shape, _SIZE)
        exponents = scales.astype(np.int32)[..., None] - _BIAS
        return np.ldexp(values, exponents).reshape(len(scales), -1).T.astype(jnp.bfloat16)


def with_dense_views(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors, in which one dequantised tensor replaces the two of each MXFP4 weight.

    Returns slices, and an `Mxfp4Tensor` for each such weight.
    """
    views = dict(tensors)
    for name in tensors:
        weight = name.removesuffix(_BLOCKS)
        if weight != name and weight + _SCALES in tensors:
            views[weight] = Mxfp4Tensor(weight, views.pop(name), views.pop(weight + _SCALES))
    return views
