"""The memory of a training step by formulas: nothing is compiled, and it takes milliseconds.

All sizes are for one device. Memory peaks at one of two moments. In the loss, all activations are kept, and the
logits or the fused loss's buffers exist. In the backward of the last layer, all activations are kept, and the gradients
of all layers have their place as well.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import attention
from liger_jax.ops._place import Place
from liger_jax.pallas_kernels.attention import xla
from liger_jax.planner.mesh import LAYOUT
from liger_jax.planner.step import Run

STATIC = ("parameters", "gradients", "optimizer state")
DYNAMIC = ("layer inputs", "attention", "feed-forward", "one layer's work", "copies of parameters", "loss")
MOMENTS = {"adamw": 2, "sgd": 0}
QUANTIZED_BYTES = {"nf4": 1 / 2 + 2 / 64, "int8": 1 + 2 / 64}  # a number, with its share of a block's bfloat16 scale


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on each device.

    Attributes:
        parts: what each of `STATIC` and `DYNAMIC` takes at the peak.
        peak: the moment of the peak, "loss" or "backward".
        loss_bytes: the logits or the fused loss's buffers, wherever the peak is.
        static: parameters, all gradients and the optimizer's state, which do not depend on the batch. If the peak is in
            the loss, some gradients do not exist yet, and `parts` has less of them.
    """

    parts: dict[str, int]
    peak: str
    loss_bytes: int
    static: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


def static_bytes(
    parameters: int, devices: int = 1, *, param_dtype: str = "float32", optimizer: str = "adamw", state_dtype="float32"
) -> int:
    """Parameters, gradients and optimizer state on each device, fully sharded: 16 bytes a parameter by default.

    Frameworks that hold bfloat16 parameters beside a float32 master copy need as many: 2 + 2 + 4 + 4 + 4.

    Args:
        parameters: how many there are.
        devices: over which all three are split.
        param_dtype: dtype of parameters and gradients.
        optimizer: "adamw" or "sgd".
        state_dtype: dtype of AdamW's two moments.

    Returns:
        Bytes.

    Example:
        >>> static_bytes(14_000_000_000, 8) / 1e9
        28.0
    """
    moments = MOMENTS[optimizer] * jnp.dtype(state_dtype).itemsize
    return math.ceil(parameters * (2 * jnp.dtype(param_dtype).itemsize + moments) / devices)


def logits_bytes(tokens: int, vocab_size: int, bytes_per_logit: int = 8) -> int:
    """Bytes of a loss on logits, which holds the logits and their gradient in float32.

    Args:
        tokens: tokens of one device.
        vocab_size: V.
        bytes_per_logit: 12 for a framework that runs one operation after the other and also holds the softmax; 6 for
            a compiler that holds the gradient in 16 bits.

    Returns:
        Bytes.

    Example:
        >>> round(logits_bytes(4096, 152_064, bytes_per_logit=12) / 2**30, 2)
        6.96
    """
    return bytes_per_logit * tokens * vocab_size


def kept_by_a_layer(run: Run) -> dict[str, int]:
    """What a layer keeps for its backward, by kind.

    Args:
        run: what is trained.

    Returns:
        Bytes of "layer inputs", "attention" and "feed-forward".
    """
    c, kept = run.model.config, _values_kept(run)
    if run.remat == "none" and run.target.platform == "tpu":
        # A TPU's arrays have rows of 128 lanes. Narrower heads of queries, keys and results are padded to 128, and each
        # of attention's sums takes a row.
        padding = max(0, 128 - c.head_dim) * (2 * c.num_attention_heads + c.num_key_value_heads)
        kept["attention"] += padding + 127 * _sums(run)
    return {name: run.tokens * jnp.dtype(run.dtype).itemsize * values for name, values in kept.items()}


def _values_kept(run: Run) -> dict[str, int]:
    """What a layer keeps for its backward, by kind: values of the computation's dtype for each token."""
    c = run.model.config
    d, f = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    # The backward of a norm over the feed-forward's result needs that result.
    result = d if run.model.norms_results else 0
    inputs, attention, feed_forward = {
        "full": (d, 0, 0),
        "offload": (0, 0, 0),
        # the matrix products' results
        "dots": (d, q + 2 * kv + d, 2 * f + result),
        # with attention's queries and keys (rotated, or before their norms), values, result and sums
        "none": (d, d + 2 * q + 2 * kv + _sums(run), 2 * f + result),
    }[run.remat]
    return {"layer inputs": inputs, "attention": attention, "feed-forward": feed_forward}


def _sums(run: Run) -> int:
    """Attention keeps a float32 sum for each head and token: their size in values of the computation's dtype."""
    return 4 * run.model.config.num_attention_heads // jnp.dtype(run.dtype).itemsize


def estimate(run: Run) -> Estimate:
    """The memory of a run on each device, and what takes it.

    Args:
        run: what is trained, and on what.

    Returns:
        The estimate.
    """
    config, sizes = run.model.config, _Parameters.of(run)
    param, size = jnp.dtype(run.param_dtype).itemsize, jnp.dtype(run.dtype).itemsize
    layers = config.num_hidden_layers
    static = {
        "parameters": sizes.held_bytes,
        "optimizer state": MOMENTS[run.optimizer] * jnp.dtype(run.state_dtype).itemsize * sizes.trained,
    }
    if run.state_memory == "host":
        static["optimizer state"] = 0
    kept = {name: layers * value for name, value in kept_by_a_layer(run).items()}
    # Sharded parameters are gathered for two layers at a time. Parameters on one device may be cast, for one layer.
    gathered, is_cast = run.mesh["fsdp"] > 1, param != size
    # Quantised parameters are made dense, one layer at a time.
    copied_layers = 2 if gathered else 1 if is_cast or run.quantize is not None else 0
    of_layers = size * sizes.layer * copied_layers
    loss = 2 * run.tokens * config.hidden_size * size  # the last hidden states and their gradient
    tpu = run.target.platform == "tpu"
    head_gradient, in_loss = param * sizes.trained_head, 0
    if run.loss == "fused":
        plan = run.loss_plan()
        loss += plan.extra_bytes
        if gathered:  # mode "lean" takes slices, and scatters their gradients at once
            head_gradient //= run.mesh["fsdp"]
            if plan.mode == "fast":
                head_gradient, in_loss = size * sizes.trained_head, size * sizes.head
    else:
        # A GPU holds the logits and their gradient, and makes the head's gradient in the logits' place. On a TPU the
        # logits' gradient takes the logits' place, and the head's gradient has a place of its own.
        loss += logits_bytes(run.tokens, config.vocab_size, 4 if tpu else 8)
        loss += size * sizes.head if is_cast else 0
        head_gradient, in_loss = head_gradient if tpu else 0, param * sizes.head if gathered else 0
    # A tied head's gradient is the embedding's gradient, too. With 16-bit parameters it comes with a float32 buffer:
    # the rounding errors in the table's rows of this batch's tokens.
    is_widened = run.head_dtype != run.param_dtype
    remainder = 4 * min(run.tokens, config.vocab_size) * config.hidden_size if is_widened else 0
    sums = 4 * sizes.trained if run.micro_batches > 1 else 0  # the micro-batches' gradients are summed in float32
    # On several GPUs, from Hopper on, XLA reorders the program to hide communication. The buffer of zeros that sums
    # the layers' gradients then exists early, and so do the buffers of the embedding's gradient.
    is_hidden = run.target.count > 1 and run.target.capability >= (9, 0)
    early = sizes.layers_gradient_bytes if is_hidden else 0
    in_layers = size * sizes.head if is_hidden and gathered else 0
    at_loss = {"gradients": head_gradient + sums + early, "copies of parameters": in_loss, "loss": loss}
    in_backward = {
        "gradients": sizes.gradient_bytes + sums + remainder,
        "copies of parameters": of_layers + in_layers,
        "one layer's work": _work_of_a_layer(run),
    }
    peak = "loss" if sum(at_loss.values()) > sum(in_backward.values()) else "backward"
    parts = dict.fromkeys(STATIC + DYNAMIC, 0) | static | kept | (at_loss if peak == "loss" else in_backward)
    return Estimate(parts, peak, loss, sum(static.values()) + sizes.gradient_bytes + sums)


def _work_of_a_layer(run: Run) -> int:
    """The backward of one layer: the activations that it computes again, and their gradients."""
    c, kept = run.model.config, _values_kept(run)
    heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    values = (7 if run.model.norms_results else 5) * c.hidden_size + (3 if c.qk_norm else 2) * heads
    values += 2 * c.hidden_size  # gradients
    # Gate, up, their product and two gradients. A single GPU computes one half of them after the other, in place. On
    # several GPUs, and where adapters read them, XLA holds both halves at once.
    one_gpu = run.target.platform == "gpu" and run.target.count == 1
    in_halves = one_gpu and run.remat in ("full", "offload") and run.lora is None
    feed_forward = (3 * c.intermediate_size + 1) // 2 if in_halves else 5 * c.intermediate_size
    values -= kept["layer inputs"] + kept["attention"]
    size = run.tokens * jnp.dtype(run.dtype).itemsize
    return size * values + max(size * (feed_forward - kept["feed-forward"]), _scores_in_chunks(run))


def _scores_in_chunks(run: Run) -> int:
    """Bytes of the scores that XLA's attention holds for a chunk of queries in the backward; 0 where a kernel runs."""
    c = run.model.config
    windows = [w for w in {c.window_of(kind) for kind in c.layer_types} if _attention_of(run, w) == "xla"]
    keys = max([min(run.seq, xla.CHUNK + w - 1) if w else run.seq for w in windows], default=0)
    scores = run.tokens // run.seq * c.num_attention_heads * min(xla.CHUNK, run.seq) * keys
    # Scores, weights and the gradients of both in float32, and the weights in the computation's dtype.
    return (4 * 4 + jnp.dtype(run.dtype).itemsize) * scores


def _attention_of(run: Run, window: int | None) -> str:
    """The name of the attention implementation that layers with this window use on packed rows.

    On others cuDNN may run, and what it takes, the other kernels for the same GPU take too. So it is not asked: it
    would trace its own gradients for each estimate, and might not be installed here.
    """
    c, rows = run.model.config, (run.tokens // run.seq, run.seq)
    options = dict(window=window, softcap=c.attn_logit_softcapping, scale=c.attention_scale, implementation=None)
    q, k = (
        jax.ShapeDtypeStruct((*rows, n, c.head_dim), run.dtype) for n in (c.num_attention_heads, c.num_key_value_heads)
    )
    ids = jax.ShapeDtypeStruct(rows, jnp.int32)
    return attention.choose(q, k, k, ids, Place(run.target.description), **options).name


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """Numbers of parameters, and their bytes."""

    held_bytes: int  # on one device, adapters too
    trained: int  # on one device
    gradient_bytes: int  # on one device
    layers_gradient_bytes: int  # the layers' share of gradient_bytes
    layer: int  # in one layer, over all devices
    head: int  # in the head, over all devices
    trained_head: int  # like `head`; 0 if only adapters are trained

    @classmethod
    def of(cls, run: Run) -> "_Parameters":
        own = own_layers = layers = adapters = 0
        param, held_bytes = jnp.dtype(run.param_dtype).itemsize, 0
        for info, x in run.model.parameters:
            is_split = any(LAYOUT.spec(info, x.shape, run.mesh))
            share = math.prod(x.shape) // (run.mesh["fsdp"] if is_split else 1)
            own += share
            is_kernel = info.kind == "kernel"
            held_bytes += int(share * (QUANTIZED_BYTES[run.quantize] if is_kernel and run.quantize else param))
            if is_kernel and run.lora is not None:
                adapters += run.lora * x.shape[info.layer_axis] * (x.shape[info.in_axis] + x.shape[info.out_axis])
            if info.stacked:
                own_layers += share
                layers += math.prod(x.shape)
        config: Any = run.model.config
        layer, head = layers // config.num_hidden_layers, config.vocab_size * config.hidden_size
        if run.lora is None:
            return cls(held_bytes, own, param * own, param * own_layers, layer, head, head)
        return cls(held_bytes + 4 * adapters, adapters, 4 * adapters, 4 * adapters, layer, head, 0)
