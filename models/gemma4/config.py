"""The architecture of Gemma 4's dense language models."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config_fields import short
from liger_jax.models.gemma.config import GemmaConfig
from liger_jax.ops import ProportionalRope, RopeScaling

_FULL, _SLIDING = "full_attention", "sliding_attention"
_STORED, _SHARED = "_stored", "_shared"  # ends of kinds of attention: whose keys later layers take, and those layers


@dataclasses.dataclass(frozen=True)
class Gemma4TextConfig(GemmaConfig):
    """The language model of Gemma 4: `LlamaConfig`'s fields with Hugging Face's defaults for Gemma 4, and these.

    `rope_theta` and `rope_scaling` are those of layers with full attention, `head_dim` and `num_key_value_heads` those
    of layers with windows.

    Args:
        global_head_dim: H of layers with full attention.
        num_global_key_value_heads: K of these layers if `attention_k_eq_v` is set; `None` for that of the other layers.
        attention_k_eq_v: whether these layers' values are their keys before norm and rotation.
        num_kv_shared_layers: the number of layers at the end that do not compute keys and values: each uses those of
            the last layer of its type before them.
        use_double_wide_mlp: whether the feed-forward of these layers has twice `intermediate_size`.
        hidden_size_per_layer_input: P: each layer has an additional input of P numbers per token, from a second
            embedding; 0 for none.
        vocab_size_per_layer_input: the vocabulary size of the second embedding.
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "sliding_attention" or "full_attention", where the last layer must have
            full attention; `None` for full attention in every sixth layer and the last.
        rope_local_base_freq: the rotary embedding's base in sliding layers.
        final_logit_softcapping: bound of the logits; `None` for none.

    Raises:
        ValueError: as `LlamaConfig`; or the last layer has a window, or layers share keys and no layer of their type
            before them computes keys.

    Example:
        >>> config = Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=6)
        >>> config.attention_of(5), config.attention_of(6)
        ('full_attention_stored', 'sliding_attention_shared')
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = ProportionalRope(0.25)
    rope_local_base_freq: float = 10000.0
    sliding_window: int | None = 512
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144

    norm_offset: ClassVar[float] = 0.0
    norms_results: ClassVar[bool] = True
    norms_values: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    attention_scale: ClassVar[float | None] = 1.0
    scales_full_layers: ClassVar[bool] = True
    nests_rope: ClassVar[bool] = True
    defaults_of_type: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma4_unified_text": dict(hidden_size_per_layer_input=0, sliding_window=1024, max_position_embeddings=262144),
    }
    layers_differ: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int | None] = 6

    @property
    def cached(self) -> tuple[int, int, int]:
        """The layers with keys, each padded to the width of the widest."""
        sizes = [self._heads(kind) for kind in {*(self.layer_types or ())}]
        return self._first_shared, 1, max(heads * width for heads, width in sizes)

    @property
    def _first_shared(self) -> int:
        return self.num_hidden_layers - self.num_kv_shared_layers

    def _heads(self, layer_type: str) -> tuple[int, int]:
        """K and H of layers of a type."""
        own, other = self.num_key_value_heads or self.num_attention_heads, self.num_global_key_value_heads
        if layer_type == _SLIDING:
            return own, self.head_dim or 0
        return other if other and self.attention_k_eq_v else own, self.global_head_dim

    def _owner(self, layer_type: str) -> int:
        """The last layer of a type that has keys."""
        types = (self.layer_types or ())[: self._first_shared]
        return len(types) - 1 - types[::-1].index(layer_type)

    def type_of_layer(self, i: int) -> str:
        """Every sixth layer and the last have full attention."""
        return _FULL if i == self.num_hidden_layers - 1 else super().type_of_layer(i)

    def attention_of(self, i: int) -> str:
        """The layer's type, and whether its keys are used by later layers, or are those of an earlier layer."""
        own = super().attention_of(i)
        if i >= self._first_shared:
            return own + _SHARED
        return own + _STORED if self.num_kv_shared_layers and i == self._owner(own) else own

    def of_layers(self, attention: str) -> "Gemma4TextConfig":
        """The config with the sizes of layers with a kind of attention."""
        own, shares = _type(attention), attention.endswith(_SHARED)
        heads, width = self._heads(own)
        wide = self.use_double_wide_mlp and shares
        sizes = dict(num_key_value_heads=heads, head_dim=width, intermediate_size=(1 + wide) * self.intermediate_size)
        config = dataclasses.replace(self, **sizes)
        config._set(
            own_type=own,
            is_stored=attention.endswith(_STORED),
            takes_keys_of=self._owner(own) if shares else None,
            shares_keys_with_values=self.attention_k_eq_v and own == _FULL,
        )
        return config

    def window_of(self, layer_type: str) -> int | None:
        """The window of the layer's type."""
        return super().window_of(_type(layer_type))

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding's base and scaling in layers of this type."""
        return (self.rope_local_base_freq, None) if _type(layer_type) == _SLIDING else super().rope_of(layer_type)

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
        types, first = self.layer_types or (), self._first_shared
        if first < 1 or {*types[first:]} - {*types[:first]}:
            yield (
                f"num_kv_shared_layers={self.num_kv_shared_layers} must leave a layer of each type to layers before "
                "those that share its keys"
            )
        if not isinstance(self.rope_scaling, ProportionalRope | None):
            yield f"rope_scaling={self.rope_scaling} must be a ProportionalRope or None"
        if types and types[-1] != _FULL:
            yield f"layer_types={short(types)} must end with 'full_attention'"
        for name in ("head_dim", "global_head_dim"):
            if (getattr(self, name) or 2) % 2:
                yield f"{name}={getattr(self, name)} must be even: RoPE rotates halves of a head"
        if self.num_attention_heads % self._heads(_FULL)[0]:
            yield f"num_global_key_value_heads={self.num_global_key_value_heads} must divide num_attention_heads"


def _type(attention: str) -> str:
    """The type of layers with a kind of attention."""
    return attention.removesuffix(_STORED).removesuffix(_SHARED)
