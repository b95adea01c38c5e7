"""The feed-forward of a mixture of experts, and the losses of its router."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from liger_jax import ops
from liger_jax._tree import tree_dataclass
from liger_jax.models.core.parallel.expert_shards import EXPERTS as EXPERTS
from liger_jax.models.core.parallel.tensor_collectives import all_tokens, summed_tokens
from liger_jax.models.core.remat import Remat, keeps_products
from liger_jax.models.core.row_tokens import RowTokens
from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.experts.adapted_moe_mlp import ExpertAdapter, adapted_moe_mlp
from liger_jax.ops.experts.expert_parallel import AT_ONCE
from liger_jax.ops.layout import in_chunks


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts of a config."""

    count: int  # E, the experts of a layer
    per_token: int  # k, the experts that each token goes to
    width: int  # F of an expert
    activation: str = "silu"  # as `ops.moe_mlp` takes it
    normalized: bool = True  # whether the weights of a token's experts add up to 1
    # Whether the softmax is over the chosen experts, and not over all before the choice.
    softmax_of_chosen: bool = False
    biases: bool = False  # whether router and experts add biases
    router: str = "gate"  # the router's name in a checkpoint
    # Whether a checkpoint has one tensor for a layer's experts, in which columns of gate and up take turns, and not
    # tensors of each expert.
    one_tensor: bool = False
    shared_width: int = 0  # F of the expert that every token goes to, by a gate; 0 for none


@tree_dataclass
class ExpertMetrics:
    """Metrics of the routers of all layers in a call."""

    load: jax.Array  # (layers, E) float32, the share of a layer's choices that each expert got, 1/E where all are equal
    balancing_loss: jax.Array  # float32 scalar, the balancing loss without its coefficient
    z_loss: jax.Array  # float32 scalar, the routers' z-loss without its coefficient


class Router(nnx.Module):
    """The logits of experts, x · kernel + bias, in the computation's dtype."""

    def __init__(self, width: int, count: int, *, parameter: Callable[..., nnx.Param], use_bias: bool):
        self.router_kernel = parameter(width, count)
        self.bias = parameter(count) if use_bias else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        logits = x @ self.router_kernel[...].astype(x.dtype)
        return logits if self.bias is None else logits + self.bias[...].astype(x.dtype)[None, None]


class ExpertWeights(nnx.Module):
    """The weights of all experts of a layer; columns of gate stand before those of up."""

    # Whether adapters are on. A weight's adapter is stored beside it: float32 arrays whose names end in `_lora_a` (E,
    # in, rank) and `_lora_b` (E, rank, out), and numbers in `_lora_alpha` and `_lora_scale`.
    adapters_on: bool = True

    def __init__(self, width: int, experts: Experts, *, parameter: Callable[..., nnx.Param]):
        count, inner, end = experts.count, experts.width, "_proj" if experts.one_tensor else ""
        self.names = f"gate_up{end}", f"down{end}"
        self.bias_names = tuple(f"{name}_bias" for name in self.names) if experts.biases else ()
        shapes = (width, 2 * inner), (inner, width)
        for name, shape in zip(self.names, shapes, strict=True):
            setattr(self, name, parameter(count, *shape))
        for name, (_, out_width) in zip(self.bias_names, shapes, strict=False):
            setattr(self, name, parameter(count, out_width))

    def arrays(self, dtype: Any) -> list[Any]:
        """Gate and up (E, D, 2F), down (E, F, D), and their biases, or `None` twice, in a dtype.

        Quantised weights are as they are.
        """
        held = [getattr(self, name)[...] for name in (*self.names, *self.bias_names)]
        arrays = [array if isinstance(array, BlockQuantized) else array.astype(dtype) for array in held]
        return arrays if self.bias_names else [*arrays, None, None]

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the weights that have adapters."""
        return tuple(name for name in self.names if hasattr(self, f"{name}_lora_a"))

    def adapters(self, dtype: Any) -> list[Any]:
        """A and B of gate and up, and those of down, in a dtype, B with the scale; `None` twice for one without."""
        pairs: list[Any] = []
        for name in self.names:
            if not self.adapters_on or name not in self.adapted:
                pairs += [None, None]
                continue
            a, b = getattr(self, f"{name}_lora_a")[...], getattr(self, f"{name}_lora_b")[...]
            pairs += [a.astype(dtype), (getattr(self, f"{name}_lora_scale") * b).astype(dtype)]
        return pairs


class ExpertsFeedForward(nnx.Module):
    """Σ_j weight_j · expert_j(x) over the k experts that a router chooses for each token. No token is dropped."""

    def __init__(self, blocks: Any):
        experts: Experts = blocks.config.experts
        self.options, self.kernels = experts, blocks.kernels
        width, parameter = blocks.config.hidden_size, blocks.parameter
        router = Router(width, experts.count, parameter=parameter, use_bias=experts.biases)
        setattr(self, experts.router, router)
        self.experts = ExpertWeights(width, experts, parameter=parameter)

    def __call__(
        self, x: Float[Array, "B T D"], is_token: Bool[Array, "B row"] | None = None
    ) -> tuple[Float[Array, "B T D"], ops.RouterSums]:
        """Returns y (B, T, D), and the router's sums over tokens. `None` is for rows without padding."""
        layout = self.kernels.mesh_layout
        logits = getattr(self, self.options.router)(x)
        k = self.options.per_token
        if self.options.softmax_of_chosen:
            routing = ops.top_k_softmax(logits, k)
        else:
            routing = ops.softmax_top_k(logits, k, normalized=self.options.normalized)
        _, down, *_ = of_experts = *self.experts.arrays(x.dtype), *self.experts.adapters(x.dtype)
        tensor = layout.tensor if down.shape[1] < self.options.width else None
        sums = ops.router_sums(logits, routing.experts, self._of_device(is_token, x.shape[1], tensor))
        of_tokens = tuple(all_tokens(array, tensor) for array in (x, routing.weights, routing.experts))
        if (axis := layout.expert_axis()) is None:
            own = layout.expert if down.shape[0] < self.options.count else None  # inside of a shard_map
            mixed = functools.partial(self._mixed, axis=own)
            return summed_tokens(layout.run(mixed, of_tokens, of_experts), tensor), sums
        mixed, between = functools.partial(self._mixed, axis=axis), layout.between_blocks
        specs = *(between for _ in of_tokens), *(P(axis) for _ in of_experts)
        return layout.run(mixed, (*of_tokens, *of_experts), spec=specs, out=between), sums

    def _of_device(self, is_token: jax.Array | None, own: int, tensor: str | None) -> jax.Array | None:
        """The mask of the positions that x has, (B, own), from that of whole rows in their own order."""
        if is_token is None:
            return None
        axes = () if tensor is None else (tensor,)
        if (sequence := self.kernels.mesh_layout.sequence_shards()) is not None:
            is_token, axes = in_chunks(is_token, 1, sequence.size), (sequence.axis, *axes)
        if is_token.shape[1] == own:
            return is_token
        return jax.lax.dynamic_slice_in_dim(is_token, jax.lax.axis_index(axes) * own, own, 1)

    def _mixed(self, x, weights, experts, gate_up, down, gate_up_bias, down_bias, *adapters, axis):
        """The experts' results (B, T, D), of one device's tokens; with an axis, whose devices have own experts."""
        in_rows = lambda array: array.reshape(-1, array.shape[-1])
        options: dict[str, Any] = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        options |= dict(activation=self.options.activation, implementation=self.kernels.implementation)
        mixed = ops.moe_mlp
        if axis is not None or isinstance(gate_up, BlockQuantized) or any(array is not None for array in adapters):
            of_gate_up, of_down = (None if a is None else ExpertAdapter(a, b) for a, b in (adapters[:2], adapters[2:]))
            options |= dict(gate_up_adapter=of_gate_up, down_adapter=of_down, axis=axis)
            mixed = adapted_moe_mlp
        y = mixed(in_rows(x), in_rows(weights), in_rows(experts), gate_up, down, **options)
        return y.reshape(x.shape)

    @staticmethod
    def values_kept(config: Any, remat: Remat, devices: int = 1) -> int:
        """The values kept for the backward: gate and up of a token's experts, if a layer keeps its products.

        Experts that several devices share keep none.
        """
        experts = config.experts
        rows = experts.per_token if devices == 1 else 0
        return 2 * (rows * experts.width + experts.shared_width) if keeps_products(remat) else 0

    @staticmethod
    def values_in_forward(config: Any, devices: int = 1) -> int:
        """The values that a forward alone holds at once: gate, up, their product and rows of two arrays of a token's
        experts, or of the shared one; and, where several devices share the experts, the tokens of all and their sums.
        """
        experts, width = config.experts, config.hidden_size
        rows, of_tokens = (experts.per_token, 0) if devices == 1 else (AT_ONCE * experts.per_token, 2 * devices * width)
        return max(3 * experts.shared_width, math.ceil(rows * (3 * experts.width + 2 * width)) + of_tokens)

    @staticmethod
    def values_in_backward(
        config: Any, in_place: bool, *, adapted: bool = False, devices: int = 1, tensor: int = 1
    ) -> int:
        """The values that the backward holds at once: those of rows, and, where several devices share the experts, the
        tokens of all and the gradients of their sums.

        Returns values of the computation's dtype for each token, over all devices of the tensor axis.
        """
        of_tokens = 2 * devices * tensor * config.hidden_size if devices > 1 else 0
        return ExpertsFeedForward.values_of_rows(config, adapted, devices, tensor) + of_tokens

    @staticmethod
    def values_of_rows(config: Any, adapted: bool, devices: int, tensor: int) -> int:
        """The values of the rows that the backward computes at once: gate, up and their gradients, a float32 gradient
        of their product, and rows of two arrays of a token's experts.

        Where experts have adapters or are quantised, these are rows of two more arrays and the gated product. Several
        devices have rows for half more than their share.
        """
        experts, width = config.experts, tensor * config.hidden_size
        rows = experts.per_token if devices == 1 else AT_ONCE * experts.per_token
        return math.ceil(rows * (7 * experts.width + 4 * width if adapted else 6 * experts.width + 2 * width))


def misfits(**fields: int) -> Iterator[str]:
    """A clause if a token goes to more experts than there are."""
    (count_name, count), (name, per_token) = fields.items()
    if per_token > count:
        yield f"{name}={per_token} must be at most {count_name}={count}, the experts that there are"


def fed(feed_forward: Any, x: Float[Array, "B T D"], rows: RowTokens | None) -> tuple[Any, Any]:
    """A feed-forward's result and its sums. Experts get the mask of padding, which their routers ignore."""
    if not isinstance(feed_forward, ExpertsFeedForward):
        return feed_forward(x)
    return feed_forward(x, None if rows is None else rows.is_token)


def router_loss(config: Any, sums: ops.RouterSums) -> Float[Array, ""]:
    """The losses of the routers of all layers, weighted by the config's coefficients.

    Returns a float32 scalar: router_aux_loss_coef·balancing_loss if `output_router_logits` is set, as in transformers,
    and router_z_loss_coef·z_loss.
    """
    loss = jnp.zeros((), jnp.float32)
    if config.output_router_logits:
        loss += config.router_aux_loss_coef * ops.balancing_loss(sums)
    return loss + config.router_z_loss_coef * ops.router_z_loss(sums) if config.router_z_loss_coef else loss


def without_router_loss(model: Any) -> Any:
    """The model, changed so that its loss is the cross-entropy alone."""
    if getattr(model.config, "experts", None) is not None:
        model.config = dataclasses.replace(model.config, output_router_logits=False, router_z_loss_coef=0.0)
    return model


def expert_metrics(sums: ops.RouterSums) -> ExpertMetrics:
    """The metrics of the routers of all layers, without gradients."""
    sums = jax.lax.stop_gradient(sums)
    return ExpertMetrics(
        load=ops.expert_load(sums), balancing_loss=ops.balancing_loss(sums), z_loss=ops.router_z_loss(sums)
    )
