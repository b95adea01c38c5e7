"""Heads of another width in layers with full attention, whose values may be their keys.

    a layer with a window           K key heads of H columns: `num_key_value_heads` and `head_dim`
    a layer with full attention     heads of `global_head_dim` columns, and in place of v_proj maybe v = k_proj(x)

The values are then the keys before their norm and their rotation. The cache pads keys to the widest layer's.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config import LlamaConfig
from liger_jax.models.core.config_fields import short

_FULL = "full_attention"


@dataclasses.dataclass(frozen=True)
class WideHeadsConfig(LlamaConfig):
    """The fields of families whose heads differ between types of layers, beside `LlamaConfig`'s.

    `head_dim` and `num_key_value_heads` are those of layers with windows.

    Args:
        global_head_dim: H of layers with full attention.
        num_global_key_value_heads: K of these layers if `attention_k_eq_v` is set; `None` for that of the other layers.
        attention_k_eq_v: whether these layers' values are their keys before norm and rotation.
    """

    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False

    layers_differ: ClassVar[bool] = True

    @property
    def cached(self) -> tuple[int, int, int]:
        """The layers with keys, each padded to the width of the widest."""
        sizes = [self._heads(kind) for kind in {*(self.layer_types or ())}]
        return super().cached[0], 1, max(heads * width for heads, width in sizes)

    def _heads(self, layer_type: str) -> tuple[int, int]:
        """K and H of layers of a type."""
        own, other = self.num_key_value_heads or self.num_attention_heads, self.num_global_key_value_heads
        if layer_type != _FULL:
            return own, self.head_dim or 0
        return other if other and self.attention_k_eq_v else own, self.global_head_dim

    def of_layers(self, attention: str) -> LlamaConfig:
        """The config with the heads of layers of a type."""
        heads, width = self._heads(attention)
        config = dataclasses.replace(self, num_key_value_heads=heads, head_dim=width)
        config._set(shares_keys_with_values=self.attention_k_eq_v and attention == _FULL)
        return config

    @staticmethod
    def as_published(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The fields of a config.json in which transformers has listed the layers that differ."""
        given, values = values.get("per_layer_config"), {x: y for x, y in values.items() if x != "per_layer_config"}
        if given is None:
            return values, []
        types = values.get("layer_types") or []
        own = {int(i): fields for i, fields in given.items()}
        full = [own.get(i, {}) for i, kind in enumerate(types) if kind == _FULL]
        others = [i for i in own if not (i < len(types) and types[i] == _FULL)]
        if (
            others
            or not full
            or any(fields != full[0] or {*fields} - {"head_dim", "num_key_value_heads"} for fields in full)
        ):
            return values, [
                f"per_layer_config={short(given)} must say one head_dim and num_key_value_heads of full attention"
            ]
        heads = full[0].get("num_key_value_heads")
        width = full[0].get("head_dim", values.get("head_dim", 256))
        if heads is not None and not values.get("attention_k_eq_v"):
            return values, [
                f"per_layer_config={short(given)} must have other heads only where attention_k_eq_v is true"
            ]
        return values | {"global_head_dim": width, "num_global_key_value_heads": heads}, []

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if self.global_head_dim % 2:
            yield f"global_head_dim={self.global_head_dim} must be even: RoPE rotates halves of a head"
        if self.num_attention_heads % self._heads(_FULL)[0]:
            yield f"num_global_key_value_heads={self.num_global_key_value_heads} must divide num_attention_heads"
