"""The memory of a training step, as far as it depends on the model: what a layer keeps, and what the loss may use.

All sizes are for one device. The rules are in `remat.py` (what a layer keeps), `feed_forward.py` (which op runs) and
`embedding.py` (how a tied head's gradient is summed). `liger_jax.planner` adds up these sizes.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.models.core.embedding import logit_options_of, sums_gradients, tied_head_dtype
from liger_jax.models.core.experts import EXPERTS, ExpertsFeedForward
from liger_jax.models.core.feed_forward import FEED_FORWARDS, may_fuse
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.layer_stack import kinds_of, modes_of
from liger_jax.models.core.remat import Remat, is_offloaded, mode_of_first
from liger_jax.models.core.tiles import tokens_at_once
from liger_jax.ops import attention
from liger_jax.ops.experts.grouped_matmul import KERNELS as GROUPED_PRODUCTS
from liger_jax.ops.gated_delta_rule import choose as choose_delta_rule
from liger_jax.ops.layout import pairs_of_chunks, sent_dtype
from liger_jax.ops.linear.plan import budget_beside_layers
from liger_jax.ops.place import Place
from liger_jax.pallas_kernels.attention import xla
from liger_jax.pallas_kernels.gated_delta_rule.config import CHUNK, TOKENS_A_STATE
from liger_jax.pallas_kernels.grouped_matmul.config import hopper_edge_bytes

LANES = 128  # of a row of a TPU's arrays
# Arrays (B, T, D) of whole rows that a layer's backward holds at once on a tensor axis: a sublayer's gathered input and
# the gradients of its input and of its result.
WHOLE_ROWS = 3
# Arrays of whole rows' keys or values that the backward of attention holds at once on a sequence axis: keys and values
# as they were gathered, and their gradients before they are scattered.
WHOLE_KEYS = 4

# Arrays that the backward of linear attention holds at once in float32: of all channels of its convolution, and of each
# two tokens of a chunk in XLA's rule. They are those of a step of 8 layers, 8 × 2,048 tokens, compiled for an H200.
ARRAYS_OF_CONVOLUTION, PRODUCTS_OF_CHUNK = {"xla": 6, "triton": 4, "mosaic_tpu": 6}, 16


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The memory of a layer in a training step."""

    config: Any  # the architecture
    kernels: KernelOptions  # the model's options
    remat: Remat  # what the layer keeps for the backward; for a number of layers `each` says what each of them keeps
    dtype: Any  # dtype of the computation
    rows: int  # sequences of one device and micro-batch
    seq: int  # tokens in a sequence, of which the device has its shard where a sequence axis splits them
    device: jax.sharding.AbstractDevice  # the device that the step runs on
    has_adapters: bool = False  # whether projections have adapters
    dora: bool = False  # whether these are DoRA's
    adapts_experts: bool = False  # whether experts have adapters or are quantised
    # The devices of a tensor axis. Between sublayers each has its shard of the positions; in them each has all
    # positions, and its shard of the heads and of the feed-forward's width.
    tensor: int = 1
    # The devices of a sequence axis. Each has chunks of every row, and in attention all keys and values.
    sequence: int = 1
    # The devices of an expert axis. Each has its experts, and computes them for the tokens of all.
    expert: int = 1
    trains_experts: bool = False  # whether the weights of experts have gradients
    is_recurrent: bool = False  # whether the layer has no keys, but linear attention or a convolution

    @property
    def each(self) -> list[tuple["LayerMemory", int]]:
        """The memory of a layer of each kind, and the number of such layers."""
        kinds = kinds_of(self.config)
        counts = collections.Counter(
            (kind.is_recurrent, mode) for kind, mode in zip(kinds, modes_of(kinds, self.remat), strict=True)
        )
        of = lambda kind, mode: dataclasses.replace(self, is_recurrent=kind, remat=mode)
        return [(of(*each), count) for each, count in counts.items()]

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that the layer keeps for its backward: "layer inputs", "attention" and "feed-forward"."""
        c, kept = self.config, self._values_kept()
        if self.remat == "none" and self.is_recurrent:
            kept["attention"] += self._rule_states() // (self.rows * self.seq * jnp.dtype(self.dtype).itemsize)
            if c.linear_heads is not None and self._rule() == "triton":
                kept["attention"] += c.recurrent_sizes.channels  # the arguments, without what is not finite
        if self.remat == "none" and self.device.platform == "tpu" and not self.is_recurrent:
            # Narrower heads of queries, keys and results are padded to a row, and each of attention's sums takes a row.
            padding = max(0, LANES - c.head_dim) * (2 * c.num_attention_heads + self._key_heads)
            kept["attention"] += padding + (LANES - 1) * self._sums()
        return {name: self._bytes(values) for name, values in kept.items()}

    @property
    def offloaded(self) -> int:
        """Bytes that the layer keeps for its backward in the host's memory: its inputs, and attention's results."""
        c = self.config
        has_result = self.remat == "offload_attention" and not self.is_recurrent
        of_attention = c.num_attention_heads * c.head_dim + self._sums() if has_result else 0
        return self._bytes(c.hidden_size + of_attention) if is_offloaded(self.remat) else 0

    @property
    def worked_on(self) -> int:
        """Bytes of the backward of one layer beside what is kept: the activations made again, and their gradients."""
        c, kept = self.config, self._values_kept()
        values = (7 if c.norms_results else 5) * c.hidden_size + self._values_of_heads()
        values += 2 * c.hidden_size  # gradients
        values += (self.tensor - 1) * WHOLE_ROWS * c.hidden_size
        if self.sequence > 1:
            values += self.sequence * WHOLE_KEYS * self._key_heads * c.head_dim
        values -= kept["layer inputs"] + kept["attention"]
        # A single GPU computes one half of the feed-forward's gradients after the other, in place. On several GPUs, and
        # where adapters read them, XLA holds both halves at once.
        in_place = self.device.platform == "gpu" and may_fuse(self.kernels, self.remat, scan=True)
        in_place, tokens = in_place and not self.has_adapters, self.rows * self.seq
        at_once = tokens if self.dora else tokens_at_once(tokens, c.hidden_size, self.remat, self.tensor)

        def bytes_of(one):
            if one is not FEED_FORWARDS[EXPERTS]:
                return self._bytes(one.values_in_backward(c, in_place) - kept["feed-forward"], at_once)
            where = dict(adapted=self.adapts_experts, devices=self.expert, tensor=self.tensor)
            held = self._bytes(one.values_in_backward(c, in_place, **where) - kept["feed-forward"])
            return held + self._edge_rows() + self._sums_of_parts()

        feed_forward = max(bytes_of(one) for one in _feed_forwards(c))
        if at_once < tokens:  # a loop over tiles writes its results beside what it reads; and RoPE's tables are long
            values += c.hidden_size
            feed_forward += 2 * 4 * c.rotary_width * self.seq
            if not self.has_adapters:  # tiles sum the weights' gradients in float32
                feed_forward += 4 * 3 * c.hidden_size * c.feed_forward_width // self.tensor
        if self.is_recurrent:
            return self._bytes(values) + max(feed_forward, self._rule_work())
        return self._bytes(values) + max(feed_forward, self._scores_in_chunks())

    def _values_of_heads(self) -> int:
        """The values of queries and keys, or of projections in a layer without keys, that the backward holds."""
        c = self.config
        if self.is_recurrent and c.linear_heads is None:
            return 3 * c.recurrent_sizes.channels
        if self.is_recurrent:
            return c.linear_heads.channels + 2 * c.linear_heads.values
        heads = (c.num_attention_heads + self._key_heads) * c.head_dim
        gates = c.num_attention_heads * c.head_dim if c.gates_attention else 0
        return (3 if c.qk_norm else 2) * heads + 2 * gates

    def _rule_states(self) -> int:
        """Bytes of the states of linear attention that XLA keeps; 0 for kernels, and for a convolution."""
        heads = self.config.linear_heads
        if heads is None or self._rule() != "xla":
            return 0
        of_row = -(-self.seq // TOKENS_A_STATE) * heads.value_heads * heads.key_width * heads.value_width
        return 4 * self.rows * of_row

    def _rule_work(self) -> int:
        """Bytes that the backward of a layer without keys holds beside what it projects: of a convolution and a rule.

        These are arguments, result and gradients of both, the convolution's taps and their gradients in float32, and,
        for the chunks of one kept state, their states and the products of a chunk's tokens with one another.
        """
        heads, tokens, channels = self.config.linear_heads, self.rows * self.seq, self.config.recurrent_sizes.channels
        wide = 4 * channels * tokens
        if heads is None:
            return self._bytes(3 * channels) + ARRAYS_OF_CONVOLUTION["xla"] * wide
        rule = self._rule()
        held = self._bytes(3 * channels + 2 * heads.values) + ARRAYS_OF_CONVOLUTION[rule] * wide
        of_state = heads.key_width * heads.value_width * heads.value_heads // CHUNK
        if rule == "triton":  # states and their gradients, finite arguments, and what launches hand on
            handed_on = channels + heads.value_heads * (2 * CHUNK + 4 * heads.value_width)
            return held + self._bytes(2 * of_state + handed_on)
        if rule == "mosaic_tpu":  # besides, the gradients by each head's q and k
            handed_on = heads.value_heads * (heads.key_width + CHUNK + 4 * heads.value_width)
            of_keys = 4 * 2 * heads.value_heads * heads.key_width
            return held + self._bytes(2 * of_state + handed_on) + of_keys * tokens
        at_once = self.rows * min(self.seq, TOKENS_A_STATE)
        chunks = 4 * at_once * (PRODUCTS_OF_CHUNK * CHUNK * heads.value_heads + 2 * of_state)
        return held + chunks + 2 * self._rule_states()

    def _rule(self) -> str:
        """The name of the implementation of the gated delta rule that the layer uses."""
        heads = self.config.linear_heads
        case = lambda *shape: jax.ShapeDtypeStruct((self.rows, self.seq, *shape), self.dtype)
        q, v = case(heads.key_heads, heads.key_width), case(heads.value_heads, heads.value_width)
        gate = case(heads.value_heads)
        return choose_delta_rule(q, q, v, gate, gate, None, Place(self.device), implementation=None).name

    def _values_kept(self) -> dict[str, int]:
        """What the layer keeps for its backward, by kind: values of the computation's dtype for each token."""
        c = self.config
        d, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, self._key_heads * c.head_dim
        # What is projected to; what is kept of attention's result. Gates are projections, too.
        projected, result = q + 2 * kv + (q if c.gates_attention else 0), q + self._sums()
        if self.is_recurrent and c.linear_heads is None:
            projected, result = 3 * c.recurrent_sizes.channels, 0
        elif self.is_recurrent:
            heads = c.linear_heads
            projected, result = heads.channels + heads.values + 2 * heads.value_heads, heads.values
        inputs, of_attention = {
            "full": (d, 0),
            "offload": (0, 0),
            "offload_attention": (0, 0),
            # the matrix products' results
            "dots": (d, projected + d),
            # with attention's queries and keys (rotated, or before their norms), values, result and sums
            "none": (d, projected + d + result),
        }[mode_of_first(self.remat)]
        where = lambda one: dict(devices=self.expert) if one is FEED_FORWARDS[EXPERTS] else {}
        of_feed_forward = max(one.values_kept(c, self.remat, **where(one)) for one in _feed_forwards(c))
        return {"layer inputs": inputs, "attention": of_attention, "feed-forward": of_feed_forward}

    def _edge_rows(self) -> int:
        """Bytes of the rows that the gradient of experts' weights takes copies of; 0 for one that takes none."""
        c, experts = self.config, self.config.experts
        if not self.trains_experts:
            return 0
        count, width = experts.count // self.expert, 2 * experts.width // self.tensor
        x = jax.ShapeDtypeStruct((self.rows * self.seq * experts.per_token, c.hidden_size), self.dtype)
        w = jax.ShapeDtypeStruct((count, c.hidden_size, width), self.dtype)
        choice = GROUPED_PRODUCTS.choose(self.kernels.implementation, x, w, place=Place(self.device))
        if choice.name != "mosaic_gpu":
            return 0
        return hopper_edge_bytes(count, c.hidden_size, width, jnp.dtype(self.dtype).itemsize)

    def _sums_of_parts(self) -> int:
        """Bytes that experts which several devices share hold for more rows than are computed at once.

        These are float32 sums of gradients, of the device's experts and of all tokens, beside half of the rows; 0 if
        they take less than the other half.
        """
        c, experts = self.config, self.config.experts
        if self.expert == 1:
            return 0
        weights = 3 * c.hidden_size * experts.width * experts.count // (self.expert * self.tensor)
        sums = 4 * ((weights if self.trains_experts else 0) + self.expert * self.rows * self.seq * c.hidden_size)
        of_rows = ExpertsFeedForward.values_of_rows(c, self.adapts_experts, self.expert, self.tensor)
        return max(0, sums - self._bytes(of_rows) // 2)

    def _sums(self) -> int:
        """Attention keeps a float32 sum for each head and token: their size in values of the computation's dtype."""
        return 4 * self.config.num_attention_heads // jnp.dtype(self.dtype).itemsize

    def _bytes(self, values: int, tokens: int | None = None) -> int:
        """Bytes of so many values for each token, of all tokens or as many as given."""
        tokens = self.rows * self.seq if tokens is None else tokens
        return tokens * jnp.dtype(self.dtype).itemsize * values // self.tensor

    @property
    def _queries(self) -> int:
        """The queries of a row that attention takes in one call: where devices share it, those of a chunk."""
        if self.sequence == 1:
            return self.seq
        return self.seq // (2 * pairs_of_chunks(self.seq * self.sequence, self.sequence))

    @property
    def _key_heads(self) -> int:
        """The heads of keys over all devices of a tensor axis, which repeats those that it does not divide."""
        heads = self.config.num_key_value_heads
        return heads * self.tensor // math.gcd(heads, self.tensor)

    def _scores_in_chunks(self) -> int:
        """Bytes of the scores that XLA's attention holds for a chunk of queries in the backward; 0 for a kernel."""
        c, row = self.config, self.seq * self.sequence
        windows = [w for w in {c.window_of(kind) for kind in c.layer_types} if self._attention_of(w) == "xla"]
        keys = max([min(row, xla.CHUNK + w - 1) if w else row for w in windows], default=0)
        scores = self.rows * (c.num_attention_heads // self.tensor) * min(xla.CHUNK, self._queries) * keys
        size = jnp.dtype(self.dtype).itemsize
        if self.device.platform != "tpu" or not windows:
            # Scores, weights and the gradients of both in float32, and the weights in the computation's dtype.
            return (4 * 4 + size) * scores
        # A TPU's compiler fuses what is between products: float32 scores, or their gradient, and the weights are left.
        # All keys, values and their gradients are in float32; on a sequence axis, as they were gathered, too.
        of_keys = 4 - size if self.sequence > 1 else 4
        keys = WHOLE_KEYS * self.rows * row * (self._key_heads // self.tensor) * c.head_dim
        return (4 + size) * scores + of_keys * keys

    def _attention_of(self, window: int | None) -> str:
        """The name of the attention implementation that layers with this window use on packed rows.

        On others cuDNN may run, and what it takes, the other kernels for the same GPU take too. So it is not asked: it
        would trace its own gradients for each estimate, and might not be installed here.
        """
        c, row = self.config, self.seq * self.sequence
        options = dict(window=window, softcap=c.attn_logit_softcapping, scale=c.attention_scale)
        heads, key_heads = c.num_attention_heads // self.tensor, self._key_heads // self.tensor
        q = jax.ShapeDtypeStruct((self.rows, self._queries, heads, c.head_dim), self.dtype)
        k = jax.ShapeDtypeStruct((self.rows, row, key_heads, c.head_dim), self.dtype)
        ids = jax.ShapeDtypeStruct((self.rows, row), jnp.int32)
        options |= dict(has_sinks=c.has_sinks, is_part=self.sequence > 1)
        return attention.choose(q, k, k, ids, Place(self.device), **options, implementation=self.kernels.attention).name


def _feed_forwards(config: Any) -> list[Any]:
    """The feed-forwards of a model's layers; where they differ, a layer is taken as one that needs most."""
    return [
        FEED_FORWARDS[kind] for kind in sorted({config.feed_forward_of(i) for i in range(config.num_hidden_layers)})
    ]


def values_in_forward(config: Any, expert: int = 1) -> int:
    """The values for each token that a forward without a backward holds at once in a layer: its input, its output, its
    normalised input and those of its feed-forward. `expert`: the devices that share a mixture's experts.
    """
    where = lambda one: dict(devices=expert) if one is FEED_FORWARDS[EXPERTS] else {}
    return 3 * config.hidden_size + max(one.values_in_forward(config, **where(one)) for one in _feed_forwards(config))


@dataclasses.dataclass(frozen=True)
class Head:
    """The head as the loss gets it."""

    table_dtype: Any  # dtype of the parameter that it is
    dtype: Any  # dtype in which it reaches the loss, and of its gradient there
    is_split: bool = False  # whether each device has a shard of it, which the loss gathers as it needs it

    @classmethod
    def of(cls, config: Any, table_dtype: Any, kernels: KernelOptions, *, is_frozen: bool, is_split: bool) -> "Head":
        """The head of a model that is trained."""
        is_summed = config.tie_word_embeddings and sums_gradients(kernels.mesh_layout.axes, is_frozen=is_frozen)
        return cls(table_dtype, tied_head_dtype(table_dtype) if is_summed else jnp.dtype(table_dtype), is_split)

    @property
    def is_widened(self) -> bool:
        """Whether it is a 16-bit table in float32."""
        return jnp.dtype(self.dtype) != jnp.dtype(self.table_dtype)

    def dtype_in_products(self, dtype: Any) -> Any:
        """The dtype in which the loss gets its numbers.

        Returns the head's own; for a split one that in which devices send it.
        """
        return sent_dtype(self.dtype, dtype) if self.is_split else self.dtype


def loss_budget_bytes(
    config: Any,
    kernels: KernelOptions,
    remat: Remat,
    dtype: Any,
    head: Head,
    sizes: tuple[int, int],
    device: Any,
    tensor: int = 1,
) -> int | None:
    """How much of a device's memory the fused loss may use."""
    if kernels.memory_budget_bytes is not None or kernels.mode != "auto":
        return kernels.memory_budget_bytes
    experts = config.experts
    return budget_beside_layers(
        *sizes,
        -(-config.vocab_size // tensor),
        f=(config.feed_forward_width if experts is None else experts.per_token * experts.width) // tensor,
        f_tokens=sizes[0] if experts is not None else tokens_at_once(sizes[0], config.hidden_size, remat, tensor),
        dtype=dtype,
        weight_dtype=head.dtype_in_products(dtype),
        weight_is_split=head.is_split,
        layers_are_recomputed=remat != "none",
        head_is_copied=not kernels.mesh_layout.axes and jnp.dtype(head.table_dtype) != jnp.dtype(dtype),
        head_is_widened=head.is_widened,
        implementation=kernels.implementation,
        device=device,
        **logit_options_of(config),
    )
