"""Gemma 4: Gemma 3 with inputs of each layer, keys that layers share, and wider heads in layers with full attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.decoder import Decoder
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.core.stream import Stream
from liger_jax.models.gemma4.config import Gemma4TextConfig


class Gemma4Layer(nnx.Module):
    """Gemma 2's layer, then h + norm(projection(gelu(gate(h))·own input)), and a factor of the whole."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.pre_feedforward_layernorm = blocks.norm()
        self.mlp = blocks.mlp()
        self.post_feedforward_layernorm = blocks.norm()
        config, width = blocks.config, blocks.config.hidden_size_per_layer_input
        self.type, self.is_stored = config.own_type, config.is_stored
        self.layer_scalar = nnx.Param(jnp.ones(1, blocks.param_dtype))
        if width:
            self.per_layer_input_gate = blocks.linear(config.hidden_size, width)
            self.per_layer_projection = blocks.linear(width, config.hidden_size)
            self.post_per_layer_input_norm = blocks.norm()

    def __call__(self, x: Stream, *attention_inputs) -> tuple[Stream, Aux]:
        hidden, own_inputs, keys = x
        normed, hidden = self.input_layernorm.fork(hidden)
        given = keys[self.type] if self.self_attn.owner is not None else None
        attended, own_keys = self.self_attn.with_keys(normed, *attention_inputs, given=given)
        normed, hidden = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(attended), hidden)
        fed, aux = self.mlp(normed)
        hidden = hidden + self.post_feedforward_layernorm(fed)
        if own_inputs:
            gated = self.mlp.gated(self.per_layer_input_gate(hidden), own_inputs[0])
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        hidden = hidden * jax.lax.stop_gradient(self.layer_scalar[...]).astype(hidden.dtype)  # which nobody trains
        return Stream(hidden, own_inputs[1:], keys | ({self.type: own_keys} if self.is_stored else {})), aux


class Gemma4Decoder(Decoder):
    """The decoder, which makes each layer's own inputs of the tokens and of their embeddings."""

    def __init__(self, config: Gemma4TextConfig, layer: Any, *, rngs: nnx.Rngs, **options: Any):
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
        """(norm(projection of the embeddings) + √P·the table's rows)/√2, for each layer."""
        if not self.own_width:
            return Stream(x)
        in_layers = lambda y: y.reshape(*y.shape[:2], -1, self.own_width)
        graph, state = nnx.split(self.per_layer_model_projection)
        projection = nnx.merge(graph, self.layout.gathered(state, self.dtype))
        projected = self.per_layer_projection_norm(in_layers(projection(x) * x.shape[-1] ** -0.5))
        rows = self.look_up(self.embed_tokens_per_layer[...], input_ids)
        own = (projected + in_layers(rows * jnp.asarray(self.own_width**0.5, rows.dtype))) * 2**-0.5
        return Stream(x, tuple(own[:, :, i] for i in range(own.shape[2])))


class Gemma4ForCausalLM(CausalLM):
    """Gemma 4 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Gemma4TextConfig`.

    Its layers differ, so they are always unrolled, whatever `scan_layers` says.

    Example:
        >>> import jax.numpy as jnp
        >>> config = Gemma4TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                           num_attention_heads=2, num_key_value_heads=1, head_dim=4, global_head_dim=8,
        ...                           hidden_size_per_layer_input=4, vocab_size_per_layer_input=32, sliding_window=4)
        >>> Gemma4ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Gemma4Layer
    decoder = Gemma4Decoder
    config_type = Gemma4TextConfig
    config_fixed = {
        "model_type": ("gemma4_text", "gemma4_unified_text"),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "enable_moe_block": (False, None),
        "use_bidirectional_attention": (None, "vision"),
        "is_causal": (None, True),
    }
