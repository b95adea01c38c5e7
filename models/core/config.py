"""The config from which every family's config derives, and which is LLaMA's own."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core import config_fields
from liger_jax.models.core.experts import Experts
from liger_jax.models.core.gated_convolution import CONVOLUTION
from liger_jax.models.core.linear_attention import LINEAR, LinearHeads, RecurrentSizes
from liger_jax.ops import LongRope, RopeScaling


class _Followed(int):
    """A field's number that was derived from other fields, told by `is` from an equal number that was given."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The architecture, in Hugging Face's field names.

    A field that is `None` in the call is derived from other fields, and derived again by `dataclasses.replace`:
    replacing `num_attention_heads` changes `head_dim`, unless `head_dim` was given in either call.

    Args:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_hidden_layers: L.
        num_attention_heads: Q.
        num_key_value_heads: K, a divisor of Q; `None` for Q.
        head_dim: H, even; `None` for D/Q.
        max_position_embeddings: the longest sequence that the model accepts; `rope_scaling` may extend it.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: the rotary embedding's base.
        rope_scaling: the scaling of the rotary embedding for longer contexts than in training: a `LinearRope`,
            `DynamicRope`, `Llama3Rope`, `YarnRope` or `LongRope`, or `None`.
        tie_word_embeddings: whether the head is the embedding.
        initializer_range: standard deviation of the initial weights.
        logit_scale: a factor of the logits, in every result and loss. Cohere's config.json has this name; Granite's has
            the inverse, `logits_scaling`.
        attention_bias: whether the projections to queries, keys and values, and the output projection, have biases.
        mlp_bias: whether the three projections of the feed-forward have biases.

    Raises:
        ValueError: fields have a wrong type, are out of range or do not fit together, here and in the configs of other
            families; the message lists them all. A size is an int from 1 to 2³¹ − 1, and there are at most 10,000
            layers. Other numbers are finite and positive, and a base is more than 1.

    Example:
        >>> LlamaConfig(hidden_size=64, num_attention_heads=4).head_dim
        16
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    logit_scale: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    # The fields that were derived from others. It is not a field: dataclasses.replace takes it from the old config.
    _followed: dataclasses.InitVar[Mapping[str, Any] | None] = dataclasses.field(default=None, kw_only=True)

    never: ClassVar[tuple[str, ...]] = ()  # fields that are False in the family, whatever config.json says
    # LLaMA's values. Other families override them, by constants or by fields of their configs.
    qkv_bias: ClassVar[bool] = False
    fused_qkv: ClassVar[bool] = False  # one projection, qkv_proj, for queries, keys and values
    fused_gate_up: ClassVar[bool] = False  # one projection, gate_up_proj, for gate and up
    rope_layout: ClassVar[str] = "half"  # which columns of a head are rotated together, as `ops.apply_rope` has it
    partial_rotary_factor: ClassVar[float] = 1.0  # the share of a head's columns that is rotated, the first ones
    # Names in checkpoints: of the norms of queries and keys, of attention's last projection and of the last norm.
    qk_norm_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    output_name: ClassVar[str] = "o_proj"
    last_norm_name: ClassVar[str] = "norm"
    names_in_files: ClassVar[Mapping[str, str]] = {}  # of fields whose name in config.json is another
    older_names: ClassVar[Mapping[str, str]] = {}  # in config.json, of fields' names; they count before the others
    qk_norm: ClassVar[bool] = False
    qk_norm_is_wide: ClassVar[bool] = False  # whether it is one norm over all heads, and not one for each
    norms_rotated: ClassVar[bool] = False  # whether it is after the rotation, and not before it
    norm_offset: ClassVar[float] = 0.0
    norm_casting_mode: ClassVar[str] = "llama"
    gate: ClassVar[str] = "silu"
    norms_results: ClassVar[bool] = False  # whether the results of attention and feed-forward are normalised
    scales_full_layers: ClassVar[bool] = False  # whether rope_scaling belongs to layers with full attention alone
    gates_attention: ClassVar[bool] = False  # whether q_proj has a gate of each head's result beside its query
    nests_rope: ClassVar[bool] = False  # whether config.json has the rotary embedding of each type of layers by itself
    has_sinks: ClassVar[bool] = False  # whether attention's softmax has one more score per head, of no key
    embedding_scale: ClassVar[float | None] = None
    divides_logits: ClassVar[bool] = False  # whether config.json has 1/logit_scale, under the name logits_scaling
    attention_scale: ClassVar[float | None] = None  # 1/√H
    norms_values: ClassVar[bool] = False  # whether each head's values are normalised, without a scale
    shares_keys_with_values: ClassVar[bool] = False  # whether values are the keys before their norm
    takes_keys_of: ClassVar[int | None] = None  # the layer whose keys and values a layer takes, if it has none
    layers_differ: ClassVar[bool] = False  # whether a loop runs layers, which differ or hand on more than hidden states
    query_growth: ClassVar[tuple[float, int] | None] = None  # `beta` and `length` of `query_scale`, if it applies
    attn_logit_softcapping: ClassVar[float | None] = None
    final_logit_softcapping: ClassVar[float | None] = None
    sliding_window: ClassVar[int | None] = None
    sliding_window_pattern: ClassVar[int | None] = None  # n: every nth layer has full attention, and the others slide
    layer_types: ClassVar[tuple[str, ...] | None] = None  # each layer's type; an instance always has them
    known_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of layers that have one; `None` in dense families."""
        return None

    @property
    def linear_heads(self) -> LinearHeads | None:
        """The heads of layers with linear attention; `None` in families without such layers."""
        return None

    @property
    def recurrent_sizes(self) -> RecurrentSizes | None:
        """The sizes of the states of layers without keys, for each row; `None` in families without such layers."""
        return None if self.linear_heads is None else self.linear_heads.sizes

    @property
    def num_recurrent_layers(self) -> int:
        """The number of layers without keys, which have linear attention or a convolution."""
        return sum(kind in (LINEAR, CONVOLUTION) for kind in self.layer_types or ())

    @property
    def feed_forward_width(self) -> int:
        """The width of a dense feed-forward."""
        return self.intermediate_size

    @property
    def longest_sequence(self) -> int:
        """The longest sequence that the model accepts: `max_position_embeddings`, or more with a `rope_scaling`.

        A scaling extends it to factor · original_max_position_embeddings, or to factor · max_position_embeddings if it
        does not have the former number.
        """
        scaling, most = self.rope_scaling, self.max_position_embeddings
        if scaling is None:
            return most
        in_training = getattr(scaling, "original_max_position_embeddings", most)
        return max(most, int(scaling.factor * in_training))

    @property
    def rotary_width(self) -> int:
        """The number of columns of a head that are rotated."""
        return int((self.head_dim or 0) * self.partial_rotary_factor)

    @property
    def rope_changes_at(self) -> int | None:
        """The longest sequence for which a `LongRope` uses its short factors; beyond it, all use the long ones."""
        scaling = self.rope_scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRope) else None

    @property
    def cached(self) -> tuple[int, int, int]:
        """The number of layers whose keys a cache holds, and the number of heads and columns of each token's keys."""
        return self.num_hidden_layers - self.num_recurrent_layers, self.num_key_value_heads or 0, self.head_dim or 0

    def of_layers(self, attention: str) -> "LlamaConfig":
        """The config with the sizes of layers with a kind of attention.

        Args:
            attention: what `attention_of` returns.

        Returns:
            The config; unchanged in families whose layers have equal sizes.
        """
        return self

    def type_of_layer(self, i: int) -> str:
        """The type of a layer if `layer_types` is not given, from `sliding_window_pattern` or the same for all layers.

        Args:
            i: the layer's number.

        Returns:
            The type, "full_attention" or "sliding_attention".
        """
        pattern = self.sliding_window_pattern
        is_full = self.sliding_window is None if pattern is None else (i + 1) % pattern == 0
        return "full_attention" if is_full else "sliding_attention"

    def attention_of(self, i: int) -> str:
        """The kind of a layer's attention. Layers of one kind have the same window and the same rotary embedding.

        Args:
            i: the layer's number.

        Returns:
            The layer's type, or another name that the family defines. `window_of` and `rope_of` accept both.
        """
        return (self.layer_types or ())[i]

    def feed_forward_of(self, i: int) -> str:
        """The kind of a layer's feed-forward.

        Args:
            i: the layer's number.

        Returns:
            A key of `feed_forward.FEED_FORWARDS`.
        """
        return "dense"

    def window_of(self, layer_type: str) -> int | None:
        """The number of positions to which a position attends in layers of a kind, including itself.

        Args:
            layer_type: "full_attention" or "sliding_attention", or another result of `attention_of`.

        Returns:
            A number, or `None` for all earlier positions.
        """
        return self.sliding_window if layer_type == "sliding_attention" else None

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding in layers of a kind.

        Args:
            layer_type: "full_attention" or "sliding_attention", or another result of `attention_of`.

        Returns:
            Its base and its scaling; `None` if nothing is rotated.
        """
        return None if layer_type in (LINEAR, CONVOLUTION) else (self.rope_theta, self.rope_scaling)

    def __post_init__(self, _followed: Mapping[str, Any] | None):
        self._set(**{name: None for name, value in (_followed or {}).items() if getattr(self, name) is value})
        wrong, own_types = config_fields.problems(type(self), vars(self)), ()
        if not wrong:
            self._set(**config_fields.normal(type(self), vars(self)))
            own_types = tuple(map(self.type_of_layer, range(self.num_hidden_layers)))
            self._set(layer_types=tuple(self.layer_types or own_types))
            wrong = list(self._misfits())
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}.")
        follow = self._followers().items()
        followed: dict[str, Any] = {name: _Followed(n) for name, n in follow if getattr(self, name) is None}
        if self.layer_types == own_types:  # checkpoints spell them out
            followed["layer_types"] = self.layer_types
        self._set(**followed, _followed=followed)

    def _followers(self) -> dict[str, int]:
        """The values of fields that are `None` in the call."""
        heads = self.num_attention_heads
        return dict(num_key_value_heads=heads, head_dim=self.hidden_size // heads)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _misfits(self) -> Iterator[str]:
        """A clause for each pair of fields that contradict each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            yield (
                f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}, since query heads share key "
                "heads evenly"
            )
        if (linear := self.linear_heads) is not None and linear.value_heads % linear.key_heads:
            yield (
                f"linear_num_key_heads={linear.key_heads} must divide linear_num_value_heads={linear.value_heads}, "
                "since heads of values share those of keys evenly"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if self.head_dim is None and self.hidden_size % heads:
            yield f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}. Otherwise pass head_dim"
        elif head_dim % 2:
            yield f"head_dim={head_dim} must be even: RoPE rotates halves of a head"
        rotary = int(head_dim * self.partial_rotary_factor)
        if self.partial_rotary_factor > 1 or rotary < 2 or (rotary % 2 and head_dim % 2 == 0):
            yield (
                f"partial_rotary_factor={self.partial_rotary_factor} must be at most 1 and rotate an even number of "
                f"the head_dim={head_dim} columns, in halves"
            )
        scaling, most = self.rope_scaling, config_fields.MOST
        if isinstance(scaling, LongRope) and 2 * len(scaling.short_factor) != rotary:
            yield (
                f"rope_scaling has {len(scaling.short_factor)} factors, and must have one for each two of the {rotary} "
                "columns of a head that are rotated"
            )
        if scaling is not None:
            in_training = getattr(scaling, "original_max_position_embeddings", self.max_position_embeddings)
            if scaling.factor * in_training > most:
                yield f"rope_scaling={scaling} reaches more than the {most} positions that int32 counts"
        for name in self.never:
            if value := getattr(self, name):
                what = "False: this family has no such biases" if value is True else "None: no layer is dense"
                yield f"{name}={value} must be {what}"
        types, num_layers = self.layer_types or (), self.num_hidden_layers
        if len(types) != num_layers or not set(types) <= {*self.known_types}:
            yield (
                f"layer_types={config_fields.short(types)} must be a {' or '.join(map(repr, self.known_types))} for "
                f"each of num_hidden_layers={num_layers}. Pass None for the family's own"
            )
        if "sliding_attention" in types and self.sliding_window is None:
            yield "sliding_window=None must be positive, since layers slide"
