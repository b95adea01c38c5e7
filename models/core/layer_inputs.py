"""Inputs of each layer: P numbers per token that a layer takes beside the hidden states, and that are its own.

    inputs = (norm(projection(x)/√D) + √P · rows of a second table)/√2      of all layers, before the first
    h + norm(projection(activation(gate(h)) · own inputs))                  at the end of each layer

x are the embeddings (B, T, D), whose scale √D the projection takes back; the table has L·P columns, and the norm is of
each layer's P. The inputs are known as per-layer embeddings (https://ai.google.dev/gemma/docs/gemma-3n).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.decoder import Decoder
from liger_jax.models.core.stream import Stream


class LayerInputsDecoder(Decoder):
    """The decoder, which makes each layer's own inputs of the tokens and of their embeddings."""

    def __init__(self, config: Any, layer: Any, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, layer, rngs=rngs, **options)
        self.own_width = config.hidden_size_per_layer_input
        if self.own_width:
            made_by = {name: options[name] for name in ("kernels", "dtype", "param_dtype")}
            blocks = Blocks(config, **made_by, rngs=rngs)
            width = config.num_hidden_layers * self.own_width
            self.embed_tokens_per_layer = blocks.parameter(config.vocab_size_per_layer_input, width)
            self.per_layer_model_projection = blocks.linear(config.hidden_size, width)
            self.per_layer_projection_norm = blocks.norm(self.own_width)

    def stream(self, x: Float[Array, "B padded D"], input_ids: Integer[Array, "B T"]) -> Stream:
        """The embeddings with the inputs of each layer."""
        if not self.own_width:
            return Stream(x)
        in_layers = lambda y: y.reshape(*y.shape[:2], -1, self.own_width)
        graph, state = nnx.split(self.per_layer_model_projection)
        projection = nnx.merge(graph, self.layout.gathered(state, self.dtype))
        projected = self.per_layer_projection_norm(in_layers(projection(x) * x.shape[-1] ** -0.5))
        rows = self.look_up(self.embed_tokens_per_layer[...], input_ids)
        own = (projected + in_layers(rows * jnp.asarray(self.own_width**0.5, rows.dtype))) * 2**-0.5
        return Stream(x, tuple(own[:, :, i] for i in range(own.shape[2])))


class LayerWithInput(nnx.Module):
    """What a layer adds to its hidden states of its own input; nothing, where the config has none."""

    def make_input(self, blocks: Blocks) -> None:
        """Makes the projections and the norm, by their names in a checkpoint."""
        width, own_width = blocks.config.hidden_size, blocks.config.hidden_size_per_layer_input
        if own_width:
            self.per_layer_input_gate = blocks.linear(width, own_width)
            self.per_layer_projection = blocks.linear(own_width, width)
            self.post_per_layer_input_norm = blocks.norm()

    def add_input(
        self, hidden: Float[Array, "B T D"], own_inputs: tuple[Float[Array, "B T P"], ...], gated: Callable[..., Any]
    ) -> Float[Array, "B T D"]:
        """Adds the first of the inputs of the layers to come; `gated` is activation(gate)·input."""
        if not own_inputs:
            return hidden
        weighted = gated(self.per_layer_input_gate(hidden), own_inputs[0])
        return hidden + self.post_per_layer_input_norm(self.per_layer_projection(weighted))
