"""Weights that bitsandbytes has quantised to nf4, whose codes are read unchanged, so that nothing is rounded again.

A weight (out, in) of such a checkpoint is a tensor of codes, two in a byte, the even one in the high bits. Beside it
stand the code book, the scales of blocks along the flattened weight, and a JSON object that names dtype and shape. With
double quantisation the scales are 8-bit codes, with their own code book, scales and offset. A value is

    w = dtype(code_book[code]·scale),   scale = nested_code_book[nested_code]·nested_scale + offset,

where every operation is in float32, as on GPUs and CPUs in bitsandbytes.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.config_fields import short
from liger_jax.models.core.parameters import ParameterInfo
from liger_jax.models.hugging_face import transfers
from liger_jax.ops.block_quantized import NF4, BlockQuantized
from liger_jax.ops.layout import full_spec

_STATE = ".quant_state.bitsandbytes__"
_ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", f"{_STATE}nf4")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors calls them


def problem(values: Mapping[str, Any]) -> str | None:
    """Why weights cannot be read that are quantised by config.json."""
    given = values.get("quantization_config")
    if not given:
        return None
    fields = given if isinstance(given, dict) else {}
    method = fields.get("quant_method")
    if fields.get("load_in_4bit") and method in (None, "bitsandbytes"):
        kind = fields.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' default
        if kind == "nf4":
            return None
        name = f"bitsandbytes' {kind}"
    elif fields.get("load_in_8bit") and method in (None, "bitsandbytes"):
        name = "bitsandbytes' int8"
    else:
        name = short(given if method is None else method)
    its = "its" if "bitsandbytes" in name else "bitsandbytes'"
    return f"quantization_config is {name}, and must be {its} nf4 or absent: take the model that it was made of"


@dataclasses.dataclass(frozen=True)
class Nf4Tensor:
    """A quantised weight that is read like a safetensors slice: it has the weight's shape, dtype and numbers."""

    name: str  # the weight's, for messages
    tensors: Mapping[str, Any]  # slices of codes, scales and their kin, by the ends of their names; the codes' is ""
    fields: Mapping[str, Any]  # the JSON object

    @property
    def block_size(self) -> int:
        """Values with one scale."""
        return self.fields["blocksize"]

    @property
    def dtype(self) -> str:
        """The weight's dtype by JAX's name."""
        return self.fields["dtype"]

    def get_shape(self) -> list[int]:
        """The weight's shape."""
        return list(self.fields["shape"])

    def get_dtype(self) -> str:
        """The weight's dtype by safetensors' name."""
        return _DTYPES[self.dtype]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A slice of the weight, after all of it is dequantised."""
        return self._dense[index]

    @property
    def _dense(self) -> np.ndarray:
        shape, codes, scales = self.get_shape(), self.codes(), self.scales()
        book, size = np.asarray(NF4, np.float32), math.prod(shape)
        values = book[np.stack([codes >> 4, codes & 15], -1).ravel()[:size]]
        return (values * np.repeat(scales, self.block_size)[:size]).astype(jnp.dtype(self.dtype)).reshape(shape)

    def codes(self) -> np.ndarray:
        """Bytes of two codes each, the even one in the high bits, in the flattened weight's order."""
        codes = self.tensors[""][:].reshape(-1).view(np.uint8)  # FSDP has them stored as floats
        return self._checked("codes", codes, (math.prod(self.get_shape()) + 1) // 2)

    def scales(self) -> np.ndarray:
        """One float32 for each block, in the flattened weight's order."""
        if not np.array_equal(self.tensors[".quant_map"][:], np.asarray(NF4, np.float32)):
            raise ValueError(f"from_pretrained: {self.name}.quant_map is not the code book of nf4.")
        scales = self.tensors[".absmax"][:]
        if ".nested_absmax" in self.tensors:
            book, outer = (self.tensors[end][:] for end in (".nested_quant_map", ".nested_absmax"))
            outer = np.repeat(outer, self.fields["nested_blocksize"])[: scales.size]
            self._checked("nested_absmax", outer, scales.size)
            scales = book[scales] * outer + np.float32(self.fields["nested_offset"])
        return self._checked("absmax", scales, -(-math.prod(self.get_shape()) // self.block_size)).astype(np.float32)

    def _checked(self, what: str, array: np.ndarray, size: int) -> np.ndarray:
        if array.size == size:
            return array
        raise ValueError(
            f"from_pretrained: {self.name} of shape {self.get_shape()} needs {size} {what}, not {array.size}."
        )


def with_dense_views(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint, in which a quantised weight and its scales are one `Nf4Tensor`."""
    views = dict(tensors)
    for name in [name for name in tensors if _STATE in name]:
        weight, _, kind = name.partition(_STATE)
        if kind != "nf4" or weight not in tensors:
            raise ValueError(f"from_pretrained: {weight} is bitsandbytes' {kind}; only nf4 is supported.")
        own = {end: views.pop(weight + end) for end in _ENDS if weight + end in views}
        own[""] = tensors[weight]
        views[weight] = Nf4Tensor(weight, own, _fields(weight, own))
    return views


def quantized_shapes(info: ParameterInfo, tensors: Mapping[str, Any]) -> BlockQuantized | None:
    """The shapes and dtypes of a parameter that keeps its codes.

    Returns a `BlockQuantized` of `jax.ShapeDtypeStruct`. `None` where it is read dense: it is no kernel, some of its
    layers are not quantised or differ in how they are, or its blocks are not within rows.
    """
    quantized = [tensors.get(name) for name in info.tensor_names]
    if info.kind != "kernel" or not all(isinstance(tensor, Nf4Tensor) for tensor in quantized):
        return None
    first, *others = [(tensor.get_shape(), tensor.dtype, tensor.block_size) for tensor in quantized]
    (width, inner), dtype, block_size = first
    if inner % block_size or any(other != first for other in others):
        return None
    layers = (len(quantized),) if info.stacked else ()
    return BlockQuantized(
        jax.ShapeDtypeStruct((*layers, inner // 2, width), jnp.uint8),
        jax.ShapeDtypeStruct((*layers, inner // block_size, width), jnp.float32),
        "nf4",
        -2,
        jnp.dtype(dtype),
    )


def read(info: ParameterInfo, like: BlockQuantized, tensors: Mapping[str, Any], sharding: Any) -> BlockQuantized:
    """Reads a parameter's codes and scales to its devices.

    `sharding`: how the dense kernel would be sharded; `None` for the default device. An axis that splits its input
    splits the codes' output, so that blocks stay whole.
    """
    quantized = [tensors[name] for name in info.tensor_names]
    if isinstance(sharding, NamedSharding):
        spec = [*full_spec(sharding.spec, like.codes.ndim)]
        if spec[-1] is None:
            spec[-2:] = [None, spec[-2]]
        sharding = NamedSharding(sharding.mesh, P(*spec))
    codes = _read(like.codes, [tensor.codes for tensor in quantized], sharding, _swapped)
    scales = _read(like.scales, [tensor.scales for tensor in quantized], sharding)
    return dataclasses.replace(like, codes=codes, scales=scales)


def _swapped(codes: Any) -> Any:
    """Bytes with the even code in the low bits."""
    return (codes << 4) | (codes >> 4)


def _read(
    like: Any, layers: list[Callable[[], np.ndarray]], sharding: Any, change: transfers.Change = None
) -> jax.Array:
    """The layers' arrays (out, in), transposed, and stacked if there is an axis of layers."""

    def slices(index):
        *stack, rows, columns = (slice(*axis.indices(size)) for axis, size in zip(index, like.shape, strict=True))
        own = tuple(slice(0, axis.stop - axis.start) for axis in (rows, columns))
        for place, layer in enumerate(layers[stack[0]] if stack else layers):
            values = layer().reshape(like.shape[:-3:-1])[columns, rows]
            yield (place, *own) if stack else own, values, True

    return transfers.placed(like.shape, like.dtype, slices, sharding, change)


def _fields(weight: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object beside a weight, checked."""
    try:
        fields = json.loads(bytes(tensors[f"{_STATE}nf4"][:]))
        problem = _problem_of(fields, tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fields, problem = {}, f"has a damaged quant_state ({type(error).__name__}: {error})"
    if problem:
        raise ValueError(f"from_pretrained: the nf4 weight {weight} {problem}.")
    return fields


def _problem_of(fields: dict[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """What is wrong with a weight's JSON object, or with its other tensors."""
    needed, sizes = {".absmax", ".quant_map"}, [fields["blocksize"], *fields["shape"]]
    if ".nested_absmax" in tensors:
        needed.add(".nested_quant_map")
        sizes.append(fields["nested_blocksize"])
        if not math.isfinite(fields["nested_offset"]):
            return "has no finite nested_offset"
    if absent := sorted(needed - tensors.keys()):
        return f"lacks {absent}"
    is_whole = all(type(size) is int and size > 0 for size in sizes) and len(fields["shape"]) == 2
    return None if is_whole and fields["dtype"] in _DTYPES else f"says {short(fields)}"
