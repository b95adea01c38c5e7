"""The memory of a training step by formulas: nothing is compiled, and it takes milliseconds.

All sizes are for one device. Memory peaks at one of two moments. In the loss, all activations are kept, and the
logits or the fused loss's buffers exist. In the backward of the last layer, all activations are kept, and the gradients
of all layers have their place as well.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from liger_jax.models.core.memory import LayerMemory
from liger_jax.models.core.parameters import parameter
from liger_jax.models.hugging_face.adapter_targets import Targets, split
from liger_jax.ops.experts.adapted_moe_mlp import experts_at_once
from liger_jax.ops.layout import devices_along, names
from liger_jax.planner.step import Run

STATIC = ("parameters", "gradients", "optimizer state")
DYNAMIC = ("layer inputs", "attention", "feed-forward", "one layer's work", "copies of parameters", "loss")
QUANTIZED_BYTES = {"nf4": 1 / 2 + 2 / 64, "int8": 1 + 2 / 64}  # a number, with its share of a block's bfloat16 scale
_FLOAT32_SCALE = 2 / 64  # more, where a checkpoint brings float32 scales


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on each device.

    Attributes:
        bytes_of: the bytes of each item of `STATIC` and `DYNAMIC` at the peak.
        peak: the moment of the peak, "loss" or "backward".
        loss_bytes: the logits or the fused loss's buffers, wherever the peak is.
        static: parameters, all gradients and the optimizer's state, which do not depend on the batch. If the peak is in
            the loss, some gradients do not exist yet, and are not in `bytes_of`.
        host: bytes of the host's pinned memory for each device: offloaded layers' inputs and optimizer state.
    """

    bytes_of: dict[str, int]
    peak: str
    loss_bytes: int
    static: int
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of `bytes_of`."""
        return sum(self.bytes_of.values())


def moment_bytes(optimizer: str, state_dtype: str) -> float:
    """Bytes of an optimizer's state for each parameter."""
    return {"adamw": 2.0 * jnp.dtype(state_dtype).itemsize, "adamw8bit": 2 * (1 + 4 / 256), "sgd": 0.0}[optimizer]


def logits_bytes(tokens: int, vocab_size: int, bytes_per_logit: int = 8) -> int:
    """Bytes of a loss on logits, which holds the logits and their gradient in float32.

    `bytes_per_logit`: 12 for a framework that runs one operation after the other and also holds the softmax; 6 for a
    compiler that holds the gradient in 16 bits.
    """
    return bytes_per_logit * tokens * vocab_size


def estimate(run: Run) -> Estimate:
    """The memory of a run on each device, and what takes it."""
    config, sizes = run.model.config, _Parameters.of(run)
    param, size = jnp.dtype(run.param_dtype).itemsize, jnp.dtype(run.dtype).itemsize
    layers = run.layer.each
    static = {
        "parameters": sizes.held_bytes,
        "optimizer state": math.ceil(moment_bytes(run.optimizer, run.state_dtype) * sizes.trained),
    }
    host = sum(count * layer.offloaded for layer, count in layers)
    if run.state_memory == "host":
        host, static["optimizer state"] = host + static["optimizer state"], 0
    kept = {name: sum(count * layer.kept[name] for layer, count in layers) for name in run.layer.kept}
    # A layer's sharded parameters are gathered, or cast, or made dense where they are quantised. On GPUs gradients that
    # wait for their sum over devices take the places of activations and of parameters that were needed before. On TPUs
    # the next layer's parameters are gathered meanwhile.
    gathered, is_cast = run.parameter_devices > 1, param != size
    tpu = run.target.platform == "tpu"
    is_copied = gathered or is_cast or run.quantize is not None
    of_layers = size * sizes.layer * (2 if gathered and tpu else int(is_copied))
    if run.parameter_devices > run.expert:  # quantised experts are gathered in their codes
        of_layers += sizes.codes
    of_layers += 2 * size * sizes.exchanged  # columns in the order of devices, and what came of them
    loss = 2 * run.tokens * config.hidden_size * size  # the last hidden states and their gradient
    if run.tensor > 1:  # whole rows, beside each device's positions
        loss += loss // run.tensor
    head_gradient, in_loss, waiting = param * sizes.trained_head, 0, 0
    if run.loss == "fused":
        plan = run.loss_plan()
        loss += plan.extra_bytes
        if gathered:  # mode "lean" scatters slices of its gradient; "fast" counts the whole head and its gradient
            head_gradient = head_gradient // run.parameter_devices if plan.mode == "lean" else 0
            waiting = size * sizes.trained_head if plan.mode == "fast" else 0
    else:
        # A GPU holds the logits and their gradient, and makes the head's gradient in the logits' place. On a TPU the
        # logits' gradient takes the logits' place, and the head's gradient has its own place.
        loss += logits_bytes(run.tokens, config.vocab_size, 4 if tpu else 8) // run.tensor
        loss += size * sizes.head if is_cast else 0
        head_gradient, in_loss = head_gradient if tpu else 0, param * sizes.head if gathered else 0
    # A tied head's gradient is the embedding's, too. With 16-bit parameters it also holds the rounding errors of the
    # rows of this batch's tokens, in float32.
    remainder = 4 * min(run.tokens, config.vocab_size) * config.hidden_size if run.head.is_widened else 0
    sums = 4 * sizes.trained if run.micro_batches > 1 else 0  # the micro-batches' gradients are summed in float32
    # On several GPUs, from Hopper on, XLA reorders the program to hide communication. Zeros to which gradients are
    # added then exist early: those of all layers, and of the embedding those of the batch's tokens, in float32. A table
    # over fsdp alone has them whole, too: a tensor axis adds to its shards when the layers are done.
    # Over a tensor axis alone some versions of JAX make those of the tokens later. The estimate is then too high: 4 %
    # for 8 layers of Llama-3.1-8B, 8 × 2,048 tokens, on two and on four H200 with JAX 0.11.2.
    is_hidden = run.target.count > 1 and run.target.capability >= (9, 0)
    early = sizes.layers_gradient_bytes if is_hidden else 0
    of_tokens = 4 * min(run.tokens, -(-config.vocab_size // run.tensor)) * config.hidden_size
    of_tokens = of_tokens if is_hidden and run.lora is None else 0
    in_layers = size * sizes.head if is_hidden and gathered and run.tensor == 1 else 0
    if is_hidden:  # a whole head's gradient is scattered when the layers are done
        in_layers += waiting - waiting // run.parameter_devices
    in_loss += size * sizes.head if run.adapts_head else 0  # beside the adapter's columns
    at_loss = {"gradients": head_gradient + sums + early, "copies of parameters": in_loss + of_tokens, "loss": loss}
    in_backward = {
        "gradients": sizes.gradient_bytes + sums + remainder,
        "copies of parameters": of_layers + in_layers + of_tokens,
        "one layer's work": _work(layers),
    }
    peak = "loss" if sum(at_loss.values()) > sum(in_backward.values()) else "backward"
    bytes_of = dict.fromkeys(STATIC + DYNAMIC, 0) | static | kept | (at_loss if peak == "loss" else in_backward)
    return Estimate(bytes_of, peak, loss, sum(static.values()) + sizes.gradient_bytes + sums, host)


def _work(layers: list[tuple[LayerMemory, int]]) -> int:
    """Bytes of one layer's backward: what it holds beside all that is kept, or, where last layers keep more than the
    first ones and have let go of it by then, beside what is left of it.
    """
    last = layers[-1][0].remat
    let_go = sum(count * sum(layer.kept.values()) for layer, count in layers if layer.remat == last)
    work = lambda layer: layer.worked_on - (let_go if layer.remat != last else 0)
    return max(work(layer) for layer, _ in layers)


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """Numbers of parameters, and their bytes."""

    held_bytes: int  # on one device, adapters too
    trained: int  # on one device
    gradient_bytes: int  # on one device
    layers_gradient_bytes: int  # the layers' share of gradient_bytes
    layer: int  # in one layer, over the devices that gather it; of quantised experts those that are dense at once
    codes: int  # bytes of one layer's quantised experts, over the devices that gather them
    exchanged: int  # in one layer, whose columns change devices along a tensor axis: gate and up of dense experts
    head: int  # in the head, over the devices that gather it
    trained_head: int  # like `head`; 0 if only adapters are trained, and none on the head

    @classmethod
    def of(cls, run: Run) -> "_Parameters":
        own = own_layers = layers = adapters = codes = exchanged = 0
        param, held_bytes = jnp.dtype(run.param_dtype).itemsize, 0
        quantized = QUANTIZED_BYTES[run.quantize] if run.quantize else 0.0
        quantized += _FLOAT32_SCALE if run.model.quantized else 0.0
        for info, x in run.model.parameters:
            axes = names(run.layout.spec(info, x.shape, run.mesh))
            share = math.prod(x.shape) // devices_along(axes, run.mesh)
            own += share
            is_quantized = info.kind in ("kernel", "experts") and run.quantize is not None
            held_bytes += int(share * (quantized if is_quantized else param))
            if run.lora is not None:
                adapters += _adapters_of(run, info, x.shape)
            if info.is_in("layers", "last_layers"):
                own_layers += share
                # Devices of a tensor axis, and of an expert axis, multiply with different shards, and gather none.
                apart = ("tensor",) if info.expert_axis is None else ("tensor", "expert")
                of_layers = math.prod(x.shape) // devices_along([axis for axis in axes if axis in apart], run.mesh)
                if info.kind == "experts" and run.quantize is not None:  # a few are dense at once
                    codes += int(of_layers * quantized)
                    count, in_width, out_width = x.shape[-3] // run.expert, x.shape[-2], x.shape[-1] // run.tensor
                    of_layers = of_layers // count * experts_at_once((count, in_width, out_width), run.dtype)
                layers += of_layers
                if run.tensor > 1 and info.kind == "experts" and "gate_up" in info.name and run.quantize is None:
                    exchanged += of_layers
        config: Any = run.model.config
        layer, head = layers // config.num_hidden_layers, -(-config.vocab_size // run.tensor) * config.hidden_size
        codes, exchanged = codes // config.num_hidden_layers, exchanged // config.num_hidden_layers
        if run.lora is None:
            return cls(held_bytes, own, param * own, param * own_layers, layer, codes, exchanged, head, head)
        if run.adapts_head and config.tie_word_embeddings:  # no parameter of the model is its head
            adapters += run.lora * (config.vocab_size + config.hidden_size) + run.dora * config.vocab_size
        trained_head = head if run.adapts_head else 0
        of_adapters = 4 * adapters
        return cls(
            held_bytes + of_adapters, adapters, of_adapters, of_adapters, layer, codes, exchanged, head, trained_head
        )


def _adapters_of(run: Run, info: Any, shape: tuple[int, ...]) -> int:
    """Numbers of the adapters of a parameter; in a stack every layer has room for them if one has an adapter."""
    if info.kind == "experts":
        (*first, in_width, out_width), rank = shape, run.lora or 0
        both = dict(lora_a=(*first, in_width, rank), lora_b=(*first, rank, out_width))
        size = 0
        for end, own in both.items() if run.lora_experts else ():
            spec = run.layout.spec(parameter(tuple(f"{info.name}_{end}".split(".")), own), own, run.mesh)
            size += math.prod(own) // devices_along(spec, run.mesh)
        return size
    is_whole, named = split(run.lora_targets)
    modules = [name.removesuffix(".weight") for name in info.tensor_names]
    is_named = info.kind in ("kernel", "embedding", "head") and any(map(Targets(named).adapts, modules))
    is_adapted = is_named or is_whole and info.kind == "kernel"
    if not is_adapted:
        return 0
    widths = shape[info.in_axis], shape[info.out_axis]
    layers = shape[info.layer_axis] if info.stacked else 1
    if "tensor" in names(run.layout.spec(info, shape, run.mesh)):  # the matrix that has the split axis is split, too
        widths = tuple(
            width // (run.tensor if axis == info.tensor_axis else 1)
            for width, axis in zip(widths, (info.in_axis, info.out_axis), strict=True)
        )
    return layers * (run.lora * sum(widths) + (widths[1] if run.dora else 0))
