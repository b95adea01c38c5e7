"""The fields of a config with layers of linear attention."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from liger_jax.models.core.config import LlamaConfig
from liger_jax.models.core.linear_attention import LINEAR, LinearHeads


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(LlamaConfig):
    """The fields of families with layers of linear attention, beside `LlamaConfig`'s.

    Args:
        linear_conv_kernel_dim: the width of the convolution before linear attention, in tokens.
        linear_key_head_dim: the width of a head's queries and keys; `None` for 3/4 of `hidden_size` divided by the
            number of heads.
        linear_value_head_dim: the width of a head's values; `None` for twice that of keys.
        linear_num_key_heads: the heads of queries and keys in linear attention; `None` for `num_attention_heads`.
        linear_num_value_heads: the heads of values in linear attention, a multiple of those of keys; `None` for
            `num_attention_heads`.
        layer_types: the type of each layer, "linear_attention" or "full_attention"; `None` for the family's own.
    """

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    layer_types: tuple[str, ...] | None = None

    known_types: ClassVar[tuple[str, ...]] = (LINEAR, "full_attention")
    linear_allow_neg_eigval: ClassVar[bool] = False  # whether beta is in [0, 2] instead of [0, 1]

    @property
    def linear_heads(self) -> LinearHeads:
        """The heads of layers with linear attention."""
        keys = self.linear_num_key_heads or self.num_attention_heads
        width = self.linear_key_head_dim or int(0.75 * self.hidden_size / keys)
        return LinearHeads(
            keys,
            self.linear_num_value_heads or self.num_attention_heads,
            width,
            self.linear_value_head_dim or 2 * width,
            self.linear_conv_kernel_dim,
            doubles_beta=self.linear_allow_neg_eigval,
        )

    def _followers(self) -> dict[str, int]:
        heads = self.linear_heads
        return super()._followers() | dict(
            linear_num_key_heads=heads.key_heads,
            linear_num_value_heads=heads.value_heads,
            linear_key_head_dim=heads.key_width,
            linear_value_head_dim=heads.value_width,
        )

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if self.linear_heads.key_width < 1:
            yield "linear_key_head_dim must be given, since 3/4 of hidden_size is less than the heads of keys"
