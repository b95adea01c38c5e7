"""Keys and values that layers share: the last layers make none, and take those of an earlier layer of their type.

    owner(type)     the last layer of the type among the first L − N layers, which hands its keys and values on
    layer i ≥ L − N     attention of its own queries to the keys and values of owner(its type)

Keys have their norm and rotation already. In generation the cache holds none of the last N layers
(arXiv:2405.12981 shares keys between neighbours; here all of a type share one layer's).
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from liger_jax.models.core.config import LlamaConfig

_STORED, _SHARED = "_stored", "_shared"  # ends of kinds of attention: whose keys later layers take, and those layers


def type_of(attention: str) -> str:
    """The type of layers with a kind of attention."""
    return attention.removesuffix(_STORED).removesuffix(_SHARED)


@dataclasses.dataclass(frozen=True)
class SharedKeysConfig(LlamaConfig):
    """The fields of families whose layers share keys and values, beside `LlamaConfig`'s.

    Args:
        num_kv_shared_layers: the number of layers at the end that do not compute keys and values: each uses those of
            the last layer of its type before them.
        use_double_wide_mlp: whether the feed-forward of these layers has twice `intermediate_size`.
    """

    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False

    layers_differ: ClassVar[bool] = True
    own_type: ClassVar[str] = "full_attention"  # of layers of one kind: their type
    is_stored: ClassVar[bool] = False  # and whether later layers take their keys

    @property
    def cached(self) -> tuple[int, int, int]:
        """The layers that make keys, and the sizes of these."""
        layers, heads, width = super().cached
        return layers - self.num_kv_shared_layers, heads, width

    @property
    def feed_forward_width(self) -> int:
        """The width of a dense feed-forward; twice as wide in layers that make no keys, if they say so."""
        is_double = self.use_double_wide_mlp and self.takes_keys_of is not None
        return (1 + is_double) * super().feed_forward_width

    @property
    def _first_shared(self) -> int:
        return self.num_hidden_layers - self.num_kv_shared_layers

    def _owner(self, layer_type: str) -> int:
        """The last layer of a type that has keys."""
        types = (self.layer_types or ())[: self._first_shared]
        return len(types) - 1 - types[::-1].index(layer_type)

    def attention_of(self, i: int) -> str:
        """The layer's type, and whether its keys are used by later layers, or are those of an earlier layer."""
        own = super().attention_of(i)
        if i >= self._first_shared:
            return own + _SHARED
        return own + _STORED if self.num_kv_shared_layers and i == self._owner(own) else own

    def of_layers(self, attention: str) -> LlamaConfig:
        """The config of layers with a kind of attention, which says whose keys they take."""
        own = type_of(attention)
        config = copy.copy(super().of_layers(own))
        takes_keys_of = self._owner(own) if attention.endswith(_SHARED) else None
        config._set(own_type=own, is_stored=attention.endswith(_STORED), takes_keys_of=takes_keys_of)
        return config

    def window_of(self, layer_type: str) -> int | None:
        """The window of the layer's type."""
        return super().window_of(type_of(layer_type))

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        types, first = self.layer_types or (), self._first_shared
        if first < 1 or {*types[first:]} - {*types[:first]}:
            yield (
                f"num_kv_shared_layers={self.num_kv_shared_layers} must leave a layer of each type to layers before "
                "those that share its keys"
            )
