"""The feed-forward of a layer. It takes x and returns (y, aux), where aux holds sums over the tokens of x.

A layer hands aux on, and `LayerStack` collects it from all layers. A dense feed-forward has nothing to sum, and its aux
is an empty dict. A mixture of experts (experts.py) returns the sums over tokens, for each expert, that its balancing
loss is computed from.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from liger_jax import ops
from liger_jax.layers.mlp import are_plain_products, in_one_op
from liger_jax.models.core import plain
from liger_jax.models.core.experts import EXPERTS, ExpertsFeedForward
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.parallel.tensor_collectives import all_tokens, axis_of_shard, product_of_shards
from liger_jax.models.core.remat import Remat, keeps_products
from liger_jax.models.core.tiles import over_tokens

DENSE = "dense"  # the kind of a layer whose feed-forward is `DenseFeedForward`

Aux = Any  # a tree of sums over tokens


def may_fuse(kernels: KernelOptions, remat: Remat, scan: bool) -> bool:
    """Whether the feed-forward is one op, `gated_mlp`: on one device, if gate and up are recomputed or kept unstacked.

    A scan stacks the gate and up that it keeps, and the kernel would read a copy of them: 3 % of a LLaMA's step on an
    H200. On a mesh the op would run in a shard_map, and a step on 8 H200 would take 6 % more memory.
    """
    kept_unstacked = remat == "none" and not scan
    return kernels.glu and not kernels.mesh_layout.axes and (kept_unstacked or not keeps_products(remat))


class DenseFeedForward(nnx.Module):
    """down(activation(gate(x))·up(x))."""

    names = "gate_proj", "up_proj", "down_proj"  # in a checkpoint

    def __init__(self, blocks: Any, inner_width: int | None = None):
        config, kernels, linear, remat = blocks.config, blocks.kernels, blocks.linear, blocks.remat
        width = config.hidden_size
        inner_width = int(config.feed_forward_width if inner_width is None else inner_width)
        gate, up, down = self.names
        self.has_gate_up = config.fused_gate_up
        if self.has_gate_up:
            self.gate_up_proj = linear(width, 2 * inner_width, use_bias=config.mlp_bias)
        else:
            setattr(self, gate, linear(width, inner_width, use_bias=config.mlp_bias))
            setattr(self, up, linear(width, inner_width, use_bias=config.mlp_bias))
        down_proj = linear(inner_width, width, use_bias=config.mlp_bias)
        setattr(self, down, down_proj)
        self.activation, self.kernels = config.gate, kernels
        self.remat: Remat = remat
        self.scan = blocks.scan

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Aux]:
        gate, up, down = self.names
        projections = ("gate_up_proj",) if self.has_gate_up else (gate, up)
        layers = tuple(getattr(self, name) for name in (*projections, down))
        return over_tokens(self._of_projections, layers, x, self.remat, self.kernels.mesh_layout), {}

    @property
    def fused(self) -> bool:
        """Whether it is one op, if its projections are plain."""
        return may_fuse(self.kernels, self.remat, self.scan)

    @property
    def recomputed(self) -> bool:
        """Whether the backward computes the layer again."""
        return self.remat != "none"

    @staticmethod
    def values_kept(config: Any, remat: Remat) -> int:
        """The values kept for the backward: gate and up, if a layer keeps its products, and the inputs of norms."""
        if not keeps_products(remat):
            return 0
        # The backward of a norm over the result needs the result.
        return 2 * config.feed_forward_width + (config.hidden_size if config.norms_results else 0)

    @staticmethod
    def values_in_forward(config: Any) -> int:
        """The values that a forward alone holds at once: gate, up and their product."""
        return 3 * config.feed_forward_width

    @staticmethod
    def values_in_backward(config: Any, in_place: bool) -> int:
        """The values that the backward holds at once: gate, up, their product and two gradients.

        `in_place`: whether one half of them is computed after the other, in the same place.
        """
        return (3 * config.feed_forward_width + 1) // 2 if in_place else 5 * config.feed_forward_width

    def _of_projections(self, projections: tuple[Any, ...], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The feed-forward by its projections in their order."""
        if self.has_gate_up:
            gate_up, down = projections
            return self._of_gate_up(gate_up, down, x)
        gate, up, down = projections
        layout = self.kernels.mesh_layout
        if self.fused and are_plain_products(gate, up, down):
            options = dict(recomputed=self.recomputed, implementation=self.kernels.implementation)
            return in_one_op(x, gate, up, down, activation=self.activation, **options)
        tensor = axis_of_shard(layout.tensor, down)
        x = all_tokens(x, tensor)
        of_adapted = getattr(type(down), "gated_mlp", None)
        if of_adapted and (y := of_adapted(x, projections, self.activation)) is not None:
            return y
        return product_of_shards(down, layout.run(self.gated, (gate(x), up(x))), tensor)

    def _of_gate_up(self, gate_up: Any, down: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The same, of one projection to gate and up."""
        if not (self.fused and are_plain_products(gate_up, down)):
            layout = self.kernels.mesh_layout
            tensor = axis_of_shard(layout.tensor, down)
            gate, up = jnp.split(gate_up(all_tokens(x, tensor)), 2, axis=-1)
            return product_of_shards(down, layout.run(self.gated, (gate, up)), tensor)
        gate, up = jnp.split(gate_up.kernel[...].astype(gate_up.dtype), 2, axis=-1)
        return ops.gated_mlp(
            x.astype(gate_up.dtype),
            gate,
            up,
            down.kernel[...].astype(gate_up.dtype),
            activation=self.activation,
            recomputed=self.recomputed,
            precision=gate_up.precision,
            implementation=self.kernels.implementation,
        )

    def gated(self, gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """activation(gate)·up."""
        is_silu = self.activation == "silu"
        if not self.kernels.glu:
            return (plain.swiglu if is_silu else plain.geglu)(gate, up)
        return (ops.swiglu if is_silu else ops.geglu)(gate, up, implementation=self.kernels.implementation)


class SharedExpertFeedForward(ExpertsFeedForward):
    """A mixture, and an expert beside it that every token goes to: mixture(x) + sigmoid(gate(x))·shared(x)."""

    def __init__(self, blocks: Any):
        super().__init__(blocks)
        self.shared_expert = DenseFeedForward(blocks, blocks.config.experts.shared_width)
        self.shared_expert_gate = blocks.linear(blocks.config.hidden_size, 1)

    def __call__(
        self, x: Float[Array, "B T D"], is_token: Bool[Array, "B row"] | None = None
    ) -> tuple[Float[Array, "B T D"], Aux]:
        y, sums = super().__call__(x, is_token)
        shared, _ = self.shared_expert(x)
        gate = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32)).astype(x.dtype)
        return y + gate * shared, sums


# By the kind that a config names for a layer, `feed_forward_of`.
FEED_FORWARDS: dict[str, Any] = {DENSE: DenseFeedForward, EXPERTS: ExpertsFeedForward}
