"""The decoder of every family, from token ids to hidden states: the embedding, the layers, the last norm."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.cache import KVCache, mixes_ropes, with_tokens
from liger_jax.models.core.embedding import embed, embed_tied, sums_gradients
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.layer_stack import Decoded, LayerStack, kinds_of
from liger_jax.models.core.parallel import tensor_layers
from liger_jax.models.core.parallel.vocabulary_shards import embed_shards
from liger_jax.models.core.query_scale import query_scale
from liger_jax.models.core.remat import Remat, mode_of_first
from liger_jax.models.core.row_tokens import RowTokens, TokensInOrder, attention_segments, tokens_of
from liger_jax.models.core.stream import Stream
from liger_jax.ops import Segments, rope_table
from liger_jax.ops.layout import sent_dtype
from liger_jax.ops.segment_ids import check_segment_ids, default_positions, numbered


class Decoder(nnx.Module):
    """Turns token ids into normalised hidden states."""

    def __init__(
        self,
        config: Any,
        layer: Callable[[Blocks], nnx.Module],
        *,
        kernels: KernelOptions,
        dtype: Any,
        param_dtype: Any,
        remat: Remat,
        scan_layers: bool,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype, self.layout = config, dtype, kernels.mesh_layout
        normal = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Param(normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))
        scan = scan_layers and not config.layers_differ
        of_layer = functools.partial(
            Blocks, kernels=kernels, dtype=dtype, param_dtype=param_dtype, remat=mode_of_first(remat), scan=scan
        )
        of_kind = lambda kind: dict(feed_forward=kind.feed_forward, is_recurrent=kind.is_recurrent)
        make_layer = lambda kind, rngs: layer(of_layer(config.of_layers(kind.attention), rngs=rngs, **of_kind(kind)))
        self.stack = LayerStack(kinds_of(config), scan, remat, kernels)
        self.layers, self.last_layers = self.stack.make(make_layer, rngs)
        setattr(self, config.last_norm_name, Blocks(config, kernels, dtype, param_dtype).norm())

    def embed(self, input_ids: Integer[Array, "B T"]) -> tuple[Float[Array, "B padded D"], Float[Array, "V D"]]:
        """Looks up the tokens' embeddings, and returns the table too, as the weight of a tied head.

        If a tensor axis does not divide the positions, the last token follows itself until it does.

        On one device the table's two gradients, as an embedding and as a head, are summed in float32 and rounded once.
        If the batch is split over several devices, each device sums the two gradients of its shard. The table is sent
        to the devices in the computation's dtype. Their sums come back and are added in that dtype, as for every
        matrix. If adapters are trained, the table is not, and the head is the table in its own dtype: a float32 copy of
        a bfloat16 table would serve nothing.
        """
        table = self.embed_tokens[...]
        is_frozen = bool(nnx.to_flat_state(nnx.state(self, nnx.LoRAParam)))
        if sums_gradients(self.layout.axes, is_frozen=is_frozen):
            return embed_tied(table, input_ids, self.dtype)
        if (tensor := self.layout.tensor_shards()) is not None:
            return embed_shards(tensor, table, tensor.padded(input_ids), self.dtype), table
        return self.look_up(table, input_ids), table

    def look_up(self, table: Float[Array, "V W"], input_ids: Integer[Array, "B T"]) -> Float[Array, "B T W"]:
        """The rows of a table of the vocabulary, in the computation's dtype, as the layout has tokens."""
        if not self.layout.axes:
            return embed(table, input_ids, self.dtype)
        sent = table.astype(sent_dtype(table.dtype, self.dtype))
        return self.layout.run(lambda ids, table: embed(table, ids, self.dtype), (input_ids,), (sent,))

    def stream(
        self, x: Float[Array, "B padded D"], input_ids: Integer[Array, "B T"]
    ) -> Float[Array, "B padded D"] | Stream:
        """The input of the first layer: the embeddings, or a `Stream` with them in families whose layers take more."""
        return x

    def run_layers(
        self,
        x: Float[Array, "B T D"] | Stream,
        inputs: Mapping[str, Sequence[Any]],
        cache: KVCache | None = None,
        dropout_words: UInt32[Array, "B T 2"] | None = None,
    ) -> Decoded:
        """Runs all layers.

        `inputs`: for each kind of attention, a layer's arguments after the hidden states. Returns hidden states before
        the last norm, the layers' sums over tokens, and the cache.
        """
        arguments = self.layers, self.last_layers, x, inputs
        if (tensor := self.layout.tensor_shards()) is None:
            return self.stack(*arguments, cache, dropout_words=dropout_words)
        tensor.check(self.config)
        return Decoded(*tensor_layers.run_layers(tensor, self.stack, *arguments, dropout_words, self.config), None)

    def __call__(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        inputs_embeds: Float[Array, "B padded D"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        dropout_words: UInt32[Array, "B T 2"] | None = None,
    ) -> Decoded:
        """Returns hidden states (B, T, D), the layers' sums over tokens, and the cache with the T tokens added.

        `inputs_embeds` are the embeddings that `embed` returns, if the caller has them already. `dropout_words` are
        those of the tokens, for the adapters that drop.
        """
        config, length, sequence = self.config, input_ids.shape[1], self.layout.sequence_shards()
        if sequence is not None:
            sequence.check_rows(length, positions, cache)
            sequence.check(config)
        if length >= config.longest_sequence + (1 if sequence is None else sequence.multiple):  # rows may be padded
            raise ValueError(
                f"input_ids has {length} positions, and this model accepts at most {config.longest_sequence} "
                f"(max_position_embeddings={config.max_position_embeddings}, rope_scaling={config.rope_scaling}). "
                "Shorten the sequence, or increase the config's field."
            )
        is_mixed = False
        if cache is not None:
            before = jnp.max(cache.positions)
            cache, order = with_tokens(cache, input_ids.shape, attention_mask)
            is_mixed = mixes_ropes(config.rope_changes_at, before, jnp.max(order))
            positions = jnp.maximum(order, 0) if positions is None else positions
        positions = default_positions(length, segment_ids) if positions is None else positions
        if sequence is not None:
            in_order = lambda x: None if x is None else sequence.whole_rows(x)
            segment_ids, attention_mask, token_mask = map(in_order, (segment_ids, attention_mask, token_mask))
        padded_behind = dict(segment_ids=segment_ids, token_mask=token_mask)
        padded_behind = {name: jnp.asarray(x).astype(jnp.int32) for name, x in padded_behind.items() if x is not None}
        for name, x in padded_behind.items():
            check_segment_ids(x, name=name)
        ids = attention_segments(segment_ids, attention_mask)
        is_token = tokens_of(segment_ids, attention_mask, token_mask) if config.experts is not None else None
        if (tensor := self.layout.tensor_shards()) is not None:
            if cache is not None:
                raise ValueError(
                    f"cache is given on a mesh with {tensor.size} devices along tensor={tensor.axis!r}, over which it "
                    "cannot be sharded. Generate on a mesh whose devices split the batch."
                )
            positions, ids = tensor.padded(positions), None if ids is None else tensor.padded(ids)
            is_token = tensor.padded_mask(is_token, input_ids) if config.experts is not None else None
            if dropout_words is not None:
                dropout_words = jnp.pad(dropout_words, ((0, 0), (0, -length % tensor.size), (0, 0)))
        segments = None if ids is None else Segments.of(ids)._replace(is_valid=None)  # the embeddings are NaN instead
        growth = config.query_growth
        scale = None if growth is None else query_scale(positions, *growth)
        in_order = None if not config.num_recurrent_layers else TokensInOrder.of(segment_ids, attention_mask)
        rows = RowTokens(segments, is_token, scale, in_order)
        inputs = {}
        for kind in dict.fromkeys(kind.attention for kind in self.stack.kinds):
            tables = None, None
            if (rope := config.rope_of(kind)) is not None:
                width = config.of_layers(kind).rotary_width
                tables = rope_table(positions, width, theta=rope[0], scaling=rope[1])
            inputs[kind] = (*tables, rows, config.window_of(kind))
        x = self.embed(input_ids)[0] if inputs_embeds is None else inputs_embeds
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, self.dtype)  # the scale rounded as in training
        for ids in padded_behind.values():
            x = x * numbered(ids).astype(x.dtype)[..., None]
        x, aux, cache = self.run_layers(self.stream(x, input_ids), inputs, cache, dropout_words)
        x = x.hidden if isinstance(x, Stream) else x
        last_norm = getattr(self, config.last_norm_name)
        if cache is None:
            hidden = last_norm(x)
            return Decoded(hidden if hidden.shape[1] == length else hidden[:, :length], aux, None)
        # Under jit no error can be raised for a cache that is too short or that mixes rotations, so the result is NaN.
        x = jnp.where((cache.length + length <= cache.positions.shape[1]) & ~jnp.asarray(is_mixed), x, jnp.nan)
        return Decoded(
            last_norm(x), aux, dataclasses.replace(cache, length=jnp.asarray(cache.length + length, jnp.int32))
        )
