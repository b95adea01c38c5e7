"""The gated delta rule in Pallas for TPUs.

The grid walks over rows, over a few heads at a time, and over the chunks of a row, whose state stays in VMEM. Forward,
one launch, which writes the output and the last state alone. Backward, two: "states" is the forward again, and writes
the state before every chunk and the inverse of its system, and "gradients" goes from the last chunk to the first.
Rounding: of arguments in bfloat16, operands of products are rounded to bfloat16, and so are the states and inverses
that one launch hands to the other; the inverse is computed to 16 bits. Sums, decays and the state that is carried are
float32. Of other arguments everything is float32.
Nothing has run on a TPU: the kernels are compiled for all, and their values are the interpreter's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.devices import Capability
from liger_jax.pallas_kernels.gated_delta_rule import config, mosaic_tpu_kernels
from liger_jax.pallas_kernels.gated_delta_rule.config import TPU_CHUNK, Typed
from liger_jax.pallas_kernels.gated_delta_rule.mosaic_tpu_kernels import Arithmetic, Heads
from liger_jax.pallas_kernels.tiles import (
    cdiv,
    out_like,
    round_up,
    tpu_interpreter,
    tpu_params,
    vmem_bytes,
    vmem_limit,
)

_LANES = 128
_WIDEST = 256
_LONGEST = 2**24  # documents are numbered in float32


def unsupported(
    q: Typed, k: Typed, v: Typed, gate: Typed, beta: Typed, state: Typed | None, *, capability: Capability
) -> str | None:
    """Why the TPU kernels cannot run a case, or None."""
    del capability
    if any(x is not None and x.dtype == jnp.float64 for x in (q, k, v, gate, beta, state)):
        return "the kernels compute in float32; use 'xla' for float64."
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        return f"the kernels support widths up to {_WIDEST}, and D is {q.shape[3]} and E {v.shape[3]}; use 'xla'."
    if v.shape[1] >= _LONGEST:
        return f"the kernels support fewer than {_LONGEST} tokens in a row, and T is {v.shape[1]}; use 'xla'."
    return None


class _Problem:
    """Arrays as the kernels take them, and how a kernel is launched on them.

    q, k and v are (B, T, heads · width), with whole chunks and whole lanes; gate and beta (B, programs, chunks, heads
    of a program, C), in float32; documents (B, chunks, 2, C): each token's, and that of the state before the chunk.
    """

    def __init__(self, arrays, document, scale: float, interpret: bool):
        q, k, v, gate, beta, state = arrays
        self.batch, self.length, heads, self.width = v.shape
        self.key_heads, self.depth = q.shape[2:]
        keys, members = config.tpu_heads(self.key_heads, heads)
        self.heads = Heads(keys, members, *(round_up(size, _LANES) for size in (self.depth, self.width)))
        self.programs, self.parts = heads // (keys * members), heads // self.key_heads // members
        self.chunks = cdiv(self.length, TPU_CHUNK)
        self.interpret, self.scale = interpret, scale
        self.dtype: Any = jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in (q, k, v)) else jnp.float32
        self.q, self.k, self.v = self.of_tokens(q), self.of_tokens(k), self.of_tokens(v)
        # Padding continues the last document with a gate and beta of 0: the state stays.
        self.gate, self.beta = self.of_numbers(gate), self.of_numbers(beta)
        number = self.padded(document, mode="edge").astype(jnp.float32).reshape(self.batch, self.chunks, TPU_CHUNK)
        before = jnp.pad(number[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
        self.documents = jnp.stack([number, jnp.broadcast_to(before, number.shape)], axis=2)
        self.state = self.of_state(state)

    def padded(self, x, mode: str = "constant"):
        """Whole chunks of an array (B, T, …)."""
        missing = self.chunks * TPU_CHUNK - self.length
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode=mode) if missing else x

    def of_tokens(self, x):
        missing = -x.shape[3] % _LANES
        x = self.padded(x.astype(self.dtype))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x
        return x.reshape(*x.shape[:2], -1)

    def of_numbers(self, x):
        x = self.padded(x.astype(jnp.float32)).reshape(self.batch, self.chunks, TPU_CHUNK, self.programs, -1)
        return jnp.transpose(x, (0, 3, 1, 4, 2))

    def of_state(self, x):
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), *[(0, -size % _LANES) for size in x.shape[2:]]))

    def without_padding(self, x, width: int):
        """(B, T, heads, width) of (B, T, heads · width) with padding."""
        x = x.reshape(*x.shape[:2], -1, round_up(width, _LANES))
        return x[:, : self.length, :, :width]

    def tokens_of(self, x):
        """(B, T, H) of numbers as the kernels have them."""
        x = jnp.transpose(x, (0, 2, 4, 1, 3))
        return x.reshape(self.batch, self.chunks * TPU_CHUNK, -1)[:, : self.length]

    def type_of(self, x, dtype):
        return out_like(self.v, x.shape, dtype)

    def launch(self, body, name: str, inputs, outputs, scratch=(), *, is_reversed: bool = False, **options):
        """Runs a kernel; `inputs` and `outputs` are pairs of an array or its type and the kind of its blocks."""
        order = (lambda n: self.chunks - 1 - n) if is_reversed else (lambda n: n)
        heads, size, parts = self.heads, TPU_CHUNK, self.parts
        count = heads.keys * heads.members
        kinds = {
            "key": ((None, size, heads.keys * heads.depth), lambda b, p, n: (b, order(n), p // parts)),
            "part": ((None, size, heads.keys * heads.depth), lambda b, p, n: (b, order(n), p)),
            "value": ((None, size, count * heads.width), lambda b, p, n: (b, order(n), p)),
            "numbers": ((None, None, None, count, size), lambda b, p, n: (b, p, order(n), 0, 0)),
            "documents": ((None, None, 2, size), lambda b, p, n: (b, order(n), 0, 0)),
            "state": ((None, count, heads.depth, heads.width), lambda b, p, n: (b, p, 0, 0)),
            "states": ((None, count, None, heads.depth, heads.width), lambda b, p, n: (b, p, order(n), 0, 0)),
            "inverses": ((None, count, None, size, size), lambda b, p, n: (b, p, order(n), 0, 0)),
        }
        options |= dict(heads=heads, arithmetic=Arithmetic(self.dtype), scale=self.scale)
        semantics = "parallel", "parallel", "arbitrary"
        return pl.pallas_call(
            functools.partial(body, **options),
            grid=(self.batch, self.programs, self.chunks),
            in_specs=[pl.BlockSpec(*kinds[kind]) for _, kind in inputs],
            out_specs=[pl.BlockSpec(*kinds[kind]) for _, kind in outputs],
            out_shape=[out for out, _ in outputs],
            scratch_shapes=scratch,
            compiler_params=tpu_params(self.interpret, *semantics, vmem_limit_bytes=vmem_limit(vmem_bytes())),
            interpret=tpu_interpreter(self.interpret),
            name=f"gated_delta_rule_{name}",
        )(*[x for x, _ in inputs])

    @property
    def arguments(self):
        """The inputs of every kernel but q."""
        numbers = [(self.gate, "numbers"), (self.beta, "numbers"), (self.documents, "documents")]
        return [(self.k, "key"), (self.v, "value"), *numbers]


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    document: jax.Array,
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q and k (B, T, K, D), v (B, T, H, E), gate and beta (B, T, H), state (B, H, D, E), all finite, and document
    (B, T), which counts from 0, the document of the state → the output in v's dtype, and the last state in float32.
    """
    del capability
    p = _Problem((q, k, v, gate, beta, state), document, scale, interpret)
    inputs = [(p.q, "key"), *p.arguments, (p.state, "state")]
    outputs = [(p.type_of(p.v, v.dtype), "value"), (p.type_of(p.state, jnp.float32), "state")]
    out, last = p.launch(mosaic_tpu_kernels.scan, "forward", inputs, outputs, has_output=True)
    return p.without_padding(out, p.width), last[..., : p.depth, : p.width]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    document: jax.Array,
    do: jax.Array,
    dlast: jax.Array,
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """`forward`'s arguments and the gradients by its results → the gradients by q, k, v, gate, beta and state."""
    del capability
    p = _Problem((q, k, v, gate, beta, state), document, scale, interpret)
    head_chunks = p.batch, v.shape[2], p.chunks
    states = out_like(p.v, (*head_chunks, *p.state.shape[2:]), p.dtype)
    inverses = out_like(p.v, (*head_chunks, TPU_CHUNK, TPU_CHUNK), p.dtype)
    carry = pltpu.VMEM((p.heads.keys * p.heads.members, *p.state.shape[2:]), jnp.float32)
    states, inverses = p.launch(
        mosaic_tpu_kernels.scan, "states", [*p.arguments, (p.state, "state")],
        [(states, "states"), (inverses, "inverses")], [carry], has_output=False,
    )  # fmt: skip
    inputs = [(p.q, "key"), *p.arguments, (p.of_tokens(do), "value"), (states, "states"), (inverses, "inverses")]
    whole = p.parts == 1
    of_keys = out_like(
        p.v, (*p.q.shape[:2], p.programs * p.heads.keys * p.heads.depth), p.dtype if whole else jnp.float32
    )
    numbers = p.type_of(p.gate, jnp.float32), "numbers"
    outputs = [(of_keys, "part"), (of_keys, "part"), (p.type_of(p.v, p.dtype), "value"), numbers, numbers]
    outputs += [(p.type_of(p.state, jnp.float32), "state")]
    dq, dk, dv, dgate, dbeta, dstate = p.launch(
        mosaic_tpu_kernels.gradients, "gradients", [*inputs, (p.of_state(dlast), "state")], outputs, is_reversed=True
    )
    dq, dk = (p.without_padding(x, p.depth) for x in (dq, dk))
    # The programs that share a key are added up.
    dq, dk = (x.reshape(*x.shape[:2], -1, p.parts, p.depth).sum(axis=3) for x in (dq, dk))
    gradients = [dq, dk, p.without_padding(dv, p.width), p.tokens_of(dgate), p.tokens_of(dbeta)]
    gradients = [x.astype(y.dtype) for x, y in zip(gradients, (q, k, v, gate, beta), strict=True)]
    return *gradients, dstate[..., : p.depth, : p.width].astype(state.dtype)
