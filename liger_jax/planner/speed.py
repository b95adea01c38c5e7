"""The time of a training step by formulas: the operations and bytes of its passes, at rates that were measured.

It is for comparing ways of the same run (what layers keep, in how many micro-batches), and near enough to say what to
expect: benchmarks/results/planner.md sets it beside what was measured.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from liger_jax.models.core.memory import LayerMemory
from liger_jax.models.core.remat import is_offloaded, mode_of_first
from liger_jax.ops.layout import devices_along, names
from liger_jax.pallas_kernels.devices import GPUS, HOPPER, TPUS
from liger_jax.planner.estimate import QUANTIZED_BYTES
from liger_jax.planner.links import Links, link_seconds
from liger_jax.planner.step import Run

# Shares of published rates that steps reach: of the peak by matrix products and by attention, and of the memory's
# bandwidth by passes over arrays.
PRODUCTS, ATTENTION, MEMORY = 0.78, 0.55, 0.75
WITHIN = 0.15  # how far estimates were from what was measured: steps of 4,096 tokens or more, one H100 or H200
FEW, NARROW = 400, 250  # tokens, and the width of a model, with which products reach half of their rate
TO_HOST = {True: 80e9, False: 25e9}  # bytes a second, both ways, beside the computation: from Hopper on, and before
LINKS = Links(300e9, 300e9, 300e9)  # between devices of a mesh, where they were not measured
MOVES = 3.5  # passes over what a layer keeps: put into the stack of a loop, taken out of it and read
LAYER = 0.1e-3  # seconds of a layer and micro-batch in which nothing is computed
DOCUMENT = 2048  # tokens that a document of a packed row has at most, where nothing is known of it
ANY_GPU, ANY_TPU, CPU = (312e12, 1.5e12), (275e12, 1.2e12), (0.2e12, 20e9)  # rates where a device is not in the tables


@dataclasses.dataclass(frozen=True)
class Speed:
    """The time of a step, and what of it is recomputed.

    Attributes:
        seconds: of a step.
        operations: multiplications and additions of matrix products and attention in a step, on one device.
        recomputed: those of them that the backward computes again.
        tokens_per_second: over all devices.
    """

    seconds: float
    operations: float
    recomputed: float
    tokens_per_second: float


def speed(run: Run, links: Links = LINKS) -> Speed:
    """The time of a run's step. `links`: between the devices of its mesh."""
    rates, layer = _Rates.of(run), _Layer.of(run)
    tokens, count = run.tokens, run.model.config.num_hidden_layers
    seconds = operations = recomputed = 0.0
    attention = _attention_operations(run)
    for memory, number in run.layer.each:
        time, own, again = _layer_time(run, memory, layer, attention, rates)
        seconds += number * time
        operations += number * own
        recomputed += number * again
    config: Any = run.model.config
    head = 2.0 * tokens * config.vocab_size * config.hidden_size / run.tensor
    of_head = head * (3 if run.lora is None or run.adapts_head else 2)
    seconds += rates.products(of_head, tokens) + rates.memory(6.0 * tokens * config.vocab_size / run.tensor)
    operations += of_head
    # Weights are cast, or made dense, in each pass of each micro-batch.
    passes = 3 if not isinstance(run.remat, int) and mode_of_first(run.remat) not in ("none", "dots") else 2
    seconds += passes * count * rates.memory(layer.made_bytes)
    if run.micro_batches > 1:
        size = jnp.dtype(run.param_dtype).itemsize if run.lora is None else 4
        seconds += rates.memory((8.0 + size) * layer.trained)
    total = run.micro_batches * seconds + link_seconds(run, links)
    cut = run.micro_batches
    return Speed(total, cut * operations, cut * recomputed, run.batch * run.seq / total)


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Rates of a device, in operations and bytes a second."""

    peak: float
    bandwidth: float
    to_host: float
    width: int  # the model's

    @classmethod
    def of(cls, run: Run) -> "_Rates":
        target = run.target
        kind = target.name.partition(":")[0]
        if target.platform == "tpu":
            tpu = TPUS.get(kind)
            rates = (2e9 * tpu.macs * tpu.cores * tpu.ghz, tpu.bandwidth * tpu.cores) if tpu else ANY_TPU
        elif target.platform == "cpu":
            rates = CPU
        else:
            known = [GPUS[kind]] if kind in GPUS else [gpu for gpu in GPUS.values() if gpu.kind == target.kind]
            rates = (known[0].peak_flops, known[0].bandwidth) if known else ANY_GPU
        slow = {2: 1, 4: 8}[jnp.dtype(run.dtype).itemsize] if target.platform != "cpu" else 1
        return cls(rates[0] / slow, rates[1], TO_HOST[target.capability >= HOPPER], run.model.config.hidden_size)

    def products(self, operations: float, tokens: int) -> float:
        """Seconds of matrix products over so many tokens."""
        return operations / (PRODUCTS * self.peak) * (1 + FEW / tokens) * (1 + NARROW / self.width)

    def attention(self, operations: float) -> float:
        """Seconds of attention."""
        return operations / (ATTENTION * self.peak)

    def memory(self, size: float) -> float:
        """Seconds of passes over arrays."""
        return size / (MEMORY * self.bandwidth)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What a layer multiplies with and passes over, on one device: averages over the layers."""

    matrices: float  # numbers of the matrices that a token is multiplied with
    last: float  # those of them whose results nothing in the layer reads: they are not computed again
    gate_up: float  # those of experts, whose results no layer keeps over an axis of experts
    widths_in: float  # of the inputs and the results of matrices with adapters
    widths_out: float
    trained: float  # numbers that are trained, of all layers and the rest
    made_bytes: float  # of a layer's weights in the computation's dtype, where they are cast or made dense

    @classmethod
    def of(cls, run: Run) -> "_Layer":
        config: Any = run.model.config
        count, experts = config.num_hidden_layers, config.experts
        matrices = last = gate_up = widths_in = widths_out = trained = whole = 0.0
        for info, x in run.model.parameters:
            axes = names(run.layout.spec(info, x.shape, run.mesh))
            size = math.prod(x.shape)
            if run.lora is None:
                trained += size / devices_along(axes, run.mesh)
            if info.kind not in ("kernel", "experts") or not info.is_in("layers", "last_layers"):
                continue
            share = size / run.tensor
            whole += share / (run.expert if info.expert_axis is not None else 1)
            used = share * (experts.per_token / experts.count if info.expert_axis is not None else 1)
            matrices += used
            if "down" in info.name:
                last += used
            elif info.kind == "experts":
                gate_up += used
            if run.lora is not None and (info.kind == "kernel" or run.lora_experts):
                layers = x.shape[info.layer_axis] if info.stacked else 1
                widths_in += layers * x.shape[-2] / run.tensor
                widths_out += layers * x.shape[-1] / run.tensor
        rank = run.lora or 0
        trained += rank * (widths_in + widths_out)
        param, size = jnp.dtype(run.param_dtype).itemsize, jnp.dtype(run.dtype).itemsize
        held = QUANTIZED_BYTES[run.quantize] if run.quantize else param
        made = (held + size) * whole if run.quantize or param != size else 0.0
        widths = widths_in / count, widths_out / count
        return cls(matrices / count, last / count, gate_up / count, *widths, trained, made / count)


def _layer_time(
    run: Run, memory: LayerMemory, layer: _Layer, attention: float, rates: _Rates
) -> tuple[float, float, float]:
    """Seconds, operations, and recomputed operations of one layer and micro-batch."""
    config: Any = run.model.config
    tokens, size, mode = run.tokens, jnp.dtype(run.dtype).itemsize, memory.remat
    attention = 0.0 if memory.is_recurrent else attention
    forward, last = 2.0 * tokens * layer.matrices, 2.0 * tokens * layer.last
    trains = run.lora is None
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    width = layer.last / config.hidden_size  # of all feed-forwards that a token goes through
    # Norms, sums and rotations read and write; the gate reads two arrays and writes one.
    passed = size * tokens * (10 * config.hidden_size + (2 * heads + 3 * width * run.tensor) / run.tensor)
    adapted = size * tokens * (layer.widths_in + 3 * layer.widths_out) if run.lora else 0.0
    keeps = mode in ("none", "dots")
    of_experts = 2.0 * tokens * layer.gate_up if run.expert > 1 else 0.0
    again = of_experts if keeps else forward - last
    attention_again = 0.0 if mode in ("none", "offload_attention") else attention
    passes = 2.7 + (0.5 if keeps else 1.0)
    moved = MOVES * (sum(memory.kept.values()) if keeps else 0)
    seconds = rates.products(forward * (3 if trains else 2) + again, tokens)
    seconds += rates.attention(3.5 * attention + attention_again)
    seconds += rates.memory(passes * passed + (2 + (not keeps)) * adapted + moved)
    seconds += LAYER
    if is_offloaded(mode):
        seconds += 2 * memory.offloaded / rates.to_host
    operations = forward * (3 if trains else 2) + 3.5 * attention
    return seconds, operations + again + attention_again, again + attention_again


def _attention_operations(run: Run) -> float:
    """Operations of attention's forward in a layer, on one device: an average over the layers."""
    config: Any = run.model.config
    row = min(run.seq, DOCUMENT) if run.packed else run.seq
    keys = [_keys(row, config.window_of(kind)) for kind in config.layer_types]
    of_token = 4.0 * sum(keys) / len(keys) * config.num_attention_heads * config.head_dim
    return run.tokens * of_token / run.tensor


def _keys(row: int, window: int | None) -> float:
    """The keys that a token of a row attends to, on average."""
    window = min(window or row, row)
    return window - window * window / (2 * row)
