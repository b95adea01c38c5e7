"""Linear attention by the gated delta rule: heads have a state that tokens read and write, in place of keys and values.

    q, k, v = silu(convolution(projections of x))       z, b, a = further projections of x
    gate = −exp(A_log) · softplus(a + dt_bias)          beta = sigmoid(b)
    y = output projection(gated norm(gated_delta_rule(q/‖q‖, k/‖k‖, v, gate, beta), z))

A family's class makes the projections by its checkpoints' names, and `projected` returns their results.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from liger_jax import ops
from liger_jax.models.core.cache import LayerCache
from liger_jax.models.core.remat import LINEAR_ATTENTION_OUTPUT, Remat
from liger_jax.models.core.row_tokens import RowTokens, TokensInOrder
from liger_jax.models.core.tiles import over_tokens

LINEAR = "linear_attention"  # the type of such layers in config.json
_EPS = 1e-6  # of the norms of queries and keys


class RecurrentSizes(NamedTuple):
    """The state of a layer without keys, for each row: its axes, and the taps and channels of its convolution."""

    state: tuple[int, int, int] | None  # heads, key width and value width; `None` for a convolution alone
    taps: int
    channels: int


@dataclasses.dataclass(frozen=True)
class LinearHeads:
    """The heads of a config's linear attention."""

    key_heads: int  # K, of queries and keys
    value_heads: int  # H, a multiple of K
    key_width: int
    value_width: int
    taps: int  # the tokens that the convolution sees
    doubles_beta: bool = False  # whether beta is up to 2, so that a state's component may change its sign

    @property
    def keys(self) -> int:
        """The width of all queries, or of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def sizes(self) -> RecurrentSizes:
        """The sizes of a layer's state for each row."""
        return RecurrentSizes((self.value_heads, self.key_width, self.value_width), self.taps, self.channels)


class Projected(NamedTuple):
    """The projections of tokens."""

    qkv: Float[Array, "B T C"]  # queries, keys and values, before the convolution
    z: Float[Array, "B T HE"]  # the gate of the output
    b: Float[Array, "B T H"]  # the logits of beta
    a: Float[Array, "B T H"]  # the input of the decay


class Convolution(nnx.Module):
    """The weights of a short convolution of each channel, in the shape of `torch.nn.Conv1d`."""

    def __init__(self, blocks: Any, channels: int, taps: int, *, use_bias: bool = False):
        self.taps = blocks.parameter(channels, 1, taps)
        self.bias = nnx.Param(jnp.zeros(channels, blocks.param_dtype)) if use_bias else None


class Scale(nnx.Module):
    """The scale of the norm of a head's output."""

    def __init__(self, width: int, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))


class LinearAttention(nnx.Module):
    """The gated delta rule of a layer, between its projections."""

    # By their names in a checkpoint.
    out: str = "out_proj"
    out_norm: str = "norm"

    def __init__(self, blocks: Any, eps: float | None = None):
        config = blocks.config
        self.heads: LinearHeads = config.linear_heads
        self.kernels = blocks.kernels
        self.remat: Remat = blocks.remat
        self.eps: float = config.rms_norm_eps if eps is None else eps
        self.conv1d = Convolution(blocks, self.heads.channels, self.heads.taps)
        dt_bias, decay = self.first_decays(blocks)
        self.dt_bias = nnx.Param(dt_bias.astype(blocks.param_dtype))
        self.A_log = nnx.Param(jnp.log(decay).astype(blocks.param_dtype))
        setattr(self, self.out_norm, Scale(self.heads.value_width, blocks.param_dtype))
        setattr(self, self.out, blocks.linear(self.heads.values, config.hidden_size))

    def first_decays(self, blocks: Any) -> tuple[jax.Array, jax.Array]:
        """dt_bias (H,) and exp(A_log) (H,) before training."""
        shape = (self.heads.value_heads,)
        drawn = jax.random.uniform(blocks.rngs.params(), shape, jnp.float32, minval=0.01, maxval=16.0)
        return jnp.ones(shape, jnp.float32), drawn

    def taps(self) -> Float[Array, "C W"]:
        """The weights of the convolution."""
        return self.conv1d.taps[...][:, 0]

    @abc.abstractmethod
    def projected(self, x: Float[Array, "B T D"]) -> Projected:
        """The projections of x."""

    def over_tokens(self, project: Any, layers: tuple[Any, ...], x: Float[Array, "B T D"]) -> Any:
        """`project(layers, x)`, over tiles of tokens where that saves memory."""
        return over_tokens(project, layers, x, self.remat, self.kernels.mesh_layout)

    def __call__(
        self, x: Float[Array, "B T D"], rows: RowTokens | None, cache: LayerCache | None = None
    ) -> Float[Array, "B T D"]:
        layout, in_order = self.kernels.mesh_layout, None if rows is None else rows.in_order
        state, tokens = (None, None) if cache is None else cache.recurrent_states()
        norm, out = getattr(self, self.out_norm), getattr(self, self.out)
        weights = self.taps(), self.A_log[...], self.dt_bias[...], norm.scale[...]
        # Arrays of rows, which are whole on each device.
        split = *self.projected(x), in_order, state, tokens
        y, state, tokens = layout.run(self._mixed, split, weights, spec=layout.of_rows)
        if cache is not None:
            cache.write_recurrent(state, tokens)
            return out(y)
        return self.over_tokens(lambda layers, tile: layers[0](tile), (out,), y)

    def _mixed(self, qkv, z, b, a, rows, state, tokens, taps, decay, dt_bias, scale):
        """The output (B, T, H·E), the state after the last token, and the last tokens that the convolution saw."""
        heads = self.heads
        rows = TokensInOrder(None, None, None, None) if rows is None else rows
        qkv, b, a = (rows.in_order(x) for x in (qkv, b, a))
        mixed, after = ops.causal_conv1d(qkv, taps, segment_ids=rows.documents, state=tokens)
        q, k, v = self._heads(mixed)
        wide = lambda x: x.astype(jnp.float32)
        of_heads = lambda x: wide(x)[None, None]  # (1, 1, H)
        gate = -jnp.exp(of_heads(decay)) * jax.nn.softplus(wide(a) + of_heads(dt_bias))
        beta = (2 if heads.doubles_beta else 1) * jax.nn.sigmoid(wide(b))
        if rows.is_token is not None:  # padding leaves the state as it is
            q, k, v, gate, beta = (
                jnp.where(jnp.expand_dims(rows.is_token, range(2, x.ndim)), x, 0) for x in (q, k, v, gate, beta)
            )
            after = last_tokens(qkv, tokens, rows.is_token, heads.taps - 1)
        out, state = ops.gated_delta_rule(q, k, v, gate, beta, segment_ids=rows.documents, state=state)
        out = rows.in_place(checkpoint_name(out, LINEAR_ATTENTION_OUTPUT))
        out = ops.gated_rms_norm(out, z.reshape(out.shape), scale, eps=self.eps)
        return out.reshape(*out.shape[:2], -1), state, after

    def _heads(self, mixed: Float[Array, "B T C"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys of norm 1 (B, T, K, D), and values (B, T, H, E), from the convolution's output."""
        heads = self.heads
        active = jax.nn.silu(mixed.astype(jnp.float32))
        q, k, v = jnp.split(active, [heads.keys, 2 * heads.keys], axis=-1)
        of_heads = lambda x, count: x.reshape(*x.shape[:2], count, -1)

        def normalised(x):
            x = of_heads(x, heads.key_heads)
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)

        q, k, v = normalised(q), normalised(k), of_heads(v, heads.value_heads)
        return q.astype(mixed.dtype), k.astype(mixed.dtype), v.astype(mixed.dtype)


def last_tokens(
    x: Float[Array, "B T C"], before: Float[Array, "B W_1 C"] | None, is_token: Bool[Array, "B T"], count: int
) -> Float[Array, "B W_1 C"]:
    """The last of so many tokens before rows and in them, whose padding is after their tokens."""
    before = jnp.zeros((x.shape[0], count, x.shape[2]), x.dtype) if before is None else before.astype(x.dtype)
    index = jnp.sum(is_token, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(jnp.concatenate([before, x], axis=1), index[..., None], axis=1)
