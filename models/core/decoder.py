"""From token ids to hidden states in every family: the embedding, the stack of layers, the last norm."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.cache import KVCache, LayerCache, with_tokens
from liger_jax.models.core.embedding import embed, embed_tied
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import INPUT, POLICIES, Remat
from liger_jax.models.core.sharding import gathered, on_batch_shards
from liger_jax.ops import Segments, rope_table


class LayerStack(nnx.Module):
    """Runs layers whose parameters have equal shapes: by a scan over stacked parameters, or by a Python loop.

    Layers may be of several kinds, in a pattern that repeats. The scan goes over the pattern's repetitions, and the
    layers that are left over follow in a loop. Both ways start from the same random numbers. A scan compiles its body
    once; it holds the gradients of all layers until the optimizer runs.

    Args:
        make_layer: makes one layer from its `rngs`.
        kinds: the kind of each of the L layers.
        scan: stack the parameters along a leading axis and scan over it.
        remat: what a layer keeps for the backward. `"none"` keeps all but norms, gates and sums, which take one pass
            over memory to compute again; `"full"` only its input; `"dots"` its matrix products too; `"offload"` its
            input, in the host's memory.
        kernels: the model's options, for their `batch_axes`.
        rngs: source of the layers' keys.

    Raises:
        ValueError: `remat` is unknown.
    """

    layers: Any  # one layer with stacked parameters, or an nnx.List of layers
    rest: Any  # the layers after the stacked ones, by their numbers

    def __init__(
        self,
        make_layer: Callable[[nnx.Rngs], nnx.Module],
        kinds: Sequence[str],
        *,
        scan: bool,
        remat: Remat,
        kernels: KernelOptions = KernelOptions(),
        rngs: nnx.Rngs,
    ):
        if remat not in POLICIES:
            raise ValueError(f"remat={remat!r} must be one of {list(POLICIES)}.")
        keys = jax.random.split(rngs.params(), len(kinds))
        self.kinds, self.scan, self.remat, self.kernels = tuple(kinds), scan, remat, kernels
        if not scan:
            self.layers = nnx.List([make_layer(nnx.Rngs(key)) for key in keys])
            return
        stacked = len(kinds) - len(kinds) % max(pattern_length(self.kinds), 1)
        self.layers = nnx.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys[:stacked])
        self.rest = nnx.Dict({str(i): make_layer(nnx.Rngs(keys[i])) for i in range(stacked, len(kinds))})

    def __call__(
        self, x: Float[Array, "B T D"], inputs: Mapping[str, Sequence[Any]], cache: KVCache | None = None
    ) -> Any:
        """Runs the layers.

        Args:
            x: hidden states.
            inputs: for each kind of layer, its arguments behind the hidden states.
            cache: the key-value cache; each layer reads and writes its own part of it. `None` for no cache.

        Returns:
            Hidden states; with a cache these and the cache.
        """
        # Without a cache the scan carries hidden states alone.
        carry = (x, None if cache is None else (cache, jnp.zeros((), jnp.int32)))
        if self.scan:
            carry = self._scanned(carry, inputs)
            unrolled = [(i, self.rest[str(i)]) for i in sorted(map(int, self.rest))]  # nnx.Dict sorts by name
        else:
            unrolled = enumerate(self.layers)
        for i, layer in unrolled:
            graphdef, state = nnx.split(layer)
            carry = self._layer_call(graphdef, inputs[self.kinds[i]], prevent_cse=True)(carry, state)
        x, memory = carry
        return x if memory is None else (x, memory[0])

    def _layer_call(
        self, graphdef: Any, inputs: Sequence[Any], *, prevent_cse: bool, place: int | None = None
    ) -> Callable[[Any, Any], Any]:
        """A layer's call, which takes the layer's own state, or with a `place` the state of its group of layers."""

        def call(carry, state):
            x, memory = carry
            if place is not None:  # inside of the checkpoint, so that the slice is not kept for the backward
                state = jax.tree.map(lambda leaf: leaf[place], state)
            layer, x = nnx.merge(graphdef, gathered(state, self.kernels.batch_axes, x.dtype)), checkpoint_name(x, INPUT)
            if memory is None:
                return layer(x, *inputs), None
            cache, number = memory
            own = LayerCache(cache, number)
            x = layer(x, *inputs, own)
            return x, (own.cache, number + 1)

        if self.remat == "none" and "mosaic_tpu:interpret" in (self.kernels.implementation or ()):
            return call  # JAX's TPU interpreter has effects, which jax.checkpoint refuses
        return jax.checkpoint(call, prevent_cse=prevent_cse, policy=POLICIES[self.remat])

    def _scanned(self, carry: Any, inputs: Mapping[str, Sequence[Any]]) -> Any:
        pattern = self.kinds[: pattern_length(self.kinds)]
        graphdef, stacked = nnx.split(self.layers)
        # The scan's loop itself keeps the recomputation apart from the forward, so no barriers are needed.
        calls = [self._layer_call(graphdef, inputs[kind], prevent_cse=False, place=i) for i, kind in enumerate(pattern)]
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, len(pattern), *leaf.shape[1:]), stacked)

        def group(carry, states):
            for call in calls:
                carry = call(carry, states)
            return carry, None

        return jax.lax.scan(group, carry, groups)[0]


def pattern_length(kinds: Sequence[str]) -> int:
    """The length of the shortest pattern whose repetitions, the last perhaps cut short, give these kinds.

    Args:
        kinds: the kind of each layer.

    Returns:
        A number from 1 to `len(kinds)`.

    Example:
        >>> pattern_length("aabaabaa"), pattern_length("aab"), pattern_length("aaaa")
        (3, 3, 1)
    """
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


def attention_segments(
    segment_ids: Int[Array, "B T"] | None, attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """Makes padding a segment of its own, so that every token sees one at least: itself.

    Args:
        segment_ids: ids ≥ 0 of packed segments.
        attention_mask: 0 or False where a token is padding.

    Returns:
        The segments' ids, −1 for padding; `None` where all tokens are of one segment.

    Example:
        >>> attention_segments(None, jnp.array([[1, 1, 0]])).tolist()
        [[0, 0, -1]]
    """
    if attention_mask is None:
        return segment_ids
    return jnp.where(attention_mask.astype(bool), 0 if segment_ids is None else segment_ids, -1)


class Decoder(nnx.Module):
    """Token ids to normalised hidden states.

    Args:
        config: the architecture, a `LlamaConfig` or one that derives from it.
        layer: the family's layer, made from its `Blocks`.
        kernels: which ops run as kernels.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters.
        remat: what a layer keeps for the backward, as in `LayerStack`.
        scan_layers: whether `LayerStack` scans.
        rngs: source of all keys.
    """

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
        self.config, self.dtype, self.batch_axes = config, dtype, kernels.batch_axes
        normal = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Param(normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))
        make_layer = lambda rngs: layer(Blocks(config, kernels, dtype, param_dtype, rngs, remat, scan_layers))
        self.layers = LayerStack(
            make_layer,
            config.layer_types,
            scan=scan_layers,
            remat=remat,
            kernels=kernels,
            rngs=rngs,
        )
        self.norm = Blocks(config, kernels, dtype, param_dtype).norm()

    def embed(self, input_ids: Integer[Array, "B T"]) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        """The tokens' rows of the embedding, and the embedding as the weight of a tied head.

        On one device the two gradients are summed in float32 and rounded once. Where the batch is split over several
        devices, each sums its own, and the devices' sums meet in the parameter's dtype as all gradients do.
        """
        table = self.embed_tokens[...]
        if not self.batch_axes:
            return embed_tied(table, input_ids, self.dtype)
        look_up = lambda ids, table: embed(table, ids, self.dtype)
        return on_batch_shards(look_up, self.batch_axes, (input_ids,), (table,)), table

    def __call__(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        inputs_embeds: Float[Array, "B T D"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Hidden states (B, T, D); with a cache these and the cache with the T tokens in it.

        `inputs_embeds` are the rows that `embed` returns, for a caller that has them already.
        """
        config, length = self.config, input_ids.shape[1]
        if length > config.longest_sequence:
            raise ValueError(
                f"input_ids has {length} positions, and {config.longest_sequence} are the most that this model takes "
                f"(max_position_embeddings={config.max_position_embeddings}, rope_scaling={config.rope_scaling}). "
                "Shorten the sequence, or raise the config's field."
            )
        if cache is not None:
            cache, order = with_tokens(cache, input_ids.shape, attention_mask)
            positions = jnp.maximum(order, 0) if positions is None else positions
        positions = jnp.arange(length)[None] if positions is None else positions
        ids = attention_segments(segment_ids, attention_mask)
        segments = None if ids is None else Segments.of(ids)
        inputs = {}
        for kind in dict.fromkeys(config.layer_types):
            theta, scaling = config.rope_of(kind)
            cos, sin = rope_table(positions, config.head_dim, theta=theta, scaling=scaling)
            inputs[kind] = (cos, sin, segments, config.window_of(kind))
        x = self.embed(input_ids)[0] if inputs_embeds is None else inputs_embeds
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, self.dtype)  # rounded as it was in training
        if cache is None:
            return self.norm(self.layers(x, inputs))
        x, cache = self.layers(x, inputs, cache)
        # Under jit a cache that is too short shows itself as NaN.
        x = jnp.where(cache.length + length <= cache.positions.shape[1], x, jnp.nan)
        return self.norm(x), dataclasses.replace(cache, length=cache.length + length)
