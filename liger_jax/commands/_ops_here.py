"""Which implementation each op takes on this machine: each op is traced once, at sizes that models have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax import ops
from liger_jax.ops.kernels import Chosen, choices_noted

_TOKENS, _WIDTH, _FORWARD, _ENTRIES = 4096, 2048, 4096, 32768
_SEQUENCES, _LENGTH, _HEADS, _KEY_HEADS, _HEAD = 4, 1024, 16, 8, 128


def _of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_X, _ROW = _of(_TOKENS, _WIDTH), _of(_WIDTH)
_GATE, _UP = (_of(_TOKENS, _FORWARD),) * 2
_KERNEL, _HEAD_WEIGHT = _of(_WIDTH, _FORWARD), _of(_ENTRIES, _WIDTH)
_LABELS, _LOGITS = _of(_TOKENS, dtype=jnp.int32), _of(_TOKENS, _ENTRIES)
_Q, _K = _of(_SEQUENCES, _LENGTH, _HEADS, _HEAD), _of(_SEQUENCES, _LENGTH, _KEY_HEADS, _HEAD)
_GATES = _of(_SEQUENCES, _LENGTH, _HEADS, dtype=jnp.float32)
_TABLE, _TABLES = _of(1, _LENGTH, _HEAD, dtype=jnp.float32), _of(3, 1, _LENGTH, _HEAD, dtype=jnp.float32)
_SECTIONS = (16, 24, 24)
_GROUPS, _CHOSEN = 16, 2
_ROUTED = _of(_TOKENS, _CHOSEN), _of(_TOKENS, _CHOSEN, dtype=jnp.int32)
_EXPERTS = _of(_GROUPS, _WIDTH, 2 * _FORWARD), _of(_GROUPS, _FORWARD, _WIDTH)

# By name: a call, and the types of its arrays.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms_norm": (ops.rms_norm, (_X, _ROW)),
    "fused_add_rms_norm": (ops.fused_add_rms_norm, (_X, _X, _ROW)),
    "layer_norm": (ops.layer_norm, (_X, _ROW, _ROW)),
    "group_norm": (functools.partial(ops.group_norm, num_groups=32), (_X, _ROW, _ROW)),
    "dyt": (ops.dyt, (_X, _of(), _ROW, _ROW)),
    "poly_norm": (ops.poly_norm, (_X, _of(3), _of())),
    "gated_rms_norm": (ops.gated_rms_norm, (_X, _X, _ROW)),
    "apply_rope": (ops.apply_rope, (_Q, _K, _TABLE, _TABLE)),
    "apply_mrope": (functools.partial(ops.apply_mrope, sections=_SECTIONS), (_Q, _K, _TABLES, _TABLES)),
    "swiglu": (ops.swiglu, (_GATE, _UP)),
    "geglu": (ops.geglu, (_GATE, _UP)),
    "gated_mlp": (ops.gated_mlp, (_X, _KERNEL, _KERNEL, _of(_FORWARD, _WIDTH))),
    "grouped_matmul": (ops.grouped_matmul, (_X, _of(_GROUPS, _WIDTH, _FORWARD), _of(_GROUPS, dtype=jnp.int32))),
    "moe_mlp": (functools.partial(ops.moe_mlp, activation="silu"), (_X, *_ROUTED, *_EXPERTS)),
    "relu_squared": (ops.relu_squared, (_X,)),
    "softmax": (ops.softmax, (_LOGITS,)),
    "sparsemax": (ops.sparsemax, (_LOGITS,)),
    "cross_entropy": (ops.cross_entropy, (_LOGITS, _LABELS)),
    "causal_attention": (ops.causal_attention, (_Q, _K, _K)),
    "gated_delta_rule": (ops.gated_delta_rule, (_K, _K, _Q, _GATES, _GATES)),
    "fused_linear_cross_entropy": (ops.fused_linear_cross_entropy, (_X, _HEAD_WEIGHT, _LABELS)),
    "fused_linear_log_probs": (ops.fused_linear_log_probs, (_X, _HEAD_WEIGHT, _LABELS)),
    "fused_linear_distillation": (ops.fused_linear_distillation, (_X, _HEAD_WEIGHT, _X, _HEAD_WEIGHT)),
}


def chosen() -> dict[str, list[Chosen]]:
    """The implementation that each op chooses for its forward, and for its backward if that is another one."""
    choices = {}
    for name, (call, types) in CASES.items():
        with choices_noted() as noted:
            jax.eval_shape(lambda *arrays, call=call: call(*arrays), *types)  # new, since JAX caches traces
        choices[name] = noted
    return choices
