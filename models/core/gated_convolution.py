"""A short causal convolution of each channel between two gates, in place of attention.

    a, b, v = projections of x        y = output projection(b · convolution(a · v))

Its state for the tokens that follow are the last products a · v that the convolution sees.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from liger_jax import ops
from liger_jax.models.core.cache import LayerCache
from liger_jax.models.core.linear_attention import Convolution, last_tokens
from liger_jax.models.core.row_tokens import RowTokens, TokensInOrder
from liger_jax.models.core.tiles import over_tokens

CONVOLUTION = "conv"  # the type of such layers in config.json


class GatedConvolution(nnx.Module):
    """The convolution of a layer with its gates and its projections, by their names in a checkpoint."""

    def __init__(self, blocks: Any, taps: int, *, use_bias: bool = False):
        self.kernels, self.remat, width = blocks.kernels, blocks.remat, blocks.config.hidden_size
        self.conv = Convolution(blocks, width, taps, use_bias=use_bias)
        self.in_proj = blocks.linear(width, 3 * width, use_bias=use_bias)
        self.out_proj = blocks.linear(width, width, use_bias=use_bias)

    def __call__(
        self, x: Float[Array, "B T D"], rows: RowTokens | None, cache: LayerCache | None = None
    ) -> Float[Array, "B T D"]:
        layout, in_order = self.kernels.mesh_layout, None if rows is None else rows.in_order
        tokens = None if cache is None else cache.recurrent_states()[1]
        bias = None if self.conv.bias is None else self.conv.bias[...]
        project = lambda layers, tile: layers[0](tile)
        projected = over_tokens(project, (self.in_proj,), x, self.remat, layout)
        split, weights = (projected, in_order, tokens), (self.conv.taps[...][:, 0], bias)
        y, tokens = layout.run(_mixed, split, weights, spec=layout.of_rows)  # of rows, which are whole on each device
        if cache is not None:
            cache.write_recurrent(None, tokens)
            return self.out_proj(y)
        return over_tokens(project, (self.out_proj,), y, self.remat, layout)


def _mixed(projected, rows, tokens, taps, bias):
    """The gated convolution (B, T, D), and the last products that it saw, (B, W − 1, D)."""
    rows = TokensInOrder(None, None, None, None) if rows is None else rows
    before, after, values = jnp.split(projected, 3, axis=-1)
    x = rows.in_order(before * values)
    if rows.is_token is not None:  # padding is 0, as what is before a row
        x = jnp.where(rows.is_token[..., None], x, 0)
    y, state = ops.causal_conv1d(x, taps, bias, segment_ids=rows.documents, state=tokens)
    if rows.is_token is not None:
        state = last_tokens(x, tokens, rows.is_token, taps.shape[1] - 1)
    return after * rows.in_place(y), state
